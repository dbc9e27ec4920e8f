//! Tests the layer below IP: tags, frame types, ARP, neighbour discovery.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Result, ensure};
use kni_common::Verdict;
use kni_integration::{
    frames::{Extension, Payload, arp_request, checksum, neighbour_solicitation},
    require,
};

use super::table::{
    A4, A6, B4, B6, BLUE_A, BLUE_B, DEFAULT_A, FAMILIES, Table, V4_ONLY, from, host_mac, ip, mac, table, to, udp,
};

const GATEWAY4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const OWN_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x42);

#[test]
fn tags_and_unknown_ethertypes_are_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ethertypes", |table| {
        for (a, b) in FAMILIES {
            let packet = udp(a, b);
            let tagged = from(BLUE_A).vlan(5).frame(&packet);
            let twice = from(BLUE_A).vlan(5).vlan(6).frame(&packet);
            table.fresh("802.1Q tag", BLUE_A, &tagged, Verdict::VlanTagged)?;
            table.fresh("two 802.1Q tags", BLUE_A, &twice, Verdict::VlanTagged)?;
            table.received(
                "802.1Q tag",
                DEFAULT_A,
                &to(DEFAULT_A).vlan(5).frame(&packet),
                Verdict::VlanTagged,
            )?;
            for (name, ethertype, expected) in [
                ("802.1ad tag", 0x88a8, Verdict::VlanTagged),
                ("old QinQ tag", 0x9100, Verdict::UnsupportedEthertype),
                ("MPLS", 0x8847, Verdict::UnsupportedEthertype),
                ("LLDP", 0x88cc, Verdict::UnsupportedEthertype),
                ("PPPoE", 0x8864, Verdict::UnsupportedEthertype),
                ("RARP", 0x8035, Verdict::UnsupportedEthertype),
                ("length field (802.3)", 46, Verdict::UnsupportedEthertype),
            ] {
                table.fresh(name, BLUE_A, &from(BLUE_A).frame_of(ethertype, &packet), expected)?;
                table.received(name, DEFAULT_A, &to(DEFAULT_A).frame_of(ethertype, &packet), expected)?;
            }
        }
        let v6_as_v4 = from(BLUE_A).frame_of(0x0800, &udp(A6, B6));
        table.fresh("IPv6 packet as IPv4", BLUE_A, &v6_as_v4, Verdict::Malformed)?;
        let v4_as_v6 = from(BLUE_A).frame_of(0x86dd, &[udp(A4, B4), vec![0; 40]].concat());
        table.fresh("IPv4 packet as IPv6", BLUE_A, &v4_as_v6, Verdict::Malformed)?;
        Ok(())
    })
}

#[test]
fn arp_is_answered_for_the_gateway_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("arp", |table| {
        let ask = |sender, target| arp_request(mac(BLUE_A), sender, target);
        let answer = table.fresh("gateway", BLUE_A, &ask(A4, GATEWAY4), Verdict::Answered)?;
        let expected = [
            &mac(BLUE_A)[..],
            &host_mac(BLUE_A),
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
            &host_mac(BLUE_A),
            &[169, 254, 1, 1],
            &mac(BLUE_A),
            &A4.octets(),
        ]
        .concat();
        ensure!(answer == expected, "the ARP answer is {answer:02x?}");
        let probe = ask([0; 4].into(), GATEWAY4);
        let answer = table.fresh("gateway, without a sender address", BLUE_A, &probe, Verdict::Answered)?;
        ensure!(answer[38..42] == [0; 4], "the answer to a probe names an address");
        for (name, sender, target, expected) in [
            ("the peer", A4, B4, Verdict::Absorbed),
            ("announcement", A4, A4, Verdict::Absorbed),
            ("sender address is the peer's", B4, GATEWAY4, Verdict::SourceAddress),
            ("sender address is the gateway's", GATEWAY4, B4, Verdict::SourceAddress),
        ] {
            table.fresh(name, BLUE_A, &ask(sender, target), expected)?;
        }
        let frame = ask(A4, GATEWAY4);
        table.fresh("cut short", BLUE_A, &frame[..41], Verdict::Truncated)?;
        let padded = [&frame[..], &[0; 18]].concat();
        table.fresh("padded", BLUE_A, &padded, Verdict::Answered)?;
        table.received("from the node", DEFAULT_A, &frame, Verdict::Absorbed)?;
        Ok(())
    })
}

#[test]
fn arp_that_lies_is_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("arp fields", |table| {
        for (name, at, bytes, expected) in [
            ("sender MAC is the peer's", 22, &mac(BLUE_B)[..], Verdict::SourceAddress),
            ("source MAC is the peer's", 6, &mac(BLUE_B)[..], Verdict::SourceMac),
            ("reply", 20, &[0, 2], Verdict::Absorbed),
            ("unknown operation", 20, &[0, 9], Verdict::Absorbed),
            ("other hardware", 14, &[0, 6], Verdict::Malformed),
            ("other protocol", 16, &[0x86, 0xdd], Verdict::Malformed),
            ("other lengths", 18, &[6, 16], Verdict::Malformed),
        ] {
            let mut frame = arp_request(mac(BLUE_A), A4, GATEWAY4);
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            table.fresh(name, BLUE_A, &frame, expected)?;
        }
        Ok(())
    })
}

