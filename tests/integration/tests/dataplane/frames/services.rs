//! Tests flows to virtual addresses: the exact bytes that the backend and the client receive.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{
    Direction,
    Verdict::{self, Delivered, NoService, PassedToStack},
};
use kni_integration::{
    frames::{Extension, Ip, Payload, TcpFlags},
    programs::{action_of, hex},
    require,
};

use super::table::{
    A4, B4, BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, FAMILIES, RED_A, Table, VIRTUAL4, family, from, ip, outside_like,
    service, table, to, virtual_like,
};

/// Ports of the service and of its backend.
const FRONT: u16 = 80;
const BACK: u16 = 8080;
const CLIENT: u16 = 4000;

fn payloads(from: u16, to: u16) -> [(u8, &'static str, Payload); 3] {
    [
        (6, "TCP", Payload::tcp(from, to, TcpFlags::SYN)),
        (17, "UDP", Payload::udp(from, to, b"some data")),
        (132, "SCTP", Payload::sctp_init(from, to)),
    ]
}

/// Serves every protocol at the virtual address of the family.
fn serve(table: &mut Table<'_>, network: u32, backend: IpAddr) -> Result<IpAddr> {
    let address = virtual_like(backend);
    for (id, protocol) in [(1, 6), (2, 17), (3, 132)] {
        let front = (network, address, protocol, FRONT);
        table.step.serve(front, &service(id, &[(backend, BACK)]))?;
    }
    Ok(address)
}

#[test]
fn both_directions_are_translated() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("services", |table| {
        for (a, b) in FAMILIES {
            let virt = serve(table, BLUE, b)?;
            for (index, (_, what, asked)) in payloads(CLIENT, FRONT).into_iter().enumerate() {
                let name = |rest: &str| format!("{} {what} {rest}", family(a));
                let (_, _, gotten) = &payloads(CLIENT, BACK)[index];
                let (_, _, answer) = &payloads(BACK, CLIENT)[index];
                let (_, _, seen) = &payloads(FRONT, CLIENT)[index];
                let question = from(BLUE_A).frame(&ip(a, virt).packet(&asked));
                for round in ["first", "known"] {
                    table.becomes(&name(round), BLUE_A, &question, BLUE_B, &ip(a, b).packet(gotten))?;
                }
                if what == "TCP" {
                    // A SYN from the backend is not a reply.
                    let [syn_ack, seen] =
                        [(BACK, CLIENT), (FRONT, CLIENT)].map(|(from, to)| Payload::tcp(from, to, TcpFlags::SYN_ACK));
                    let back = from(BLUE_B).frame(&ip(b, a).packet(&syn_ack));
                    table.becomes(&name("answer"), BLUE_B, &back, BLUE_A, &ip(virt, a).packet(&seen))?;
                } else {
                    let back = from(BLUE_B).frame(&ip(b, a).packet(answer));
                    table.becomes(&name("answer"), BLUE_B, &back, BLUE_A, &ip(virt, a).packet(seen))?;
                }
                let red = from(RED_A).frame(&ip(a, virt).packet(&asked));
                table.sent(&name("in the other network"), RED_A, &red, NoService)?;
            }
        }
        Ok(())
    })
}

/// RFC 768: 0 means "no checksum" and is preserved; a checksum of 0 is sent as 0xffff.
#[test]
fn a_udp_checksum_of_zero_is_none() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("UDP checksums", |table| {
        for (a, b) in FAMILIES {
            let virt = serve(table, BLUE, b)?;
            let at = if a.is_ipv4() { 14 + 20 + 6 } else { 14 + 40 + 6 };
            if a.is_ipv4() {
                let mut frame = from(BLUE_A).frame(&ip(a, virt).packet(&Payload::udp(CLIENT, FRONT, b"none")));
                frame[at..at + 2].fill(0);
                let mut expected = ip(a, b).packet(&Payload::udp(CLIENT, BACK, b"none"));
                expected[at - 14..at - 12].fill(0);
                table.becomes("IPv4 without a checksum", BLUE_A, &frame, BLUE_B, &expected)?;
            }
            let packet =
                |virt: IpAddr, port, data: u16| ip(a, virt).packet(&Payload::udp(CLIENT, port, &data.to_be_bytes()));
            let zero = (0..=u16::MAX).find(|data| packet(b, BACK, *data)[at - 14..at - 12] == [0xff, 0xff]);
            let zero = zero.expect("one of all numbers completes the sum");
            let frame = from(BLUE_A).frame(&packet(virt, FRONT, zero));
            let name = format!("{} whose sum becomes 0", family(a));
            table.becomes(&name, BLUE_A, &frame, BLUE_B, &packet(b, BACK, zero))?;
        }
        Ok(())
    })
}

