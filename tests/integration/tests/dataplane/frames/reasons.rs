//! Tests every drop reason with a packet: counted, reported as an event, and predicted by a dry run.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, Verdict};
use kni_integration::{
    frames::{Payload, TcpFlags, arp_request},
    model::{ANYBODY, Allowed, Asked, Seen, Service},
    programs::{FOREIGN, Lockstep, Programs, options},
    require,
};

use super::{
    policy::select,
    table::{
        A4, A6, B4, B6, BLUE, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FREE, OUTSIDE4, UNUSED4, VIRTUAL4, endpoint, from,
        ip, mac, service, table, tcp, to, udp,
    },
};

/// Reasons of the uplink's and the tunnel's programs, and of packets to other nodes, which no test here sends.
const NOT_YET: &[Verdict] = &[
    Verdict::MasqueradePorts,
    Verdict::MasqueradeProtocol,
    Verdict::MasqueradeAddress,
    Verdict::TooBig,
    Verdict::TimeExceeded,
    Verdict::Untranslated,
    Verdict::BogonSource,
    Verdict::DenyListed,
    Verdict::EgressAddress,
    Verdict::NoNode,
    Verdict::ForeignNode,
    Verdict::UnknownNetwork,
    Verdict::OwnerUnknown,
    Verdict::OverlayPort,
    Verdict::NoFlow,
];
/// Tested by [`a_table_that_takes_nothing_drops`], because it needs two concurrent programs.
const BY_ITSELF: &[Verdict] = &[Verdict::FlowTableFull];

fn plain() -> Vec<u8> {
    from(BLUE_A).frame(&udp(A4, B4))
}

#[expect(clippy::unnecessary_wraps, reason = "an arm of the tables below")]
fn sent(frame: Vec<u8>) -> Option<Shot> {
    Some((Seen::from_pod(BLUE_A), frame))
}

fn changed(change: impl Fn(&mut Vec<u8>)) -> Option<Shot> {
    let mut frame = plain();
    change(&mut frame);
    sent(frame)
}

fn to_virtual() -> Vec<u8> {
    from(BLUE_A).frame(&ip(A4, VIRTUAL4).packet(&Payload::tcp(4000, 80, TcpFlags::SYN)))
}

/// An ICMP error.
fn error(from: Ipv4Addr, to: Ipv4Addr, quoted: &[u8]) -> Vec<u8> {
    let body = [&[0; 4][..], quoted].concat();
    ip(from, to).packet(&Payload::Icmp { kind: 3, code: 3, body })
}

/// A frame and its position.
type Shot = (Seen, Vec<u8>);

/// A frame that is dropped for the reason, with the state that causes it.
fn shot(step: &mut Lockstep, reason: Verdict) -> Result<Option<Shot>> {
    if let Some(shot) = wrong_by_itself(reason) {
        return Ok(Some(shot));
    }
    if let Some(shot) = wrong_here(step, reason)? {
        return Ok(Some(shot));
    }
    wrong_after_others(step, reason)
}

