//! Tests the lifetimes of flows: before the first answer, after it, and after the end of a connection.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{
    Direction,
    Verdict::{self, PolicyEgress, Redirected},
};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked, Entry, Flow, Lifetimes},
    require,
};

use super::{
    policy::select,
    table::{BLUE, BLUE_A, BLUE_B, FAMILIES, Table, family, from, ip, table},
};

/// Maximum duration of a test in ticks.
const SLACK: u32 = 5000;
const NOTHING: u32 = 40;

/// Whether packets of the server still belong to the flow: it may not open a flow itself.
fn answer(table: &mut Table<'_>, name: &str, ends: (IpAddr, IpAddr), payload: &Payload, lives: bool) -> Result<()> {
    let expected = if lives { Redirected } else { PolicyEgress };
    let frame = from(BLUE_B).frame(&ip(ends.1, ends.0).packet(payload));
    table.sent(name, BLUE_B, &frame, expected).map(drop)
}

fn ask(table: &mut Table<'_>, name: &str, ends: (IpAddr, IpAddr), payload: &Payload) -> Result<()> {
    let frame = from(BLUE_A).frame(&ip(ends.0, ends.1).packet(payload));
    table.sent(name, BLUE_A, &frame, Redirected).map(drop)
}

fn entry(table: &Table<'_>, ends: (IpAddr, IpAddr), protocol: u8, ports: (u16, u16)) -> Result<Entry> {
    let flow = Flow {
        network: BLUE,
        protocol,
        source: (ends.0, ports.0),
        destination: (ends.1, ports.1),
    };
    table.step.compare_tables()?;
    let found = table.step.model.flows.get(&flow).copied();
    found.ok_or_else(|| anyhow::anyhow!("no flow {flow:?}"))
}

/// Protocol, name, request, answer, lifetimes before and after the first answer.
type Life = (u8, &'static str, [Payload; 2], [u32; 2]);

fn lives(v4: bool, times: &Lifetimes) -> [Life; 4] {
    let echo = |kind| Payload::Icmp {
        kind,
        code: 0,
        body: vec![0, 7, 0, 1],
    };
    let tcp = |from, to, flags| Payload::tcp(from, to, flags);
    [
        (
            6,
            "TCP",
            [tcp(4000, 80, TcpFlags::SYN), tcp(80, 4000, TcpFlags::SYN_ACK)],
            [times.tcp_new, times.tcp_established],
        ),
        (
            17,
            "UDP",
            [Payload::udp(4000, 53, b""), Payload::udp(53, 4000, b"")],
            [times.other_new, times.udp_established],
        ),
        (
            132,
            "SCTP",
            [Payload::sctp_init(4000, 80), Payload::sctp_init(80, 4000)],
            [times.other_new, times.sctp_established],
        ),
        (
            if v4 { 1 } else { 58 },
            "echo",
            if v4 { [echo(8), echo(0)] } else { [echo(128), echo(129)] },
            [times.other_new, times.other_established],
        ),
    ]
}

#[test]
fn a_flow_lives_longer_once_it_was_answered() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("lifetimes", |table| {
        let times = table.step.model.lifetimes;
        for ends in FAMILIES {
            let lives = lives(ends.0.is_ipv4(), &times);
            for (_, what, [question, reply], [new, established]) in lives {
                let name = |rest: &str| format!("{} {what} {rest}", family(ends.0));
                ensure!(new > SLACK && established > 2 * SLACK, "too short to be told");
                select(table.step, BLUE_B, 0)?;
                table.step.flush()?;
                ask(table, &name("question"), ends, &question)?;
                select(table.step, BLUE_B, NOTHING)?;
                table
                    .step
                    .allow(NOTHING, ANYBODY, Asked::Ingress, Allowed::Everything, 1)?;
                table.step.age(new + 1)?;
                answer(table, &name("answer, too late"), ends, &reply, false)?;
                ask(table, &name("question again"), ends, &question)?;
                table.step.age(new - SLACK)?;
                answer(table, &name("answer, in time"), ends, &reply, true)?;
                // Each packet restarts the timeout, regardless of its direction.
                for _ in 0..2 {
                    table.step.age(established - SLACK)?;
                    answer(table, &name("answer, later"), ends, &reply, true)?;
                }
                table.step.age(established + 1)?;
                answer(table, &name("answer, when it is over"), ends, &reply, false)?;
            }
        }
        Ok(())
    })
}

/// Packets of one direction keep the other one alive.
#[test]
fn a_flow_that_only_one_side_uses_lives_on() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("one side", |table| {
        let times = table.step.model.lifetimes;
        for ends in FAMILIES {
            let (question, reply) = (Payload::udp(4000, 53, b""), Payload::udp(53, 4000, b""));
            select(table.step, BLUE_B, 0)?;
            ask(table, "question", ends, &question)?;
            answer(table, "answer", ends, &reply, true)?;
            table
                .step
                .allow(NOTHING, ANYBODY, Asked::Ingress, Allowed::Everything, 1)?;
            select(table.step, BLUE_B, NOTHING)?;
            for _ in 0..4 {
                table.step.age(times.udp_established - SLACK)?;
                ask(table, "only questions", ends, &question)?;
            }
            answer(table, "an answer at last", ends, &reply, true)?;
        }
        Ok(())
    })
}