/// The transport header is located by the IP header's length.
#[test]
fn options_and_extension_headers_do_not_move_the_ports() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("translated options", |table| {
        for (a, b) in FAMILIES {
            let virt = serve(table, BLUE, b)?;
            let extended = |to: IpAddr| {
                if a.is_ipv4() {
                    ip(a, to).options(&[1, 1, 148, 4, 0, 0, 1, 0])
                } else {
                    let options = Extension::DestinationOptions(vec![1, 4, 0, 0, 0, 0]);
                    ip(a, to)
                        .extension(Extension::HopByHop(vec![1, 4, 0, 0, 0, 0]))
                        .extension(options)
                }
            };
            for (index, (_, what, asked)) in payloads(CLIENT, FRONT).into_iter().enumerate() {
                let frame = from(BLUE_A).frame(&extended(virt).packet(&asked));
                let expected = extended(b).packet(&payloads(CLIENT, BACK)[index].2);
                table.becomes(&format!("{} {what}", family(a)), BLUE_A, &frame, BLUE_B, &expected)?;
            }
        }
        Ok(())
    })
}

#[test]
fn every_fragment_reaches_the_backend() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("translated fragments", |table| {
        for (a, b) in FAMILIES {
            let virt = serve(table, BLUE, b)?;
            let parts = |to: IpAddr, port| ip(a, to).fragments(&Payload::udp(CLIENT, port, &[7; 60]), 24);
            let (sent, gotten) = (parts(virt, FRONT), parts(b, BACK));
            for (index, (sent, gotten)) in sent.iter().zip(&gotten).enumerate() {
                let name = format!("{} part {index}", family(a));
                table.becomes(&name, BLUE_A, &from(BLUE_A).frame(sent), BLUE_B, gotten)?;
            }
            let back = |source: IpAddr, port| ip(source, a).fragments(&Payload::udp(port, CLIENT, &[9; 60]), 24);
            for (index, (sent, gotten)) in back(b, BACK).iter().zip(&back(virt, FRONT)).enumerate() {
                let name = format!("{} part {index} of the answer", family(a));
                table.becomes(&name, BLUE_B, &from(BLUE_B).frame(sent), BLUE_A, gotten)?;
            }
        }
        Ok(())
    })
}

/// A pod does not accept its own address as that of a service, so it gets its packets from the virtual address.
#[test]
fn a_pod_reaches_itself_through_a_service() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("hairpin", |table| {
        for (a, _) in FAMILIES {
            let virt = serve(table, BLUE, a)?;
            for (index, (_, what, asked)) in payloads(CLIENT, FRONT).into_iter().enumerate() {
                let name = |rest: &str| format!("{} {what} {rest}", family(a));
                let gotten = ip(virt, a).packet(&payloads(CLIENT, BACK)[index].2);
                let question = from(BLUE_A).frame(&ip(a, virt).packet(&asked));
                table.becomes(&name("question"), BLUE_A, &question, BLUE_A, &gotten)?;
                let [answer, seen] = if what == "TCP" {
                    [(BACK, CLIENT), (FRONT, CLIENT)].map(|(from, to)| Payload::tcp(from, to, TcpFlags::SYN_ACK))
                } else {
                    [
                        payloads(BACK, CLIENT)[index].2.clone(),
                        payloads(FRONT, CLIENT)[index].2.clone(),
                    ]
                };
                let back = from(BLUE_A).frame(&ip(a, virt).packet(&answer));
                table.becomes(&name("answer"), BLUE_A, &back, BLUE_A, &ip(virt, a).packet(&seen))?;
                table.becomes(&name("the same ports again"), BLUE_A, &question, BLUE_A, &gotten)?;
            }
        }
        Ok(())
    })
}

