//! Tests packets from and to the node's stack: only in the default network, and replies take the path of the request.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{IFINDEX_BASE, Verdict};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{
    A4, A6, B4, B6, BLUE_A, DEFAULT_A, DEFAULT_B, FAMILIES, OUTSIDE4, OUTSIDE6, V4_ONLY, from, ip, table, tcp, to, udp,
};

fn outside(like: IpAddr) -> IpAddr {
    if like.is_ipv4() {
        OUTSIDE4.into()
    } else {
        OUTSIDE6.into()
    }
}

#[test]
fn the_node_reaches_the_default_network_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("host access", |table| {
        for (a, b) in FAMILIES {
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let node = outside(a);
            let mut case = |name: &str, id: u32, source, destination, expected| {
                table.step.flush()?;
                let frame = to(id).frame(&udp(source, destination));
                table.received(&format!("{family} {name}"), id, &frame, expected)
            };
            case("from the node", DEFAULT_A, node, a, Verdict::Delivered)?;
            case("from the node", BLUE_A, node, a, Verdict::HostNotAllowed)?;
            case("the node as another pod", DEFAULT_A, b, a, Verdict::SourceAddress)?;
            case("the node as the pod itself", DEFAULT_A, a, a, Verdict::SourceAddress)?;
            case("the node as another pod", BLUE_A, b, a, Verdict::HostNotAllowed)?;
            case("for the other pod", DEFAULT_A, node, b, Verdict::DestinationAddress)?;
            case("for somebody outside", DEFAULT_A, b, node, Verdict::DestinationAddress)?;
            let (many, nobody): (IpAddr, IpAddr) = if a.is_ipv4() {
                ("224.0.0.251".parse()?, "0.0.0.0".parse()?)
            } else {
                ("ff02::fb".parse()?, "::".parse()?)
            };
            case("multicast", DEFAULT_A, node, many, Verdict::Multicast)?;
            case("for no address", DEFAULT_A, node, nobody, Verdict::DestinationAddress)?;
            case(
                "for no address, without IPv6",
                V4_ONLY,
                node,
                nobody,
                Verdict::DestinationAddress,
            )?;
        }
        let broadcast = to(DEFAULT_A).frame(&udp(OUTSIDE4, [255; 4]));
        table.received("broadcast", DEFAULT_A, &broadcast, Verdict::Multicast)?;
        let cut = &to(DEFAULT_A).frame(&udp(B4, A4))[..40];
        table.received("cut short", DEFAULT_A, cut, Verdict::Truncated)?;
        let mapped = to(DEFAULT_A).frame(&udp(B4.to_ipv6_mapped(), A6));
        table.received("v4-mapped source", DEFAULT_A, &mapped, Verdict::Malformed)?;
        let stale = to(DEFAULT_B).frame(&udp(OUTSIDE6, A6));
        table.received("by a stale route", DEFAULT_B, &stale, Verdict::DestinationAddress)?;
        let six = to(DEFAULT_B).frame(&udp(OUTSIDE6, B6));
        table.received("and a right one", DEFAULT_B, &six, Verdict::Delivered)?;
        Ok(())
    })
}

/// [`DEFAULT_A`] sent the packet into the stack.
const A_SENDS: u32 = IFINDEX_BASE + DEFAULT_A;

/// NAT of another program has translated the request in the stack; only the stack can translate the reply back.
#[test]
fn answers_go_back_through_the_stack() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("stack flows", |table| {
        for (a, b) in FAMILIES {
            table.step.flush()?;
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let name = |rest: &str| format!("{family} {rest}");
            let back = |flags| ip(b, a).packet(&Payload::tcp(80, 4000, flags));
            let syn = to(DEFAULT_B).frame(&tcp(a, b, TcpFlags::SYN));
            table.forwarded(&name("SYN by the stack"), A_SENDS, DEFAULT_B, &syn, Verdict::Delivered)?;
            let syn_ack = from(DEFAULT_B).frame(&back(TcpFlags::SYN_ACK));
            table.sent(&name("its SYN+ACK"), DEFAULT_B, &syn_ack, Verdict::PassedToStack)?;
            let ack = to(DEFAULT_B).frame(&tcp(a, b, TcpFlags::ACK));
            table.forwarded(&name("ACK by the stack"), A_SENDS, DEFAULT_B, &ack, Verdict::Delivered)?;
            let data = from(DEFAULT_B).frame(&back(TcpFlags::ACK));
            table.sent(&name("data"), DEFAULT_B, &data, Verdict::PassedToStack)?;
            let other = from(DEFAULT_B).frame(&ip(b, a).packet(&Payload::tcp(81, 4000, TcpFlags::ACK)));
            table.reaches(&name("another flow to the same pod"), DEFAULT_B, &other, DEFAULT_A)?;
            let error = from(DEFAULT_B).frame(&error(b, a, &tcp(a, b, TcpFlags::ACK)));
            table.sent(&name("error about it"), DEFAULT_B, &error, Verdict::PassedToStack)?;
            // The pod opens a connection between the same ports: the state of the old one does not apply.
            let opens = from(DEFAULT_B).frame(&back(TcpFlags::SYN));
            table.reaches(&name("SYN of its own"), DEFAULT_B, &opens, DEFAULT_A)?;
            table.reaches(&name("data behind it"), DEFAULT_B, &data, DEFAULT_A)?;
            let answer = from(DEFAULT_A).frame(&tcp(a, b, TcpFlags::SYN_ACK));
            table.reaches(&name("and its answer"), DEFAULT_A, &answer, DEFAULT_B)?;
            // A new connection through the stack replaces it.
            table.forwarded(
                &name("SYN by the stack again"),
                A_SENDS,
                DEFAULT_B,
                &syn,
                Verdict::Delivered,
            )?;
            table.sent(&name("data again"), DEFAULT_B, &data, Verdict::PassedToStack)?;
        }
        Ok(())
    })
}

