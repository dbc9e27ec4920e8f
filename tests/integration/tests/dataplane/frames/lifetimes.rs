//! Tests the lifetimes of flows: before the first answer, after it, and after the end of a connection.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{
    Direction::{FromPod, ToPod},
    Verdict::{PolicyEgress, Redirected},
};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked, Entry, Flow, Lifetimes},
    require,
};

use super::{
    policy::select,
    table::{
        BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, FAMILIES, Table, family, from, ip, outside_like, service, table, to,
        virtual_like,
    },
};

/// Maximum duration of a test in ticks.
const SLACK: u32 = 5000;
/// Ticks after which a packet certainly is in a later window than the one before.
const A_WHILE: u32 = 300;
const NOTHING: u32 = 40;

/// Far from the duration of a test, and from each other.
const TIMES: Lifetimes = Lifetimes {
    tcp_new: 1_000_000,
    tcp_established: 10_000_000,
    tcp_closing: 500_000,
    other_new: 2_000_000,
    udp_replied: 800_000,
    udp_established: 9_000_000,
    sctp_established: 8_000_000,
    other_established: 4_000_000,
};

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
    let found = table.step.model.entry(flow);
    found.ok_or_else(|| anyhow::anyhow!("no flow {flow:?}"))
}

/// A protocol: its request, its answer and a later packet of the opener; the lifetimes before the answer, after it, and
/// once the opener continued.
struct Life {
    name: &'static str,
    packets: [Payload; 3],
    times: [u32; 3],
}

fn lives(v4: bool) -> [Life; 4] {
    let echo = |kind| Payload::Icmp {
        kind,
        code: 0,
        body: vec![0, 7, 0, 1],
    };
    let tcp = |from, to, flags| Payload::tcp(from, to, flags);
    let (request, reply) = if v4 { (8, 0) } else { (128, 129) };
    [
        Life {
            name: "TCP",
            packets: [
                tcp(4000, 80, TcpFlags::SYN),
                tcp(80, 4000, TcpFlags::SYN_ACK),
                tcp(4000, 80, TcpFlags::ACK),
            ],
            times: [TIMES.tcp_new, TIMES.tcp_new, TIMES.tcp_established],
        },
        Life {
            name: "UDP",
            packets: [
                Payload::udp(4000, 53, b""),
                Payload::udp(53, 4000, b""),
                Payload::udp(4000, 53, b""),
            ],
            times: [TIMES.other_new, TIMES.udp_replied, TIMES.udp_established],
        },
        Life {
            name: "SCTP",
            packets: [
                Payload::sctp_init(4000, 80),
                Payload::sctp_init(80, 4000),
                Payload::sctp_init(4000, 80),
            ],
            times: [TIMES.other_new, TIMES.other_new, TIMES.sctp_established],
        },
        Life {
            name: "echo",
            packets: [echo(request), echo(reply), echo(request)],
            times: [TIMES.other_new, TIMES.other_established, TIMES.other_established],
        },
    ]
}

fn may_send(table: &mut Table<'_>) -> Result<()> {
    table.step.flush()?;
    select(table.step, BLUE_B, 0)
}

/// An answer alone establishes nothing: a server answers packets with forged sources, too, and a question with one
/// answer is over.
#[test]
fn a_flow_lives_longer_once_its_opener_goes_on_after_the_answer() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("lifetimes", |table| {
        table.step.configure(TIMES, 0, 0)?;
        for ends in FAMILIES {
            for Life {
                name: what,
                packets,
                times,
            } in lives(ends.0.is_ipv4())
            {
                let ([question, reply, further], [new, answered, established]) = (packets, times);
                let name = |rest: &str| format!("{} {what} {rest}", family(ends.0));
                may_send(table)?;
                ask(table, &name("question"), ends, &question)?;
                only_receives(table)?;
                table.step.age(new + 1)?;
                answer(table, &name("answer, too late"), ends, &reply, false)?;
                ask(table, &name("question again"), ends, &question)?;
                table.step.age(new - SLACK)?;
                answer(table, &name("answer, in time"), ends, &reply, true)?;
                // Each packet restarts the timeout, regardless of its direction.
                for _ in 0..2 {
                    table.step.age(answered - SLACK)?;
                    answer(table, &name("answer, later"), ends, &reply, true)?;
                }
                table.step.age(answered + 1)?;
                answer(table, &name("answer, when it is over"), ends, &reply, false)?;
                ask(table, &name("question once more"), ends, &question)?;
                answer(table, &name("answer once more"), ends, &reply, true)?;
                for _ in 0..2 {
                    table.step.age(A_WHILE)?;
                    ask(table, &name("going on"), ends, &further)?;
                }
                for _ in 0..2 {
                    table.step.age(established - SLACK)?;
                    answer(table, &name("answer, much later"), ends, &reply, true)?;
                }
                table.step.age(established + 1)?;
                answer(table, &name("answer, when all is over"), ends, &reply, false)?;
            }
        }
        Ok(())
    })
}

/// Two questions of one socket and their answers (A and AAAA of a name) are no stream.
#[test]
fn questions_in_a_row_are_no_stream() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("questions", |table| {
        table.step.configure(TIMES, 0, 0)?;
        for ends in FAMILIES {
            let (question, reply) = (Payload::udp(4000, 53, b""), Payload::udp(53, 4000, b""));
            may_send(table)?;
            for _ in 0..5 {
                ask(table, "question", ends, &question)?;
                answer(table, "answer", ends, &reply, true)?;
            }
            let row = entry(table, ends, 17, (4000, 53))?;
            ensure!(
                !row.confirmed && row.lifetime == u64::from(TIMES.udp_replied),
                "{row:?}"
            );
        }
        Ok(())
    })
}

