//! Generates mostly valid frames, so that they pass many checks; addresses, ports and identifications come from small
//! pools, so that they repeat.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fastrand::Rng;
use kni_common::{Direction, IFINDEX_BASE};
use kni_integration::{
    frames::{Extension, Ip, Link, Payload, TcpFlags, arp_request, neighbour_solicitation},
    model::{Endpoint, Flow, Seen},
    programs::{FOREIGN, INTERFACES, Lockstep, runnable},
};

use super::{
    addresses::{HOSTS, address4, address6, host_mac, low, mac},
    beside::{VIRTUAL, virtual4, virtual6},
    mutate,
};

/// A frame and its position.
pub(super) struct Shot {
    pub(super) seen: Seen,
    pub(super) frame: Vec<u8>,
}

/// A frame, mutated or not, at a random position.
pub(super) fn shot(rng: &mut Rng, step: &Lockstep) -> Shot {
    let endpoint = if rng.u32(0..500) == 0 {
        FOREIGN
    } else {
        rng.u32(1..=INTERFACES)
    };
    let from_pod = rng.u32(0..10) < 7;
    let seen = if from_pod {
        Seen::from_pod(endpoint)
    } else {
        let other = IFINDEX_BASE + rng.u32(1..=INTERFACES);
        Seen::to_pod(endpoint, pick(rng, &[0, 0, 2, other, other]))
    };
    let known = step.model.world.endpoint(endpoint);
    loop {
        let mut frame = frame(rng, endpoint, known);
        if !from_pod {
            turn(rng, &mut frame, endpoint, known);
        }
        if rng.bool() {
            mutate::some(rng, &mut frame);
        }
        if runnable(&frame) && frame.len() <= 4096 {
            return Shot { seen, frame };
        }
    }
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.usize(0..from.len())]
}

/// Usually the first value, sometimes one of the others.
fn mostly<T: Copy>(rng: &mut Rng, usual: T, others: &[T]) -> T {
    if rng.u32(0..16) > 0 { usual } else { pick(rng, others) }
}

/// A frame that a pod might send.
pub(super) fn frame(rng: &mut Rng, id: u32, known: Option<&Endpoint>) -> Vec<u8> {
    let other = rng.u32(1..=INTERFACES);
    let source = mostly(rng, mac(id), &[mac(other), host_mac(id), [0xff; 6]]);
    let destination = mostly(rng, host_mac(id), &[mac(other), host_mac(other), [0xff; 6], mac(id)]);
    let mut link = Link::new(source, destination);
    if rng.u32(0..64) == 0 {
        link = link.vlan(5);
    }
    let is_v4 = match known {
        Some(Endpoint { ipv4: None, .. }) => rng.u32(0..16) == 0,
        Some(Endpoint { ipv6: None, .. }) => rng.u32(0..16) != 0,
        _ => rng.bool(),
    };
    let own: Option<IpAddr> = known.and_then(|endpoint| {
        if is_v4 {
            endpoint.ipv4.map(Into::into)
        } else {
            endpoint.ipv6.map(Into::into)
        }
    });
    let (from, to) = (own.unwrap_or_else(|| address(rng, is_v4)), address(rng, is_v4));
    let stranger = address(rng, is_v4);
    let from = mostly(rng, from, &[stranger]);
    match rng.u32(0..40) {
        0 => link.frame_of(
            pick(rng, &[0x0806, 0x8100, 0x88a8, 0x86dd, 0x0800, 0x8847]),
            &noise(rng, 80),
        ),
        1 => arp(rng, id, from),
        2 => solicitation(rng, id, from),
        _ => link.frame(&packet(rng, from, to)),
    }
}

/// A whole packet of a flow at that position, with any TCP flags.
pub(super) fn packet_of(rng: &mut Rng, seen: Seen, flow: &Flow) -> Vec<u8> {
    let ((source, from), (destination, to)) = (flow.source, flow.destination);
    let v4 = source.is_ipv4();
    let data = noise(rng, 40);
    let payload = match flow.protocol {
        6 => Payload::Tcp {
            source_port: from,
            destination_port: to,
            flags: pick(
                rng,
                &[
                    TcpFlags::ACK,
                    TcpFlags::ACK,
                    TcpFlags::ACK,
                    TcpFlags::SYN_ACK,
                    TcpFlags::SYN,
                    TcpFlags::FIN_ACK,
                    TcpFlags::FIN_ACK,
                    TcpFlags::RST,
                ],
            ),
            sequence: 1,
            data,
        },
        17 => Payload::udp(from, to, &data),
        132 => Payload::sctp_init(from, to),
        1 | 58 if v4 == (flow.protocol == 1) => echo(rng, v4, from, to),
        protocol => Payload::Raw { protocol, bytes: data },
    };
    let link = match seen.direction {
        Direction::FromPod => Link::new(mac(seen.endpoint), host_mac(seen.endpoint)),
        _ => Link::new(host_mac(seen.endpoint), mac(seen.endpoint)),
    };
    link.frame(&Ip::new(source, destination).packet(&payload))
}