fn error(source: IpAddr, destination: IpAddr, quoted: &[u8]) -> Vec<u8> {
    let kind = if source.is_ipv4() { 3 } else { 1 };
    let body = [&[0; 4][..], quoted].concat();
    ip(source, destination).packet(&Payload::Icmp { kind, code: 1, body })
}

#[test]
fn errors_from_the_stack_are_about_what_the_pod_sent_there() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("errors from the stack", |table| {
        for (a, b) in FAMILIES {
            table.step.flush()?;
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let name = |rest: &str| format!("{family} {rest}");
            let (far, question) = (outside(a), udp(a, outside(a)));
            let told = to(DEFAULT_A).frame(&error(far, a, &question));
            table.received(&name("about nothing"), DEFAULT_A, &told, Verdict::IcmpUnrelated)?;
            table.sent(
                &name("question"),
                DEFAULT_A,
                &from(DEFAULT_A).frame(&question),
                Verdict::PassedToStack,
            )?;
            table.received(&name("about the question"), DEFAULT_A, &told, Verdict::Delivered)?;
            let router = to(DEFAULT_A).frame(&error(
                if a.is_ipv4() {
                    [192, 0, 2, 1].into()
                } else {
                    "2001:db8:1::1".parse()?
                },
                a,
                &question,
            ));
            table.received(
                &name("about the question, by a router"),
                DEFAULT_A,
                &router,
                Verdict::Delivered,
            )?;
            let wrong_pod = to(DEFAULT_B).frame(&error(far, b, &question));
            table.received(&name("to the wrong pod"), DEFAULT_B, &wrong_pod, Verdict::IcmpUnrelated)?;
            let direct = udp(a, b);
            table.reaches(
                &name("straight to the peer"),
                DEFAULT_A,
                &from(DEFAULT_A).frame(&direct),
                DEFAULT_B,
            )?;
            let told = to(DEFAULT_A).frame(&error(b, a, &direct));
            table.received(
                &name("about what went straight"),
                DEFAULT_A,
                &told,
                Verdict::IcmpUnrelated,
            )?;
            let answer = to(DEFAULT_A).frame(&udp(far, a));
            table.received(
                &name("a packet of the other direction"),
                DEFAULT_A,
                &answer,
                Verdict::Delivered,
            )?;
        }
        let reply = to(DEFAULT_A).frame(&ip(OUTSIDE4, A4).packet(&Payload::udp(53, 4000, b"answer")));
        table.received("IPv4 answer to the question", DEFAULT_A, &reply, Verdict::Delivered)?;
        Ok(())
    })
}

/// An RST from outside may be forged: the pod's TCP knows, and its next packet shows it.
#[test]
fn a_reset_from_outside_ends_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("resets from outside", |table| {
        for (a, _) in FAMILIES {
            let far = outside(a);
            let sent = |flags| from(DEFAULT_A).frame(&ip(a, far).packet(&Payload::tcp(4000, 80, flags)));
            let received = |flags| to(DEFAULT_A).frame(&ip(far, a).packet(&Payload::tcp(80, 4000, flags)));
            let times = table.step.model.lifetimes;
            table.step.flush()?;
            table.sent("SYN", DEFAULT_A, &sent(TcpFlags::SYN), Verdict::PassedToStack)?;
            table.received("SYN+ACK", DEFAULT_A, &received(TcpFlags::SYN_ACK), Verdict::Delivered)?;
            table.sent("ACK", DEFAULT_A, &sent(TcpFlags::ACK), Verdict::PassedToStack)?;
            for live in [true, false] {
                table.received("RST", DEFAULT_A, &received(TcpFlags::RST), Verdict::Delivered)?;
                table.step.compare_tables()?;
                let lifetimes: Vec<u64> = table.step.model.flows.values().map(|row| row.lifetime).collect();
                ensure!(lifetimes == [u64::from(times.tcp_closing)], "{lifetimes:?}");
                if live {
                    table.sent("data", DEFAULT_A, &sent(TcpFlags::ACK), Verdict::PassedToStack)?;
                    table.step.compare_tables()?;
                    let lifetimes: Vec<u64> = table.step.model.flows.values().map(|row| row.lifetime).collect();
                    ensure!(lifetimes == [u64::from(times.tcp_established)], "{lifetimes:?}");
                }
            }
            // The pod's own RST ends the flow at once.
            table.sent(
                "RST of the pod",
                DEFAULT_A,
                &sent(TcpFlags::RST),
                Verdict::PassedToStack,
            )?;
            ensure!(table.step.model.flows.is_empty(), "rows are left");
            table.step.compare_tables()?;
        }
        Ok(())
    })
}