fn solicited(table: &mut Table<'_>, name: &str, id: u32, source: Ipv6Addr) -> Result<()> {
    let frame = neighbour_solicitation(mac(id), source, GATEWAY6);
    let answer = table.fresh(name, id, &frame, Verdict::Answered)?;
    ensure!(
        answer[..12] == [mac(id), host_mac(id)].concat(),
        "MAC addresses of the answer"
    );
    ensure!(
        answer[22..38] == GATEWAY6.octets() && answer[38..54] == source.octets(),
        "addresses of the answer"
    );
    ensure!(answer[21] == 255, "hop limit of the answer");
    // Advertisement; router, solicited, override; the target; its link-layer address.
    ensure!(
        answer[54..56] == [136, 0] && answer[58..62] == [0xe0, 0, 0, 0],
        "head of the answer"
    );
    ensure!(answer[62..78] == GATEWAY6.octets(), "target of the answer");
    ensure!(
        answer[78..] == [&[2, 1][..], &host_mac(id)].concat(),
        "option of the answer"
    );
    // The sum over a message with a correct checksum is 0.
    let sum = checksum(&[&answer[22..54], &[0, 0, 0, 32, 0, 0, 0, 58], &answer[54..]]);
    ensure!(sum == 0, "checksum of the answer is wrong by {sum:04x}");
    Ok(())
}

#[test]
fn solicitations_are_answered_for_the_gateway_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("neighbour discovery", |table| {
        solicited(table, "gateway, from the own address", BLUE_A, A6)?;
        solicited(table, "gateway, from a link-local address", BLUE_A, OWN_LINK_LOCAL)?;
        solicited(table, "gateway, without an IPv6 address", V4_ONLY, OWN_LINK_LOCAL)?;
        let ask = |source, target| neighbour_solicitation(mac(BLUE_A), source, target);
        let unspecified = Ipv6Addr::UNSPECIFIED;
        table.fresh(
            "duplicate address detection",
            BLUE_A,
            &ask(unspecified, A6),
            Verdict::Absorbed,
        )?;
        table.fresh(
            "the same for the gateway",
            BLUE_A,
            &ask(unspecified, GATEWAY6),
            Verdict::Absorbed,
        )?;
        table.fresh("the peer", BLUE_A, &ask(A6, B6), Verdict::Absorbed)?;
        table.fresh(
            "source address is the peer's",
            BLUE_A,
            &ask(B6, GATEWAY6),
            Verdict::SourceAddress,
        )?;
        let changed = |at: usize, byte: u8| {
            let mut frame = ask(A6, GATEWAY6);
            frame[at] = byte;
            frame
        };
        table.fresh("hop limit 254", BLUE_A, &changed(21, 254), Verdict::Absorbed)?;
        table.fresh("code 1", BLUE_A, &changed(55, 1), Verdict::Absorbed)?;
        table.fresh("source MAC is the peer's", BLUE_A, &changed(11, 2), Verdict::SourceMac)?;
        let body = [&[0; 4][..], &GATEWAY6.octets()].concat();
        let without_option = Payload::Icmp {
            kind: 135,
            code: 0,
            body,
        };
        let bare = |ip: kni_integration::frames::Ip| from(BLUE_A).frame(&ip.hop_limit(255).packet(&without_option));
        let answer = table.fresh(
            "gateway, without an option",
            BLUE_A,
            &bare(ip(A6, GATEWAY6)),
            Verdict::Answered,
        )?;
        let sum = checksum(&[&answer[22..54], &[0, 0, 0, 24, 0, 0, 0, 58], &answer[54..]]);
        ensure!(
            sum == 0 && answer.len() == 78,
            "answer without an option: {answer:02x?}"
        );
        let extended = ip(A6, GATEWAY6).extension(Extension::HopByHop(vec![1, 4, 0, 0, 0, 0]));
        table.fresh("behind an extension header", BLUE_A, &bare(extended), Verdict::Absorbed)?;
        table.received("from the node", DEFAULT_A, &ask(A6, GATEWAY6), Verdict::Absorbed)?;
        Ok(())
    })
}

/// Only the gateway may answer a pod's neighbour and router discovery.
#[test]
fn other_link_control_ends_at_the_interface() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("link control", |table| {
        let all: IpAddr = "ff02::1".parse()?;
        let message = |kind| Payload::Icmp {
            kind,
            code: 0,
            body: vec![0; 20],
        };
        for (name, kind) in [
            ("listener query", 130),
            ("listener report", 131),
            ("listener done", 132),
            ("router solicitation", 133),
            ("router advertisement", 134),
            ("neighbour advertisement", 136),
            ("redirect", 137),
            ("listener report v2", 143),
        ] {
            for (to_whom, destination) in [("all", all), ("the peer", B6.into())] {
                let packet = ip(OWN_LINK_LOCAL, destination).hop_limit(255).packet(&message(kind));
                let name = format!("{name} to {to_whom}");
                table.fresh(&name, BLUE_A, &from(BLUE_A).frame(&packet), Verdict::Absorbed)?;
                let packet = ip(B6, destination).hop_limit(255).packet(&message(kind));
                let name = format!("{name}, spoofed");
                table.fresh(&name, BLUE_A, &from(BLUE_A).frame(&packet), Verdict::SourceAddress)?;
            }
            let packet = ip(OWN_LINK_LOCAL, A6).hop_limit(255).packet(&message(kind));
            table.received(
                &format!("{name} from the node"),
                BLUE_A,
                &to(BLUE_A).frame(&packet),
                Verdict::Absorbed,
            )?;
        }
        Ok(())
    })
}
