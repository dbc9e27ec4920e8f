//! Tests changes of endpoints: no flow outlives the state that its decision was based on.

use std::net::Ipv4Addr;

use anyhow::Result;
use kni_common::{IFINDEX_BASE, Verdict};
use kni_integration::{frames::TcpFlags, model::Endpoint, require};

use super::table::{
    A4, B4, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FAMILIES, FREE, OUTSIDE4, RED, RED_A, RED_B, endpoint, from, table,
    tcp, to, udp,
};

#[test]
fn nothing_passes_while_an_end_is_not_ready() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("readiness", |table| {
        for (a, b) in FAMILIES {
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let name = |rest: &str| format!("{family} {rest}");
            let there = from(BLUE_A).frame(&tcp(a, b, TcpFlags::ACK));
            let back = from(BLUE_B).frame(&tcp(b, a, TcpFlags::ACK));
            table.reaches(&name("both ready"), BLUE_A, &there, BLUE_B)?;
            table.step.set_ready(BLUE_B, false)?;
            table.sent(
                &name("receiver not ready, known flow"),
                BLUE_A,
                &there,
                Verdict::DestinationNotReady,
            )?;
            table.fresh(
                &name("receiver not ready, new flow"),
                BLUE_A,
                &there,
                Verdict::DestinationNotReady,
            )?;
            table.sent(&name("sender not ready"), BLUE_B, &back, Verdict::EndpointNotReady)?;
            table.received(&name("receiver not ready"), BLUE_B, &there, Verdict::EndpointNotReady)?;
            table.step.set_ready(BLUE_B, true)?;
            table.reaches(&name("ready again"), BLUE_A, &there, BLUE_B)?;
            table.reaches(&name("ready again, other direction"), BLUE_B, &back, BLUE_A)?;
            table.step.withdraw(BLUE_B)?;
            table.sent(
                &name("receiver gone, known flow"),
                BLUE_A,
                &there,
                Verdict::NoDestination,
            )?;
            table.sent(&name("sender gone"), BLUE_B, &back, Verdict::EndpointNotReady)?;
            table.step.publish(BLUE_B, &endpoint(BLUE_B))?;
            table.reaches(&name("receiver back"), BLUE_A, &there, BLUE_B)?;
        }
        Ok(())
    })
}

#[test]
fn a_changed_endpoint_is_judged_anew() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("changes", |table| {
        let out = from(DEFAULT_A).frame(&tcp(A4, OUTSIDE4, TcpFlags::ACK));
        table.sent("to the stack", DEFAULT_A, &out, Verdict::PassedToStack)?;
        let answer = to(DEFAULT_A).frame(&udp(OUTSIDE4, A4));
        table.received("from the stack", DEFAULT_A, &answer, Verdict::Delivered)?;
        let closed = Endpoint {
            host_access: false,
            ..endpoint(DEFAULT_A)
        };
        table.step.publish(DEFAULT_A, &closed)?;
        table.sent("to the stack, access revoked", DEFAULT_A, &out, Verdict::NoRoute)?;
        table.received(
            "from the stack, access revoked",
            DEFAULT_A,
            &answer,
            Verdict::HostNotAllowed,
        )?;
        table.step.publish(DEFAULT_A, &endpoint(DEFAULT_A))?;
        table.sent("to the stack, access given", DEFAULT_A, &out, Verdict::PassedToStack)?;

        // A flow through the stack ends with its receiver: the next owner's packets are evaluated independently.
        let question = to(DEFAULT_B).frame(&tcp(A4, B4, TcpFlags::SYN));
        let reply = from(DEFAULT_B).frame(&tcp_back());
        let ingress = IFINDEX_BASE + DEFAULT_A;
        table.forwarded(
            "question by the stack",
            ingress,
            DEFAULT_B,
            &question,
            Verdict::Delivered,
        )?;
        table.sent("answer", DEFAULT_B, &reply, Verdict::PassedToStack)?;
        table.step.withdraw(DEFAULT_B)?;
        table.step.publish(DEFAULT_B, &endpoint(DEFAULT_B))?;
        table.reaches("answer of the next owner", DEFAULT_B, &reply, DEFAULT_A)?;
        Ok(())
    })
}

fn tcp_back() -> Vec<u8> {
    let payload = kni_integration::frames::Payload::tcp(80, 4000, TcpFlags::ACK);
    super::table::ip(B4, A4).packet(&payload)
}

/// The slot, the MAC address and even the IP address of a removed pod may be reused in another network.
#[test]
fn a_reused_slot_inherits_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("reuse", |table| {
        let there = from(BLUE_A).frame(&tcp(A4, B4, TcpFlags::ACK));
        table.reaches("before", BLUE_A, &there, BLUE_B)?;
        table.step.withdraw(BLUE_B)?;
        let moved = Endpoint {
            network: RED,
            ipv4: Some(Ipv4Addr::new(10, 0, 0, 9)),
            ipv6: None,
            ..endpoint(BLUE_B)
        };
        table.step.publish(BLUE_B, &moved)?;
        table.sent("slot now in another network", BLUE_A, &there, Verdict::NoDestination)?;
        let to_moved = from(RED_A).frame(&udp(A4, [10, 0, 0, 9]));
        table.reaches("its own network reaches it", RED_A, &to_moved, BLUE_B)?;
        let blue = from(BLUE_A).frame(&udp(A4, [10, 0, 0, 9]));
        table.sent("its old network does not", BLUE_A, &blue, Verdict::NoDestination)?;

        // The address is moved to another slot of the same network.
        table.step.publish(
            FREE,
            &Endpoint {
                network: 1,
                ipv4: Some(B4),
                ..endpoint(FREE)
            },
        )?;
        table.reaches("the address's new slot", BLUE_A, &there, FREE)?;
        let stale = from(BLUE_B).frame(&tcp(B4, A4, TcpFlags::ACK));
        table.sent(
            "the old slot with its old address",
            BLUE_B,
            &stale,
            Verdict::SourceAddress,
        )?;
        // Red is unaffected.
        let red = from(RED_A).frame(&tcp(A4, B4, TcpFlags::ACK));
        table.reaches("red", RED_A, &red, RED_B)
    })
}
