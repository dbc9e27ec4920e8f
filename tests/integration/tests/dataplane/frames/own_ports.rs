//! Tests frames of pods for a port of their own node that leads to a pod.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use kni_common::Verdict::{self, DestinationNotReady, NoRoute, PassedToStack, PolicyEgress, PolicyIngress, TupleInUse};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked, Enforced},
    require,
};

use super::table::{
    A4, A6, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FAMILIES, Table, V4_ONLY, endpoint, family, from, ip, outside_like,
    table,
};

/// Addresses of the node.
const NODE4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NODE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// The client's port, a port of the node that leads to a pod, one that does not, and the pod's port.
const CLIENT: u16 = 4000;
const OPEN: u16 = 8080;
const CLOSED: u16 = 8081;
const INNER: u16 = 80;
/// A policy set.
const SET: u32 = 9;

fn node_like(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { NODE4.into() } else { NODE6.into() }
}

/// Lets a port of every protocol lead to an endpoint.
fn lead(table: &mut Table<'_>, to: u32) -> Result<()> {
    let ports = [IpAddr::V4(NODE4), IpAddr::V6(NODE6)]
        .into_iter()
        .flat_map(|address| [6, 17, 132].map(|protocol| ((address, protocol, OPEN), (to, INNER))));
    table.step.lead_ports(&ports.collect())
}

fn payloads(from: u16, to: u16) -> [(&'static str, Payload); 3] {
    [
        ("TCP", Payload::tcp(from, to, TcpFlags::SYN)),
        ("UDP", Payload::udp(from, to, b"some data")),
        ("SCTP", Payload::sctp_init(from, to)),
    ]
}

/// Each with its replies, which come from the node.
#[test]
fn pods_reach_ports_of_their_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports of the own node", |table| {
        lead(table, DEFAULT_B)?;
        for (a, b) in FAMILIES {
            let node = node_like(a);
            for (index, (what, asked)) in payloads(CLIENT, OPEN).into_iter().enumerate() {
                let name = |rest: &str| format!("{} {what} {rest}", family(a));
                let (_, gotten) = &payloads(CLIENT, INNER)[index];
                let sent = from(DEFAULT_A).frame(&ip(a, node).packet(&asked));
                for round in ["first", "known"] {
                    table.becomes(&name(round), DEFAULT_A, &sent, DEFAULT_B, &ip(a, b).packet(gotten))?;
                }
                let [answer, seen] = [(INNER, CLIENT), (OPEN, CLIENT)].map(|(from, to)| match what {
                    "TCP" => Payload::tcp(from, to, TcpFlags::SYN_ACK),
                    "UDP" => Payload::udp(from, to, b"an answer"),
                    _ => Payload::sctp_init(from, to),
                });
                let answer = from(DEFAULT_B).frame(&ip(b, a).packet(&answer));
                let seen = ip(node, a).packet(&seen);
                table.becomes(&name("answer"), DEFAULT_B, &answer, DEFAULT_A, &seen)?;
                let (_, closed) = &payloads(CLIENT, CLOSED)[index];
                let closed = from(DEFAULT_A).frame(&ip(a, node).packet(closed));
                table.sent(&name("to another port"), DEFAULT_A, &closed, PassedToStack)?;
                let (_, outside) = &payloads(CLIENT, OPEN)[index];
                let outside = from(DEFAULT_A).frame(&ip(a, outside_like(a)).packet(outside));
                table.sent(&name("to another host"), DEFAULT_A, &outside, PassedToStack)?;
            }
            let echo = from(DEFAULT_A).frame(&ip(a, node).packet(&Payload::echo_request(a.is_ipv4(), OPEN, 1, b"")));
            table.sent(&format!("{} echo", family(a)), DEFAULT_A, &echo, PassedToStack)?;
        }
        Ok(())
    })
}

/// As through a Service: the node's address is the pod's peer.
#[test]
fn a_pod_reaches_its_own_port() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("the own port of the own node", |table| {
        lead(table, DEFAULT_A)?;
        for (a, _) in FAMILIES {
            let node = node_like(a);
            let sent = from(DEFAULT_A).frame(&ip(a, node).packet(&Payload::udp(CLIENT, OPEN, b"question")));
            let gotten = ip(node, a).packet(&Payload::udp(CLIENT, INNER, b"question"));
            table.becomes(family(a), DEFAULT_A, &sent, DEFAULT_A, &gotten)?;
            let answer = from(DEFAULT_A).frame(&ip(a, node).packet(&Payload::udp(INNER, CLIENT, b"answer")));
            let seen = ip(node, a).packet(&Payload::udp(OPEN, CLIENT, b"answer"));
            table.becomes(family(a), DEFAULT_A, &answer, DEFAULT_A, &seen)?;
        }
        Ok(())
    })
}