/// A request, whose identifier is in place of the source port, or a reply.
fn echo(rng: &mut Rng, v4: bool, from: u16, to: u16) -> Payload {
    let data = noise(rng, 20);
    if from != 0 {
        return Payload::echo_request(v4, from, 1, &data);
    }
    Payload::Icmp {
        kind: if v4 { 0 } else { 129 },
        code: 0,
        body: [&to.to_be_bytes()[..], &[0, 1], &data].concat(),
    }
}

/// Converts a frame that a pod might send to one that might be sent to the pod.
fn turn(rng: &mut Rng, frame: &mut [u8], id: u32, known: Option<&Endpoint>) {
    frame[..6].copy_from_slice(&mac(id));
    frame[6..12].copy_from_slice(&host_mac(id));
    let Some(known) = known.filter(|_| rng.u32(0..16) > 0) else {
        return;
    };
    match (frame[12], known.ipv4, known.ipv6) {
        (0x08, Some(own), _) if frame.len() >= 34 && frame[13] == 0 => {
            frame[26..30].copy_from_slice(&address4_any(rng).octets());
            frame[30..34].copy_from_slice(&own.octets());
            let other = address4_any(rng).octets();
            turn_quote(frame, 42, 12, &[own.octets(), other].concat());
        }
        (0x86, _, Some(own)) if frame.len() >= 54 => {
            frame[22..38].copy_from_slice(&address6_any(rng).octets());
            frame[38..54].copy_from_slice(&own.octets());
            let other = address6_any(rng).octets();
            turn_quote(frame, 62, 8, &[own.octets(), other].concat());
        }
        _ => {}
    }
}

/// Sets source and destination of the quoted packet of an ICMP error, so that it came from the error's receiver.
fn turn_quote(frame: &mut [u8], quote: usize, at: usize, ends: &[u8]) {
    let is_error = matches!(
        (frame[12], frame.get(quote - 8)),
        (0x08, Some(3 | 11 | 12)) | (0x86, Some(1..=4))
    );
    if is_error && let Some(place) = frame.get_mut(quote + at..quote + at + ends.len()) {
        place.copy_from_slice(ends);
    }
}

fn address(rng: &mut Rng, is_v4: bool) -> IpAddr {
    if is_v4 {
        address4_any(rng).into()
    } else {
        address6_any(rng).into()
    }
}

fn address4_any(rng: &mut Rng) -> Ipv4Addr {
    let host = address4(rng.u32(2..2 + HOSTS));
    match rng.u32(0..24) {
        0 => address4(rng.u32(0..256)),
        1 => pick(
            rng,
            &[
                Ipv4Addr::UNSPECIFIED,
                Ipv4Addr::BROADCAST,
                Ipv4Addr::LOCALHOST,
                Ipv4Addr::new(224, 0, 0, 1),
                Ipv4Addr::new(169, 254, 1, 1),
            ],
        ),
        2 | 3 => Ipv4Addr::new(198, 51, 100, low(rng.u32(1..4))),
        4..=8 => virtual4(rng.u32(1..=VIRTUAL + 1)),
        _ => host,
    }
}

fn address6_any(rng: &mut Rng) -> Ipv6Addr {
    let host = address6(rng.u32(2..2 + HOSTS));
    match rng.u32(0..24) {
        0 => address6(rng.u32(0..256)),
        1 => pick(
            rng,
            &[
                Ipv6Addr::UNSPECIFIED,
                Ipv6Addr::LOCALHOST,
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1),
                Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped(),
            ],
        ),
        2 | 3 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, low(rng.u32(1..4)).into()),
        4..=8 => virtual6(rng.u32(1..=VIRTUAL + 1)),
        _ => host,
    }
}

fn noise(rng: &mut Rng, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; rng.usize(0..most)];
    rng.fill(&mut bytes);
    bytes
}

fn arp(rng: &mut Rng, id: u32, from: IpAddr) -> Vec<u8> {
    let sender = if let IpAddr::V4(v4) = from {
        v4
    } else {
        address4_any(rng)
    };
    let target = if rng.bool() {
        Ipv4Addr::new(169, 254, 1, 1)
    } else {
        address4_any(rng)
    };
    arp_request(mac(id), sender, target)
}