/// Reasons that are independent of the state.
fn wrong_by_itself(reason: Verdict) -> Option<Shot> {
    match reason {
        Verdict::NoEndpoint => Some((Seen::from_pod(FOREIGN), plain())),
        Verdict::EndpointNotReady => Some((Seen::from_pod(FREE), plain())),
        Verdict::Truncated => changed(|frame| frame.truncate(40)),
        Verdict::Malformed => changed(|frame| frame[14] = 0x55),
        Verdict::VlanTagged => sent(from(BLUE_A).vlan(5).frame(&udp(A4, B4))),
        Verdict::UnsupportedEthertype => sent(from(BLUE_A).frame_of(0x8847, &[0; 46])),
        Verdict::SourceMac => changed(|frame| frame[6..12].copy_from_slice(&mac(BLUE_B))),
        Verdict::SourceAddress => sent(arp_request(mac(BLUE_A), B4, [169, 254, 1, 1].into())),
        Verdict::DestinationMac => changed(|frame| frame[..6].copy_from_slice(&mac(BLUE_B))),
        Verdict::DestinationAddress => Some((Seen::to_pod(DEFAULT_A, 0), to(DEFAULT_A).frame(&udp(OUTSIDE4, B4)))),
        Verdict::Multicast => sent(from(BLUE_A).frame(&udp(A4, [224, 0, 0, 251]))),
        Verdict::LinkLocal => sent(from(BLUE_A).frame(&udp(A6, [0xfe80, 0, 0, 0, 0, 0, 0, 9]))),
        Verdict::SourceRoute => {
            sent(from(BLUE_A).frame(&ip(A4, B4).options(&[131, 3, 4, 0]).packet(&Payload::udp(1, 2, b""))))
        }
        Verdict::ExtensionHeaders => {
            sent(from(BLUE_A).frame(&ip(A4, B4).options(&[1; 12]).packet(&Payload::udp(1, 2, b""))))
        }
        Verdict::FragmentWithoutFirst => sent(from(BLUE_A).frame(&ip(A4, B4).fragment(17, &[0; 8], 800, false))),
        Verdict::IcmpType => sent(from(BLUE_A).frame(&ip(A6, B6).packet(&Payload::Icmp {
            kind: 200,
            code: 0,
            body: vec![0; 4],
        }))),
        Verdict::IcmpUnrelated => sent(from(BLUE_A).frame(&error(A4, B4, &udp(B4, A4)))),
        _ => None,
    }
}

/// Reasons that depend on endpoints and enforced policies.
fn wrong_here(step: &mut Lockstep, reason: Verdict) -> Result<Option<Shot>> {
    let virt = VIRTUAL4.into();
    let found = match reason {
        Verdict::NoRoute => sent(from(BLUE_A).frame(&udp(A4, OUTSIDE4))),
        Verdict::NoDestination => sent(from(BLUE_A).frame(&udp(A4, UNUSED4))),
        Verdict::DestinationNotReady => {
            step.set_ready(BLUE_B, false)?;
            sent(plain())
        }
        Verdict::SelfAddressed => sent(from(BLUE_A).frame(&udp(A4, A4))),
        Verdict::HostNotAllowed => Some((Seen::to_pod(BLUE_A, 0), to(BLUE_A).frame(&udp(OUTSIDE4, A4)))),
        Verdict::Loopback => sent(from(BLUE_A).frame(&udp(A4, [127, 0, 0, 1]))),
        Verdict::PolicyEgress => {
            select(step, BLUE_A, 50)?;
            sent(plain())
        }
        Verdict::PolicyIngress => {
            select(step, BLUE_B, 50)?;
            sent(plain())
        }
        Verdict::PolicyExternal => {
            step.allow(51, ANYBODY, Asked::Egress, Allowed::Everything, 1)?;
            select(step, DEFAULT_A, 51)?;
            Some((Seen::from_pod(DEFAULT_A), from(DEFAULT_A).frame(&udp(A4, OUTSIDE4))))
        }
        Verdict::NoService => sent(to_virtual()),
        Verdict::NoServicePort => {
            step.serve((BLUE, virt, 17, 80), &service(1, &[(B4.into(), 80)]))?;
            sent(to_virtual())
        }
        Verdict::NoBackend => {
            step.serve((BLUE, virt, 6, 80), &service(1, &[]))?;
            sent(to_virtual())
        }
        Verdict::NoLocalBackend => {
            let here = Service {
                local_only: true,
                ..service(1, &[])
            };
            step.serve((BLUE, virt, 6, 80), &here)?;
            sent(to_virtual())
        }
        _ => None,
    };
    Ok(found)
}