fn segment(from_client: bool, flags: TcpFlags) -> Payload {
    let (from, to) = if from_client { (4000, 80) } else { (80, 4000) };
    Payload::tcp(from, to, flags)
}

/// Opens a connection, and then forbids the server to open flows.
fn connect(table: &mut Table<'_>, name: &str, ends: (IpAddr, IpAddr)) -> Result<()> {
    table.step.flush()?;
    select(table.step, BLUE_B, 0)?;
    ask(table, &format!("{name}, SYN"), ends, &segment(true, TcpFlags::SYN))?;
    answer(
        table,
        &format!("{name}, SYN+ACK"),
        ends,
        &segment(false, TcpFlags::SYN_ACK),
        true,
    )?;
    only_receives(table)
}

fn only_receives(table: &mut Table<'_>) -> Result<()> {
    table
        .step
        .allow(NOTHING, ANYBODY, Asked::Ingress, Allowed::Everything, 1)?;
    select(table.step, BLUE_B, NOTHING)
}

/// After FIN of both sides the remaining lifetime is short; a new SYN restores the full lifetime.
#[test]
fn a_connection_that_is_over_is_forgotten_soon() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ends of connections", |table| {
        let times = table.step.model.lifetimes;
        for ends in FAMILIES {
            for client_first in [true, false] {
                let name = family(ends.0);
                connect(table, name, ends)?;
                for client in [client_first, !client_first] {
                    if client {
                        ask(table, "FIN of the client", ends, &segment(true, TcpFlags::FIN_ACK))?;
                    } else {
                        answer(
                            table,
                            "FIN of the server",
                            ends,
                            &segment(false, TcpFlags::FIN_ACK),
                            true,
                        )?;
                    }
                    let closed = client != client_first;
                    for (ends, ports) in [(ends, (4000, 80)), ((ends.1, ends.0), (80, 4000))] {
                        let row = entry(table, ends, 6, ports)?;
                        let lifetime = if closed {
                            times.tcp_closing
                        } else {
                            times.tcp_established
                        };
                        ensure!(
                            row.closed == closed && row.lifetime == u64::from(lifetime),
                            "{name}: {row:?}"
                        );
                    }
                }
                answer(table, "the last ACK", ends, &segment(false, TcpFlags::ACK), true)?;
                table.step.age(times.tcp_closing + 1)?;
                answer(
                    table,
                    "when it is forgotten",
                    ends,
                    &segment(false, TcpFlags::ACK),
                    false,
                )?;
                ask(table, "SYN of the same ports", ends, &segment(true, TcpFlags::SYN))?;
                let fresh = entry(table, ends, 6, (4000, 80))?;
                ensure!(
                    !fresh.closed && !fresh.confirmed && fresh.lifetime == u64::from(times.tcp_new),
                    "{fresh:?}"
                );
                answer(table, "its SYN+ACK", ends, &segment(false, TcpFlags::SYN_ACK), true)?;
            }
        }
        Ok(())
    })
}

/// RST ends a flow: later packets are evaluated independently.
#[test]
fn a_reset_leaves_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("resets", |table| {
        for ends in FAMILIES {
            for client in [true, false] {
                let name = family(ends.0);
                connect(table, name, ends)?;
                if client {
                    ask(table, "RST of the client", ends, &segment(true, TcpFlags::RST))?;
                } else {
                    answer(table, "RST of the server", ends, &segment(false, TcpFlags::RST), true)?;
                }
                ensure!(table.step.model.flows.is_empty(), "{name}: rows are left");
                table.step.compare_tables()?;
                answer(table, "behind it", ends, &segment(false, TcpFlags::ACK), false)?;
                ask(table, "SYN of the same ports", ends, &segment(true, TcpFlags::SYN))?;
                answer(table, "its SYN+ACK", ends, &segment(false, TcpFlags::SYN_ACK), true)?;
            }
        }
        Ok(())
    })
}

/// Either row may be evicted without the other one; the server may not open flows itself.
#[test]
fn an_answer_whose_row_was_evicted_still_is_one() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("evictions", |table| {
        table
            .step
            .allow(NOTHING, ANYBODY, Asked::Ingress, Allowed::Everything, 1)?;
        select(table.step, BLUE_B, NOTHING)?;
        for ends in FAMILIES {
            let reply = Payload::udp(53, 4000, b"");
            ask(table, "question", ends, &Payload::udp(4000, 53, b""))?;
            answer(table, "answer", ends, &reply, true)?;
            let flow = Flow {
                network: BLUE,
                protocol: 17,
                source: (ends.1, 53),
                destination: (ends.0, 4000),
            };
            table.step.evict(&flow)?;
            // A dry run changes nothing, so it cannot restore the row and continue with it.
            let frame = from(BLUE_B).frame(&ip(ends.1, ends.0).packet(&reply));
            let behind = table.step.run(Direction::FromPod, BLUE_B, &frame)?;
            ensure!(behind.verdict == Redirected, "behind the eviction: {behind:?}");
            table.step.evict(&flow.reversed())?;
            answer(table, "answer without the question's row", ends, &reply, true)?;
            table.step.evict(&flow)?;
            let frame = from(BLUE_B).frame(&ip(ends.1, ends.0).packet(&reply));
            table.sent("without either", BLUE_B, &frame, Verdict::PolicyEgress)?;
        }
        Ok(())
    })
}
