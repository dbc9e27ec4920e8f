//! Tests packets to services without backends: refused immediately if the sender waits, with correct checksums.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::Verdict::{FragmentWithoutFirst, NoBackend, NoLocalBackend, NoService, NoServicePort};
use kni_integration::{
    frames::{Payload, TcpFlags, checksum},
    model::Service,
    require,
};

use super::table::{BLUE, BLUE_A, FAMILIES, Table, family, from, ip, service, table, virtual_like};

/// The IP packet of an answer from `virt` with a verified header: no options, correct length and checksums.
fn answer(frame: &[u8], virt: IpAddr, a: IpAddr, protocol: u8) -> Result<Vec<u8>> {
    let packet = &frame[14..];
    let head = if a.is_ipv4() { 20 } else { 40 };
    let payload = &packet[head..];
    let (length, next, hops, ends) = if a.is_ipv4() {
        ensure!(
            packet[0] == 0x45 && checksum(&[&packet[..20]]) == 0,
            "a wrong IPv4 header"
        );
        (
            usize::from(u16::from_be_bytes([packet[2], packet[3]])) - 20,
            packet[9],
            packet[8],
            packet[12..20].to_vec(),
        )
    } else {
        ensure!(packet[0] == 0x60, "a wrong IPv6 header");
        (
            usize::from(u16::from_be_bytes([packet[4], packet[5]])),
            packet[6],
            packet[7],
            packet[8..40].to_vec(),
        )
    };
    ensure!(
        (length, next, hops) == (payload.len(), protocol, 64),
        "length {length}, protocol {next}, hops {hops}"
    );
    let expected = match (virt, a) {
        (IpAddr::V4(virt), IpAddr::V4(a)) => [virt.octets(), a.octets()].concat(),
        (IpAddr::V6(virt), IpAddr::V6(a)) => [virt.octets(), a.octets()].concat(),
        _ => anyhow::bail!("two families"),
    };
    ensure!(ends == expected, "from or to somebody else");
    let covered = if protocol == 1 {
        Vec::new()
    } else {
        ip(virt, a).pseudo_header(protocol, payload.len())
    };
    ensure!(checksum(&[&covered, payload]) == 0, "a wrong checksum");
    Ok(payload.to_vec())
}

fn tcp_cases(table: &mut Table<'_>, a: IpAddr, virt: IpAddr) -> Result<()> {
    let segment = |flags, data: &[u8]| {
        let payload = Payload::Tcp {
            source_port: 4000,
            destination_port: 81,
            flags,
            sequence: 0xffff_fff0,
            data: data.to_vec(),
        };
        from(BLUE_A).frame(&ip(a, virt).packet(&payload))
    };
    // RFC 9293 3.10.7.1: sequence 0 and an acknowledgement of all sent data, including SYN and FIN; or, for a packet
    // with an acknowledgement, its value as the sequence.
    for (what, flags, data, sequence, acknowledgement, answered) in [
        ("SYN", 0x02, &b""[..], 0_u32, 0xffff_fff1_u32, 0x14_u8),
        ("SYN with data", 0x02, b"0123456789abcdef", 0, 1, 0x14),
        ("FIN without ACK", 0x01, b"", 0, 0xffff_fff1, 0x14),
        ("ACK", 0x10, b"data", 0, 0, 0x04),
    ] {
        let name = format!("{} TCP {what}", family(a));
        let out = table.refused(&name, BLUE_A, &segment(TcpFlags(flags), data), NoServicePort)?;
        let reset = answer(&out, virt, a, 6)?;
        let expected = [
            &81_u16.to_be_bytes()[..],
            &4000_u16.to_be_bytes(),
            &sequence.to_be_bytes(),
        ]
        .concat();
        ensure!(reset.len() == 20 && reset[..8] == expected, "{name}: {reset:?}");
        ensure!(
            reset[8..12] == acknowledgement.to_be_bytes(),
            "{name}: acknowledges {:?}",
            &reset[8..12]
        );
        ensure!(
            reset[12..16] == [0x50, answered, 0, 0],
            "{name}: flags {:?}",
            &reset[12..16]
        );
    }
    let name = format!("{} TCP RST", family(a));
    table.silent(&name, BLUE_A, &segment(TcpFlags::RST, b""), NoServicePort)
}

#[test]
fn an_undefined_port_is_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("undefined ports", |table| {
        for (a, b) in FAMILIES {
            let virt = virtual_like(a);
            let head = if a.is_ipv4() { 20 } else { 40 };
            table.step.serve((BLUE, virt, 6, 80), &service(1, &[(b, 8080)]))?;
            tcp_cases(table, a, virt)?;
            // As much as there is up to the checksum.
            for (what, quoted, payload) in [
                ("UDP", 8, Payload::udp(4000, 81, b"a longer datagram than is quoted")),
                ("UDP of a TCP port", 8, Payload::udp(4000, 80, b"")),
                ("SCTP", 12, Payload::sctp_init(4000, 81)),
            ] {
                let name = format!("{} {what}", family(a));
                let packet = ip(a, virt).packet(&payload);
                let out = table.refused(&name, BLUE_A, &from(BLUE_A).frame(&packet), NoServicePort)?;
                let error = answer(&out, virt, a, if a.is_ipv4() { 1 } else { 58 })?;
                let kind = if a.is_ipv4() { [3, 3] } else { [1, 4] };
                ensure!(error[..2] == kind && error[4..8] == [0; 4], "{name}: {error:?}");
                ensure!(error[8..] == packet[..head + quoted], "{name}: quotes something else");
            }
            let echo = Payload::echo_request(a.is_ipv4(), 80, 1, b"ping");
            let name = |rest: &str| format!("{} {rest}", family(a));
            let frame = from(BLUE_A).frame(&ip(a, virt).packet(&echo));
            table.silent(&name("echo request"), BLUE_A, &frame, NoServicePort)?;
            let parts = ip(a, virt).fragments(&Payload::udp(4000, 81, &[0; 40]), 24);
            for (part, expected) in parts.iter().zip([NoServicePort, FragmentWithoutFirst]) {
                table.silent(&name("a fragment"), BLUE_A, &from(BLUE_A).frame(part), expected)?;
            }
        }
        let options = ip(super::table::A4, super::table::VIRTUAL4).options(&[1, 1, 1, 1]);
        let frame = from(BLUE_A).frame(&options.packet(&Payload::udp(4000, 81, b"")));
        table.silent("IPv4 with options", BLUE_A, &frame, NoServicePort)
    })
}

#[test]
fn a_service_without_backends_refuses_or_drops() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("no backends", |table| {
        for (a, _) in FAMILIES {
            let virt = virtual_like(a);
            let name = |rest: &str| format!("{} {rest}", family(a));
            let frame = |port| from(BLUE_A).frame(&ip(a, virt).packet(&Payload::tcp(4000, port, TcpFlags::SYN)));
            table.silent(&name("nobody's address of the range"), BLUE_A, &frame(80), NoService)?;
            table.step.serve((BLUE, virt, 6, 80), &service(1, &[]))?;
            let here = Service {
                local_only: true,
                ..service(2, &[])
            };
            table.step.serve((BLUE, virt, 6, 81), &here)?;
            table.refused(&name("no backend"), BLUE_A, &frame(80), NoBackend)?;
            table.silent(&name("no backend here"), BLUE_A, &frame(81), NoLocalBackend)?;
            table.step.unserve((BLUE, virt, 6, 80))?;
            table.step.unserve((BLUE, virt, 6, 81))?;
            table.silent(&name("nobody's address again"), BLUE_A, &frame(80), NoService)?;
        }
        Ok(())
    })
}