/// Reasons that depend on earlier packets.
fn wrong_after_others(step: &mut Lockstep, reason: Verdict) -> Result<Option<Shot>> {
    let virt = VIRTUAL4.into();
    let found = match reason {
        Verdict::FlowQuota => {
            let lifetimes = step.model.lifetimes;
            step.configure(lifetimes, 1, 0)?;
            let other = ip(A4, B4).packet(&Payload::tcp(4999, 80, TcpFlags::SYN));
            step.run(Direction::FromPod, BLUE_A, &from(BLUE_A).frame(&other))?;
            sent(from(BLUE_A).frame(&tcp(A4, B4, TcpFlags::SYN)))
        }
        Verdict::TupleInUse => {
            step.serve((BLUE, virt, 6, 80), &service(1, &[(B4.into(), 80)]))?;
            step.run(Direction::FromPod, BLUE_A, &to_virtual())?;
            let answer = ip(B4, A4).packet(&Payload::tcp(80, 4000, TcpFlags::SYN_ACK));
            step.run(Direction::FromPod, BLUE_B, &from(BLUE_B).frame(&answer))?;
            sent(from(BLUE_A).frame(&tcp(A4, B4, TcpFlags::SYN)))
        }
        Verdict::IcmpFragment => {
            step.serve((BLUE, virt, 17, 53), &service(1, &[(B4.into(), 53)]))?;
            step.run(Direction::FromPod, BLUE_A, &from(BLUE_A).frame(&udp(A4, VIRTUAL4)))?;
            let mut first = ip(A4, B4);
            first.v4_fragment = 0x2000;
            let quoted = first.packet(&Payload::udp(4000, 53, b"data"));
            Some((Seen::from_pod(BLUE_B), from(BLUE_B).frame(&error(B4, A4, &quoted))))
        }
        _ => None,
    };
    Ok(found)
}

/// Removes the state that the last packet needed.
fn restore(step: &mut Lockstep) -> Result<()> {
    for id in [BLUE_A, BLUE_B, DEFAULT_A] {
        select(step, id, 0)?;
        step.set_ready(id, true)?;
    }
    let fronts: Vec<_> = step.model.world.services.fronts.keys().copied().collect();
    for front in fronts {
        step.unserve(front)?;
    }
    let lifetimes = step.model.lifetimes;
    step.configure(lifetimes, 0, 0)?;
    step.clear_shares()?;
    step.flush()
}

/// The dry run, the counter and the event agree.
#[test]
fn every_reason_to_drop_has_a_packet_that_is_dropped_for_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("reasons", |table| {
        for reason in Verdict::ALL.iter().filter(|verdict| verdict.is_drop()) {
            restore(table.step)?;
            let excused = NOT_YET.contains(reason) || BY_ITSELF.contains(reason);
            let made = shot(table.step, *reason)?;
            ensure!(
                made.is_some() != excused,
                "{}: no packet is dropped for it",
                reason.as_str()
            );
            let Some((seen, frame)) = made else { continue };
            table.at(reason.as_str(), seen, &frame, *reason)?;
            let told = table.step.events(Duration::from_secs(2))?;
            let told = told.iter().filter(|record| record.verdict == *reason).count();
            ensure!(told == 1, "{}: {told} events", reason.as_str());
        }
        Ok(())
    })
}

/// Two concurrent programs claim the only row of a table; the one without a row drops its packet.
#[test]
fn a_table_that_takes_nothing_drops() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("full", 1, |programs| {
        let mut step = Lockstep::new(programs)?;
        step.set_routes(super::table::DEFAULT, &["10.0.0.0/24".parse()?], true)?;
        for id in [DEFAULT_A, DEFAULT_B] {
            step.publish(id, &endpoint(id))?;
        }
        let lifetimes = step.model.lifetimes;
        step.configure(lifetimes, 0, 0)?;
        // The same maps, different programs: a lock protects the first ones.
        let (others, _events) = kni_dataplane::Dataplane::open(&options(1)?)?;
        let others = Programs::from(others);
        let asks = |id, own| to(id).frame(&tcp(OUTSIDE4, own, TcpFlags::SYN));
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            std::thread::scope(|scope| -> Result<()> {
                let one = scope.spawn(|| others.repeat(Seen::to_pod(DEFAULT_B, 0), &asks(DEFAULT_B, B4), 100_000));
                step.programs()
                    .repeat(Seen::to_pod(DEFAULT_A, 0), &asks(DEFAULT_A, A4), 100_000)?;
                one.join().expect("a test run does not panic")
            })?;
            let drops = step.programs().dataplane().drops()?;
            let full = drops.iter().filter(|drop| drop.reason == Verdict::FlowTableFull);
            let full: u64 = full.map(|drop| drop.count.packets).sum();
            if full > 0 {
                println!("{full} packets found the table full");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "no packet found the table full");
        }
    })
    .context("a full table")
}
