//! Tests the program in front of the uplink: refused sources and malformed packets, also behind a VLAN tag.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, ensure};
use kni_common::{Direction, Verdict};
use kni_integration::{
    frames::{ETHERTYPE_ARP, Ip, Link, Payload, truncations},
    programs::{Programs, hex, runnable},
    require,
};

/// The control information of a priority tag: priority 5, VLAN 0.
const PRIORITY: u16 = 5 << 13;
/// That of a tag for VLAN 100, with the same priority.
const VLAN_100: u16 = PRIORITY + 100;

fn link() -> Link {
    Link::new([2, 0, 0, 0, 9, 1], [2, 0, 0, 0, 9, 2])
}

fn packet(source: IpAddr) -> Vec<u8> {
    let to = if source.is_ipv4() { "192.0.2.1" } else { "2001:db8::1" };
    Ip::new(source, to.parse().expect("an address")).packet(&Payload::udp(4000, 53, b"data"))
}

/// Packets that the program has dropped for the reason.
fn drops(programs: &Programs, reason: Verdict) -> Result<u64> {
    let all = programs.dataplane().drops()?;
    let found = all
        .iter()
        .find(|drop| drop.direction == Direction::FromUplink && drop.reason == reason);
    Ok(found.map_or(0, |drop| drop.count.packets))
}

/// The reasons of this program.
const REASONS: [Verdict; 4] = [
    Verdict::BogonSource,
    Verdict::DenyListed,
    Verdict::Malformed,
    Verdict::Truncated,
];

/// Checks that the frame is dropped and counted for this reason and no other, or passes and is not counted.
fn expect(programs: &Programs, name: &str, frame: &[u8], reason: Option<Verdict>) -> Result<()> {
    let counted = || {
        REASONS
            .into_iter()
            .map(|one| drops(programs, one))
            .collect::<Result<Vec<_>>>()
    };
    let before = counted()?;
    let passes = programs.passes_xdp_uplink(frame)?;
    let more: Vec<_> = before
        .iter()
        .zip(counted()?)
        .map(|(before, after)| after - before)
        .collect();
    let expected: Vec<_> = REASONS.into_iter().map(|one| u64::from(Some(one) == reason)).collect();
    ensure!(
        passes == reason.is_none() && more == expected,
        "{name}: passes: {passes}, drops for {REASONS:?}: {more:?}, expected {reason:?}: {}",
        hex(frame)
    );
    Ok(())
}

fn uplink(name: &str, work: impl FnOnce(&Programs) -> Result<()> + Send) -> Result<()> {
    Programs::inside(name, 1024, |programs| {
        let refused = BTreeMap::from([
            ("10.0.0.0/8".parse()?, Verdict::BogonSource),
            ("fd00::/8".parse()?, Verdict::BogonSource),
            ("203.0.113.0/24".parse()?, Verdict::DenyListed),
            ("2001:db8:bad::/48".parse()?, Verdict::DenyListed),
        ]);
        programs.dataplane().set_sources(&refused)?;
        work(&programs)
    })
}

/// Each source, and the reason for which its packets are dropped.
const SOURCES: [(&str, Option<Verdict>); 6] = [
    ("198.51.100.9", None),
    ("2001:db8:1::9", None),
    ("10.1.2.3", Some(Verdict::BogonSource)),
    ("fd00::3", Some(Verdict::BogonSource)),
    ("203.0.113.7", Some(Verdict::DenyListed)),
    ("2001:db8:bad::7", Some(Verdict::DenyListed)),
];

#[test]
fn refused_sources_are_dropped_with_their_reason() -> Result<()> {
    require!(root, netns, bpf, ip);
    uplink("xdp_uplink", |programs| {
        for (source, reason) in SOURCES {
            let packet = packet(source.parse()?);
            expect(programs, source, &link().frame(&packet), reason)?;
        }
        let arp = link().frame_of(ETHERTYPE_ARP, &[0; 28]);
        expect(programs, "ARP", &arp, None)
    })
}

/// The stack removes a tag with VLAN 0 and takes the packet as one without a tag.
#[test]
fn a_priority_tag_does_not_hide_a_source() -> Result<()> {
    require!(root, netns, bpf, ip);
    uplink("priority tags", |programs| {
        for (source, reason) in SOURCES {
            let packet = packet(source.parse()?);
            let tagged = link().vlan(PRIORITY).frame(&packet);
            expect(programs, &format!("{source} behind 802.1Q"), &tagged, reason)?;
            let mut tagged = tagged;
            tagged[12..14].copy_from_slice(&[0x88, 0xa8]);
            expect(programs, &format!("{source} behind 802.1ad"), &tagged, reason)?;
        }
        for source in ["198.51.100.9", "2001:db8:1::9"] {
            let frame = link().vlan(PRIORITY).frame(&packet(source.parse()?));
            for part in truncations(&frame).filter(|part| runnable(part)) {
                let name = format!("{} of {} bytes", part.len(), frame.len());
                expect(programs, &name, part, Some(Verdict::Truncated))?;
            }
            let mut version = frame.clone();
            version[18] = version[18] & 0x0f | 0x50;
            expect(programs, "version 5", &version, Some(Verdict::Malformed))?;
        }
        let arp = link().vlan(PRIORITY).frame_of(ETHERTYPE_ARP, &[0; 28]);
        expect(programs, "ARP", &arp, None)
    })
}

/// The stack removes any number of them, so that a second one would hide the source again.
#[test]
fn a_second_priority_tag_is_malformed() -> Result<()> {
    require!(root, netns, bpf, ip);
    uplink("two priority tags", |programs| {
        for (source, _) in SOURCES {
            let twice = link().vlan(PRIORITY).vlan(0).frame(&packet(source.parse()?));
            expect(programs, source, &twice, Some(Verdict::Malformed))?;
        }
        Ok(())
    })
}

/// A VLAN is another network, with sources of its own.
#[test]
fn frames_of_a_vlan_pass() -> Result<()> {
    require!(root, netns, bpf, ip);
    uplink("VLAN", |programs| {
        for (source, _) in SOURCES {
            let packet = packet(source.parse()?);
            let one = link().vlan(VLAN_100).frame(&packet);
            expect(programs, &format!("{source} in a VLAN"), &one, None)?;
            let behind = link().vlan(PRIORITY).vlan(VLAN_100).frame(&packet);
            expect(
                programs,
                &format!("{source} in a VLAN behind a priority tag"),
                &behind,
                None,
            )?;
        }
        Ok(())
    })
}