/// A port that leads to another network is for hosts outside, and pods without the node's stack have no node.
#[test]
fn networks_stay_apart_at_ports_of_the_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports of the node and networks", |table| {
        for (to, blue, default) in [
            (BLUE_B, NoRoute, PassedToStack),
            (DEFAULT_B, NoRoute, Verdict::Redirected),
        ] {
            lead(table, to)?;
            for (a, _) in FAMILIES {
                let packet = ip(a, node_like(a)).packet(&Payload::tcp(CLIENT, OPEN, TcpFlags::SYN));
                let name = format!("{} to endpoint {to}", family(a));
                table.fresh(&name, BLUE_A, &from(BLUE_A).frame(&packet), blue)?;
                table.fresh(&name, DEFAULT_A, &from(DEFAULT_A).frame(&packet), default)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_port_leads_to_a_ready_pod_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports of pods that are not ready", |table| {
        lead(table, DEFAULT_B)?;
        let frame = |a: IpAddr| from(DEFAULT_A).frame(&ip(a, node_like(a)).packet(&Payload::udp(CLIENT, OPEN, b"")));
        for (a, _) in FAMILIES {
            table.step.set_ready(DEFAULT_B, false)?;
            table.fresh(family(a), DEFAULT_A, &frame(a), DestinationNotReady)?;
            table.step.set_ready(DEFAULT_B, true)?;
            table.fresh(family(a), DEFAULT_A, &frame(a), Verdict::Redirected)?;
        }
        table.step.withdraw(DEFAULT_B)?;
        for (a, _) in FAMILIES {
            table.fresh(family(a), DEFAULT_A, &frame(a), PassedToStack)?;
        }
        // The next pod has another port, until the agent opens this one for it.
        table.step.publish(DEFAULT_B, &endpoint(DEFAULT_B))?;
        for (a, _) in FAMILIES {
            table.fresh(family(a), DEFAULT_A, &frame(a), PassedToStack)?;
        }
        lead(table, V4_ONLY)?;
        table.fresh(
            "an address of the family",
            DEFAULT_A,
            &frame(A4.into()),
            Verdict::Redirected,
        )?;
        table.fresh("none", DEFAULT_A, &frame(A6.into()), Verdict::DestinationAddress)?;
        Ok(())
    })
}

/// Both pods' policies apply as between the two, to the port of the pod, also to connections that exist.
#[test]
fn policies_apply_at_ports_of_the_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports of the node and policies", |table| {
        lead(table, DEFAULT_B)?;
        for (id, reason, asked) in [
            (DEFAULT_A, PolicyEgress, Asked::Egress),
            (DEFAULT_B, PolicyIngress, Asked::Ingress),
        ] {
            for (a, b) in FAMILIES {
                let sent =
                    |flags| from(DEFAULT_A).frame(&ip(a, node_like(a)).packet(&Payload::tcp(CLIENT, OPEN, flags)));
                let name = |rest: &str| format!("{} {} {rest}", family(a), reason.as_str());
                table.step.enforce(id, Enforced::default())?;
                table.fresh(&name("no policy"), DEFAULT_A, &sent(TcpFlags::SYN), Verdict::Redirected)?;
                let isolated = Enforced {
                    policy: SET,
                    ..Enforced::default()
                };
                for other in [Asked::Egress, Asked::Ingress] {
                    let (allowed, rule) = if other == asked {
                        (Allowed::Nothing, 0)
                    } else {
                        (Allowed::Everything, 1)
                    };
                    table.step.allow(SET, ANYBODY, other, allowed, rule)?;
                }
                table.step.enforce(id, isolated)?;
                table.sent(&name("of the connection"), DEFAULT_A, &sent(TcpFlags::ACK), reason)?;
                table.fresh(&name("of a new one"), DEFAULT_A, &sent(TcpFlags::SYN), reason)?;
                let direct = from(DEFAULT_A).frame(&ip(a, b).packet(&Payload::tcp(CLIENT, INNER, TcpFlags::SYN)));
                table.fresh(&name("as without the port"), DEFAULT_A, &direct, reason)?;
            }
            table.step.enforce(id, Enforced::default())?;
        }
        Ok(())
    })
}

/// Both would have the same replies.
#[test]
fn a_connection_to_the_pod_and_one_to_the_port_are_not_mixed() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports of the node and ports of the pod", |table| {
        lead(table, DEFAULT_B)?;
        for (a, b) in FAMILIES {
            let by_port =
                |flags| from(DEFAULT_A).frame(&ip(a, node_like(a)).packet(&Payload::tcp(CLIENT, OPEN, flags)));
            let direct = |flags| from(DEFAULT_A).frame(&ip(a, b).packet(&Payload::tcp(CLIENT, INNER, flags)));
            let answer = from(DEFAULT_B).frame(&ip(b, a).packet(&Payload::tcp(INNER, CLIENT, TcpFlags::SYN_ACK)));
            for (first, second) in [
                (by_port(TcpFlags::SYN), direct(TcpFlags::SYN)),
                (direct(TcpFlags::SYN), by_port(TcpFlags::SYN)),
            ] {
                table.fresh(family(a), DEFAULT_A, &first, Verdict::Redirected)?;
                table.sent(family(a), DEFAULT_B, &answer, Verdict::Redirected)?;
                table.sent(family(a), DEFAULT_A, &second, TupleInUse)?;
            }
        }
        Ok(())
    })
}