fn solicitation(rng: &mut Rng, id: u32, from: IpAddr) -> Vec<u8> {
    let own = if let IpAddr::V6(v6) = from {
        v6
    } else {
        address6_any(rng)
    };
    let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x42);
    let source = pick(rng, &[own, link_local, Ipv6Addr::UNSPECIFIED]);
    let gateway = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    let target = if rng.u32(0..4) > 0 { gateway } else { own };
    neighbour_solicitation(mac(id), source, target)
}

fn packet(rng: &mut Rng, from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut ip = Ip::new(from, to);
    ip.id = rng.u16(1..6);
    if from.is_ipv4() && rng.u32(0..12) == 0 {
        ip = ip.options(&options(rng));
    }
    if from.is_ipv6() && rng.u32(0..6) == 0 {
        for _ in 0..pick(rng, &[1, 1, 1, 2, 3, 6, 7]) {
            ip = ip.extension(extension(rng));
        }
    }
    let payload = payload(rng, from, to);
    if rng.u32(0..8) == 0 && !payload.to_bytes((ip.source, ip.destination)).is_empty() {
        let parts = ip.fragments(&payload, pick(rng, &[8, 16, 24]));
        return parts[rng.usize(0..parts.len())].clone();
    }
    ip.packet(&payload)
}

fn options(rng: &mut Rng) -> Vec<u8> {
    if rng.u32(0..4) == 0 {
        return vec![1; rng.usize(8..14)];
    }
    let mut bytes = Vec::new();
    for _ in 0..rng.u32(1..12) {
        bytes.extend_from_slice(pick(
            rng,
            &[
                &[1][..],
                &[148, 4, 0, 0],
                &[1],
                &[68, 3, 5],
                &[0],
                &[131, 3, 4],
                &[9, 1],
            ],
        ));
    }
    bytes.truncate(40);
    bytes
}

fn extension(rng: &mut Rng) -> Extension {
    let padding = vec![1, 4, 0, 0, 0, 0];
    match rng.u32(0..8) {
        0 | 1 => Extension::HopByHop(padding),
        2 => Extension::Routing(pick(rng, &[0, 2, 3, 4]), 0, vec![0; 4]),
        3 => Extension::Fragment {
            offset: pick(rng, &[0, 0, 8]),
            more: rng.bool(),
            id: rng.u32(1..6),
        },
        _ => Extension::DestinationOptions(padding),
    }
}

fn ports(rng: &mut Rng) -> (u16, u16) {
    let any = rng.u16(..);
    (pick(rng, &[80, 4000, 4001, any]), pick(rng, &[80, 4000, 4001]))
}

fn payload(rng: &mut Rng, from: IpAddr, to: IpAddr) -> Payload {
    let (source_port, destination_port) = ports(rng);
    match rng.u32(0..16) {
        0..=4 => Payload::Tcp {
            source_port,
            destination_port,
            flags: pick(
                rng,
                &[
                    TcpFlags::SYN,
                    TcpFlags::SYN_ACK,
                    TcpFlags::ACK,
                    TcpFlags::ACK,
                    TcpFlags::FIN_ACK,
                    TcpFlags::RST,
                ],
            ),
            sequence: 1,
            data: noise(rng, 40),
        },
        5..=8 => Payload::udp(source_port, destination_port, &noise(rng, 60)),
        9 => Payload::sctp_init(source_port, destination_port),
        10 | 11 => Payload::echo_request(from.is_ipv4(), source_port, 1, &noise(rng, 20)),
        12..=14 => icmp(rng, from, to),
        _ => Payload::Raw {
            protocol: pick(rng, &[47, 50, 51, 59, 1, 58, 4, 41, 255]),
            bytes: noise(rng, 40),
        },
    }
}

/// Errors about packets of the same pools, and all other types.
fn icmp(rng: &mut Rng, from: IpAddr, to: IpAddr) -> Payload {
    let kind = match (rng.u32(0..4), from.is_ipv4()) {
        (0, _) => rng.u8(..),
        (_, true) => pick(rng, &[3, 11, 12]),
        (_, false) => pick(rng, &[1, 2, 3, 4]),
    };
    let (source_port, destination_port) = ports(rng);
    let quoted = match rng.u32(0..3) {
        0 => Payload::udp(source_port, destination_port, b""),
        1 => Payload::tcp(source_port, destination_port, TcpFlags::ACK),
        _ => Payload::echo_request(from.is_ipv4(), source_port, 1, b""),
    };
    let mut ip = Ip::new(to, mostly(rng, from, &[to]));
    // The first fragment of several.
    ip.v4_fragment = if rng.u32(0..3) == 0 { 0x2000 } else { 0 };
    let quoted = ip.packet(&quoted);
    let body = [&[0; 4][..], &quoted].concat();
    Payload::Icmp { kind, code: 0, body }
}
