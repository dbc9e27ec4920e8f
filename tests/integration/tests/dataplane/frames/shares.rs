//! Tests the limit of flows per endpoint: it affects only the opener.

use anyhow::Result;
use kni_common::Verdict::{Delivered, FlowQuota, PassedToStack};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{A4, B4, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, OUTSIDE4, RED_A, RED_B, Table, from, ip, table, to};

const FEW: u32 = 5;

fn syn(table: &mut Table<'_>, name: &str, id: u32, port: u16, receiver: u32) -> Result<()> {
    let frame = from(id).frame(&ip(A4, B4).packet(&Payload::tcp(port, 80, TcpFlags::SYN)));
    table.reaches(name, id, &frame, receiver)
}

#[test]
fn a_full_share_stops_only_its_owners_new_flows() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("shares", |table| {
        let lifetimes = table.step.model.lifetimes;
        table.step.configure(lifetimes, FEW, 0)?;
        syn(table, "somebody else's connection", RED_A, 4000, RED_B)?;
        for port in 0..5 {
            syn(table, "within the share", BLUE_A, 4000 + port, BLUE_B)?;
        }
        for port in 0..20 {
            let flood = from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::tcp(5000 + port, 80, TcpFlags::SYN)));
            table.sent("beyond the share", BLUE_A, &flood, FlowQuota)?;
        }
        // Datagrams have a share of their own, twice as large: their flows end by time only.
        let udp = |port| from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::udp(port, 53, b"")));
        for port in 0..10 {
            table.reaches("a datagram within its share", BLUE_A, &udp(4000 + port), BLUE_B)?;
        }
        table.sent("a datagram beyond its share", BLUE_A, &udp(5000), FlowQuota)?;
        // Known flows continue in both directions, as do those of other endpoints.
        let known = from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::tcp(4000, 80, TcpFlags::ACK)));
        table.reaches("the flooder's established flow", BLUE_A, &known, BLUE_B)?;
        let back = from(BLUE_B).frame(&ip(B4, A4).packet(&Payload::tcp(80, 4000, TcpFlags::ACK)));
        table.reaches("its answer", BLUE_B, &back, BLUE_A)?;
        let other = from(RED_A).frame(&ip(A4, B4).packet(&Payload::tcp(4000, 80, TcpFlags::ACK)));
        table.reaches("somebody else's established flow", RED_A, &other, RED_B)?;
        syn(table, "somebody else's new flow", RED_A, 4001, RED_B)?;
        let own = from(BLUE_B).frame(&ip(B4, A4).packet(&Payload::tcp(4000, 80, TcpFlags::SYN)));
        table.reaches("a new flow to the flooder", BLUE_B, &own, BLUE_A)?;
        // A finished connection frees one flow: by RST, or by FIN of both.
        let end = |flags| from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::tcp(4001, 80, flags)));
        table.reaches("RST", BLUE_A, &end(TcpFlags::RST), BLUE_B)?;
        syn(table, "in the place of it", BLUE_A, 5000, BLUE_B)?;
        let another = from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::tcp(5001, 80, TcpFlags::SYN)));
        table.sent("another one", BLUE_A, &another, FlowQuota)?;
        let fin = from(BLUE_A).frame(&ip(A4, B4).packet(&Payload::tcp(4000, 80, TcpFlags::FIN_ACK)));
        table.reaches("FIN", BLUE_A, &fin, BLUE_B)?;
        table.sent("while it is half closed", BLUE_A, &another, FlowQuota)?;
        let fin = from(BLUE_B).frame(&ip(B4, A4).packet(&Payload::tcp(80, 4000, TcpFlags::FIN_ACK)));
        table.reaches("FIN of the other side", BLUE_B, &fin, BLUE_A)?;
        table.sent("while it has a row", BLUE_A, &another, FlowQuota)?;
        table.reaches("the last ACK", BLUE_A, &known, BLUE_B)?;
        table.reaches("when the row is gone", BLUE_A, &another, BLUE_B)?;
        // The agent counts again and resets the share.
        table.step.flush()?;
        table.step.clear_shares()?;
        syn(table, "when there is room again", BLUE_A, 6000, BLUE_B)
    })
}

/// Flows from the stack count for the receiving pod, because external peers have no share, but take nothing of what the
/// pod may open itself.
#[test]
fn flows_from_the_stack_count_for_their_receiver_apart_from_its_own() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("shares of receivers", |table| {
        let lifetimes = table.step.model.lifetimes;
        table.step.configure(lifetimes, FEW, 0)?;
        let asks = |port, id: u32, own: std::net::Ipv4Addr| {
            to(id).frame(&ip(OUTSIDE4, own).packet(&Payload::udp(port, 53, b"")))
        };
        for port in 0..5 {
            table.received(
                "within the share",
                DEFAULT_A,
                &asks(5000 + port, DEFAULT_A, A4),
                Delivered,
            )?;
        }
        table.received("beyond it", DEFAULT_A, &asks(6000, DEFAULT_A, A4), FlowQuota)?;
        table.received("a known one", DEFAULT_A, &asks(5000, DEFAULT_A, A4), Delivered)?;
        let answer = from(DEFAULT_A).frame(&ip(A4, OUTSIDE4).packet(&Payload::udp(53, 5000, b"")));
        table.sent("its answer", DEFAULT_A, &answer, PassedToStack)?;
        table.received("to somebody else", DEFAULT_B, &asks(6000, DEFAULT_B, B4), Delivered)?;
        let own = from(DEFAULT_A).frame(&ip(A4, OUTSIDE4).packet(&Payload::udp(4000, 53, b"")));
        table.sent("its own question", DEFAULT_A, &own, PassedToStack)?;
        let own = from(DEFAULT_A).frame(&ip(A4, OUTSIDE4).packet(&Payload::tcp(4000, 80, TcpFlags::SYN)));
        table.sent("its own connection", DEFAULT_A, &own, PassedToStack)?;
        Ok(())
    })
}