/// Packets of one direction keep the flow alive.
#[test]
fn a_flow_that_only_one_side_uses_lives_on() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("one side", |table| {
        table.step.configure(TIMES, 0, 0)?;
        for ends in FAMILIES {
            let (question, reply) = (Payload::udp(4000, 53, b""), Payload::udp(53, 4000, b""));
            may_send(table)?;
            ask(table, "question", ends, &question)?;
            answer(table, "answer", ends, &reply, true)?;
            only_receives(table)?;
            for _ in 0..2 {
                table.step.age(A_WHILE)?;
                ask(table, "a stream", ends, &question)?;
            }
            for _ in 0..4 {
                table.step.age(TIMES.udp_established - SLACK)?;
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
    ask(table, &format!("{name}, ACK"), ends, &segment(true, TcpFlags::ACK))?;
    only_receives(table)
}

fn only_receives(table: &mut Table<'_>) -> Result<()> {
    table
        .step
        .allow(NOTHING, ANYBODY, Asked::Ingress, Allowed::Everything, 1)?;
    select(table.step, BLUE_B, NOTHING)
}

/// Sends the FINs of both, the second one closes the connection.
fn close(table: &mut Table<'_>, ends: (IpAddr, IpAddr), client_first: bool) -> Result<()> {
    for client in [client_first, !client_first] {
        if client {
            ask(table, "FIN of the client", ends, &segment(true, TcpFlags::FIN_ACK))?;
        } else {
            let fin = segment(false, TcpFlags::FIN_ACK);
            answer(table, "FIN of the server", ends, &fin, true)?;
        }
        let closed = client != client_first;
        let row = entry(table, ends, 6, (4000, 80))?;
        let lifetime = if closed {
            TIMES.tcp_closing
        } else {
            TIMES.tcp_established
        };
        ensure!(row.closed == closed && row.lifetime == u64::from(lifetime), "{row:?}");
    }
    Ok(())
}

/// After FIN of both sides and the last ACK nothing is left: many short connections evict no other flows. Without the
/// ACK the remaining lifetime is short.
#[test]
fn a_connection_that_is_over_is_removed() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ends of connections", |table| {
        table.step.configure(TIMES, 0, 0)?;
        for ends in FAMILIES {
            for client_first in [true, false] {
                let name = family(ends.0);
                connect(table, name, ends)?;
                close(table, ends, client_first)?;
                if client_first {
                    ask(table, "the last ACK", ends, &segment(true, TcpFlags::ACK))?;
                } else {
                    answer(table, "the last ACK", ends, &segment(false, TcpFlags::ACK), true)?;
                }
                ensure!(table.step.model.flows.is_empty(), "{name}: rows are left");
                table.step.compare_tables()?;
                answer(table, "behind it", ends, &segment(false, TcpFlags::ACK), false)?;
                connect(table, name, ends)?;
                close(table, ends, client_first)?;
                table.step.age(TIMES.tcp_closing + 1)?;
                let late = segment(false, TcpFlags::ACK);
                answer(table, "when it is forgotten", ends, &late, false)?;
                ask(table, "SYN of the same ports", ends, &segment(true, TcpFlags::SYN))?;
                let fresh = entry(table, ends, 6, (4000, 80))?;
                ensure!(
                    !fresh.closed && !fresh.confirmed && fresh.lifetime == u64::from(TIMES.tcp_new),
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

/// A flow has one row: without it, an answer is a packet like any other.
#[test]
fn an_answer_without_a_row_is_judged_by_itself() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("evictions", |table| {
        only_receives(table)?;
        for ends in FAMILIES {
            let reply = Payload::udp(53, 4000, b"");
            ask(table, "question", ends, &Payload::udp(4000, 53, b""))?;
            answer(table, "answer", ends, &reply, true)?;
            table.step.evict(&Flow {
                network: BLUE,
                protocol: 17,
                source: (ends.1, 53),
                destination: (ends.0, 4000),
            })?;
            answer(table, "answer without a row", ends, &reply, false)?;
            ask(table, "question again", ends, &Payload::udp(4000, 53, b""))?;
            answer(table, "its answer", ends, &reply, true)?;
        }
        Ok(())
    })
}

/// An RST from outside may be forged: the pod's next packet restores the lifetime, in both rows of a translated flow.
#[test]
fn a_reset_from_outside_ends_no_translated_connection() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("forged resets", |table| {
        table.step.configure(TIMES, 0, 0)?;
        for (own, _) in FAMILIES {
            let (far, front) = (outside_like(own), virtual_like(own));
            let backend = service(1, &[(far, 8080)]);
            table.step.serve((DEFAULT, front, 6, 80), &backend)?;
            let asks = |flags| from(DEFAULT_A).frame(&ip(own, front).packet(&Payload::tcp(4000, 80, flags)));
            let answers = |flags| to(DEFAULT_A).frame(&ip(far, own).packet(&Payload::tcp(8080, 4000, flags)));
            table.step.run(FromPod, DEFAULT_A, &asks(TcpFlags::SYN))?;
            table.step.run(ToPod, DEFAULT_A, &answers(TcpFlags::SYN_ACK))?;
            table.step.run(FromPod, DEFAULT_A, &asks(TcpFlags::ACK))?;
            table.step.run(ToPod, DEFAULT_A, &answers(TcpFlags::RST))?;
            table.step.compare_tables()?;
            table.step.run(FromPod, DEFAULT_A, &asks(TcpFlags::ACK))?;
            table.step.compare_tables()?;
            let rows = table.step.model.flows.values();
            let lifetimes: Vec<u64> = rows.map(|row| row.lifetime).collect();
            ensure!(lifetimes == [u64::from(TIMES.tcp_established); 2], "{lifetimes:?}");
            table.step.flush()?;
        }
        Ok(())
    })
}
