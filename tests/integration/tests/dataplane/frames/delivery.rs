//! Tests valid packets: each protocol, both families, always within the network.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict;
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{
    A4, A6, B4, B6, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FAMILIES, OUTSIDE4, OUTSIDE6, RED_A, RED_B, UNUSED4, UNUSED6,
    V4_ONLY, from, ip, table, udp,
};

fn payloads(is_v4: bool) -> Vec<(&'static str, Payload)> {
    let raw = |protocol, bytes: &[u8]| Payload::Raw {
        protocol,
        bytes: bytes.to_vec(),
    };
    let mut payloads = vec![
        ("TCP SYN", Payload::tcp(4000, 80, TcpFlags::SYN)),
        ("TCP SYN+ACK", Payload::tcp(4000, 80, TcpFlags::SYN_ACK)),
        ("TCP ACK", Payload::tcp(4000, 80, TcpFlags::ACK)),
        ("TCP FIN", Payload::tcp(4000, 80, TcpFlags::FIN_ACK)),
        ("TCP RST", Payload::tcp(4000, 80, TcpFlags::RST)),
        ("UDP", Payload::udp(4000, 53, b"data")),
        ("UDP without data", Payload::udp(4000, 53, b"")),
        ("SCTP INIT", Payload::sctp_init(5000, 5001)),
        ("echo request", Payload::echo_request(is_v4, 7, 1, b"ping")),
        (
            "echo reply",
            Payload::Icmp {
                kind: if is_v4 { 0 } else { 129 },
                code: 0,
                body: vec![0, 7, 0, 1],
            },
        ),
        ("GRE", raw(47, &[0; 8])),
        ("ESP", raw(50, &[1; 16])),
        ("no next header", raw(59, &[])),
        (
            "ICMP of the other family",
            raw(if is_v4 { 58 } else { 1 }, &[134, 0, 0, 0, 0, 0, 0, 0]),
        ),
    ];
    if is_v4 {
        for (name, kind) in [("timestamp", 13), ("timestamp reply", 14)] {
            let body = vec![0; 16];
            payloads.push((name, Payload::Icmp { kind, code: 0, body }));
        }
    }
    payloads
}

/// Two networks with the same addresses: the frames differ only in the MAC addresses.
#[test]
fn valid_packets_reach_the_own_networks_peer() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("delivery", |table| {
        for (a, b) in FAMILIES {
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            for (what, payload) in payloads(a.is_ipv4()) {
                for (network, there, back) in [("blue", BLUE_A, BLUE_B), ("red", RED_A, RED_B)] {
                    let name = format!("{family} {what} in {network}");
                    table.reaches(&name, there, &from(there).frame(&ip(a, b).packet(&payload)), back)?;
                    let name = format!("{family} {what} in {network}, answer");
                    table.reaches(&name, back, &from(back).frame(&ip(b, a).packet(&payload)), there)?;
                }
            }
        }
        Ok(())
    })
}

/// Name, endpoint, destination of each family, verdict.
type Destination = (&'static str, u32, [IpAddr; 2], Verdict);

fn destinations() -> Vec<Destination> {
    let both = |v4: [u8; 4], v6: [u16; 8]| [IpAddr::from(v4), IpAddr::from(v6)];
    let nobody = [UNUSED4.into(), UNUSED6.into()];
    let outside = [OUTSIDE4.into(), OUTSIDE6.into()];
    let dns = both([224, 0, 0, 251], [0xff02, 0, 0, 0, 0, 0, 0, 0xfb]);
    let wide = both([239, 1, 2, 3], [0xff0e, 0, 0, 0, 0, 0, 0, 1]);
    let loopback = both([127, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]);
    vec![
        ("own address", BLUE_A, [A4.into(), A6.into()], Verdict::SelfAddressed),
        ("nobody's", BLUE_A, nobody, Verdict::NoDestination),
        ("nobody's, with host access", DEFAULT_A, nobody, Verdict::NoDestination),
        ("outside", BLUE_A, outside, Verdict::NoRoute),
        ("outside, with host access", DEFAULT_A, outside, Verdict::PassedToStack),
        ("multicast", BLUE_A, dns, Verdict::Multicast),
        ("wide multicast", DEFAULT_A, wide, Verdict::Multicast),
        ("loopback", DEFAULT_A, loopback, Verdict::Loopback),
        ("unspecified", BLUE_A, both([0; 4], [0; 8]), Verdict::NoRoute),
    ]
}

#[test]
fn other_destinations_are_refused_by_name() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("destinations", |table| {
        for (name, id, destination, expected) in destinations() {
            for (own, destination) in [(IpAddr::from(A4), destination[0]), (A6.into(), destination[1])] {
                let frame = from(id).frame(&udp(own, destination));
                table.fresh(&format!("{name} {destination}"), id, &frame, expected)?;
            }
        }
        let link_local: IpAddr = "fe80::1".parse()?;
        let frame = from(DEFAULT_A).frame(&udp(A6, link_local));
        table.fresh("IPv6 link-local", DEFAULT_A, &frame, Verdict::LinkLocal)?;
        for (name, destination, expected) in [
            ("broadcast", [255; 4], Verdict::Multicast),
            ("the subnet's broadcast", [10, 0, 0, 255], Verdict::NoDestination),
            ("reserved address", [240, 0, 0, 1], Verdict::NoRoute),
            // Outside the subnets: node-local services use such addresses.
            ("IPv4 link-local", [169, 254, 1, 1], Verdict::NoRoute),
        ] {
            table.fresh(name, BLUE_A, &from(BLUE_A).frame(&udp(A4, destination)), expected)?;
        }
        Ok(())
    })
}

/// One endpoint has an address that does not exist in any other network, and no IPv6 address.
#[test]
fn an_address_counts_in_its_network_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("addresses", |table| {
        let v4_only = [10, 0, 0, 7];
        let frame = |id| from(id).frame(&udp(A4, v4_only));
        table.reaches("the default network's address", DEFAULT_A, &frame(DEFAULT_A), V4_ONLY)?;
        table.fresh("the same from blue", BLUE_A, &frame(BLUE_A), Verdict::NoDestination)?;
        table.fresh("the same from red", RED_A, &frame(RED_A), Verdict::NoDestination)?;
        let reply = from(V4_ONLY).frame(&udp(v4_only, A4));
        table.reaches("and its answer", V4_ONLY, &reply, DEFAULT_A)?;
        let six = from(V4_ONLY).frame(&udp(A6, B6));
        table.fresh("IPv6 without an IPv6 address", V4_ONLY, &six, Verdict::SourceAddress)?;
        let to_b = from(V4_ONLY).frame(&udp(v4_only, B4));
        table.reaches("IPv4 works there", V4_ONLY, &to_b, DEFAULT_B)
    })
}