/// A backend outside the network: the translated packet and its reply pass through the stack.
#[test]
fn a_backend_beyond_is_reached_through_the_stack() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("backends beyond", |table| {
        for (a, _) in FAMILIES {
            let far = outside_like(a);
            let virt = serve(table, DEFAULT, far)?;
            let udp = |ip: Ip, from, to| ip.packet(&Payload::udp(from, to, b"beyond"));
            let name = |rest: &str| format!("{} {rest}", family(a));
            let question = from(DEFAULT_A).frame(&udp(ip(a, virt), CLIENT, FRONT));
            for round in ["question", "question again"] {
                let out = table.sent(&name(round), DEFAULT_A, &question, PassedToStack)?;
                let expected = from(DEFAULT_A).frame(&udp(ip(a, far), CLIENT, BACK));
                ensure!(out == expected, "{}: the stack gets another packet", name(round));
            }
            let answer = to(DEFAULT_A).frame(&udp(ip(far, a), BACK, CLIENT));
            let out = table.forwarded(&name("answer"), 2, DEFAULT_A, &answer, Delivered)?;
            let expected = to(DEFAULT_A).frame(&udp(ip(virt, a), FRONT, CLIENT));
            ensure!(out == expected, "{}: the pod gets another packet", name("answer"));
        }
        Ok(())
    })
}

/// An existing connection retains its backend; a new one uses the changed service.
#[test]
fn known_flows_outlive_a_change_of_the_service() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("changed services", |table| {
        for (a, b) in FAMILIES {
            let virt = serve(table, BLUE, b)?;
            let front = (BLUE, virt, 6, FRONT);
            let name = |rest: &str| format!("{} {rest}", family(a));
            let tcp = |ip: Ip, from, to, flags| ip.packet(&Payload::tcp(from, to, flags));
            let syn = from(BLUE_A).frame(&tcp(ip(a, virt), CLIENT, FRONT, TcpFlags::SYN));
            let ack = from(BLUE_A).frame(&tcp(ip(a, virt), CLIENT, FRONT, TcpFlags::ACK));
            let gotten = |flags| tcp(ip(a, b), CLIENT, BACK, flags);
            table.becomes(&name("SYN"), BLUE_A, &syn, BLUE_B, &gotten(TcpFlags::SYN))?;
            let back = from(BLUE_B).frame(&tcp(ip(b, a), BACK, CLIENT, TcpFlags::SYN_ACK));
            let seen = tcp(ip(virt, a), FRONT, CLIENT, TcpFlags::SYN_ACK);
            table.becomes(&name("SYN+ACK"), BLUE_B, &back, BLUE_A, &seen)?;
            table.step.serve(front, &service(1, &[(b, BACK + 1)]))?;
            table.becomes(
                &name("ACK behind the change"),
                BLUE_A,
                &ack,
                BLUE_B,
                &gotten(TcpFlags::ACK),
            )?;
            let again = from(BLUE_A).frame(&tcp(ip(a, virt), CLIENT + 1, FRONT, TcpFlags::SYN));
            let other = tcp(ip(a, b), CLIENT + 1, BACK + 1, TcpFlags::SYN);
            table.becomes(&name("another SYN"), BLUE_A, &again, BLUE_B, &other)?;
            table.step.unserve(front)?;
            table.becomes(
                &name("ACK behind the end"),
                BLUE_A,
                &ack,
                BLUE_B,
                &gotten(TcpFlags::ACK),
            )?;
            let late = from(BLUE_A).frame(&tcp(ip(a, virt), CLIENT + 2, FRONT, TcpFlags::SYN));
            table.refused(&name("SYN behind the end"), BLUE_A, &late, Verdict::NoServicePort)?;
        }
        Ok(())
    })
}

/// The kernel reuses a replaced row's memory at once: a program may read a part of each row.
#[test]
fn a_row_that_is_half_of_another_services_chooses_nobody() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("torn services", |table| {
        let (mine, others) = (
            (BLUE, VIRTUAL4.into(), 17, FRONT),
            (BLUE, VIRTUAL4.into(), 17, FRONT + 1),
        );
        table.step.serve(mine, &service(1, &[(A4.into(), BACK)]))?;
        table.step.serve(others, &service(2, &[(B4.into(), BACK)]))?;
        let question = from(BLUE_A).frame(&ip(A4, VIRTUAL4).packet(&Payload::udp(CLIENT, FRONT, b"")));
        table.step.tear_service(mine, others)?;
        let ran = table.step.programs().run(Direction::FromPod, BLUE_A, &question)?;
        ensure!(
            ran.action == action_of(Verdict::DestinationNotReady),
            "action {}: {}",
            ran.action.cast_signed(),
            hex(&ran.frame)
        );
        let drops = table.step.programs().dataplane().drops()?;
        ensure!(
            drops.iter().any(|drop| drop.reason == Verdict::DestinationNotReady),
            "{drops:?}"
        );
        table.step.clear_counters()
    })
}
