//! Tests ICMP errors and types.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict;
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{BLUE_A, BLUE_B, DEFAULT_A, FAMILIES, OUTSIDE4, OUTSIDE6, RED_B, from, ip, table, tcp, to, udp};

/// Destination (port) unreachable about `quoted`.
fn unreachable(is_v4: bool, quoted: &[u8]) -> Payload {
    let (kind, code) = if is_v4 { (3, 3) } else { (1, 4) };
    let body = [&[0; 4][..], quoted].concat();
    Payload::Icmp { kind, code, body }
}

#[test]
fn errors_are_about_known_flows() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ICMP errors", |table| {
        for (a, b) in FAMILIES {
            table.step.flush()?;
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let name = |rest: &str| format!("{family} {rest}");
            let error =
                |from: IpAddr, to: IpAddr, quoted: &[u8]| ip(from, to).packet(&unreachable(a.is_ipv4(), quoted));
            let echo = ip(a, b).packet(&Payload::echo_request(a.is_ipv4(), 7, 1, b""));
            for (what, packet) in [("UDP", udp(a, b)), ("TCP", tcp(a, b, TcpFlags::SYN)), ("echo", echo)] {
                let told = from(BLUE_B).frame(&error(b, a, &packet));
                table.sent(
                    &name(&format!("about {what} that never came")),
                    BLUE_B,
                    &told,
                    Verdict::IcmpUnrelated,
                )?;
                table.reaches(&name(what), BLUE_A, &from(BLUE_A).frame(&packet), BLUE_B)?;
                table.reaches(&name(&format!("about {what} that came")), BLUE_B, &told, BLUE_A)?;
                let red = from(RED_B).frame(&error(b, a, &packet));
                table.sent(
                    &name(&format!("about another network's {what}")),
                    RED_B,
                    &red,
                    Verdict::IcmpUnrelated,
                )?;
                let head = if a.is_ipv4() { 20 } else { 40 };
                let short = from(BLUE_B).frame(&error(b, a, &packet[..head + 8]));
                table.reaches(
                    &name(&format!("with the first 8 bytes of {what}")),
                    BLUE_B,
                    &short,
                    BLUE_A,
                )?;
            }
            let packet = udp(a, b);
            let mine = from(BLUE_B).frame(&error(b, a, &udp(b, a)));
            table.sent(&name("about the own packet"), BLUE_B, &mine, Verdict::IcmpUnrelated)?;
            let outside: IpAddr = if a.is_ipv4() { OUTSIDE4.into() } else { OUTSIDE6.into() };
            let others = from(BLUE_B).frame(&error(b, a, &udp(outside, b)));
            table.sent(
                &name("about somebody else's packet"),
                BLUE_B,
                &others,
                Verdict::IcmpUnrelated,
            )?;
            let spoofed = from(BLUE_A).frame(&error(b, a, &packet));
            table.sent(&name("spoofed"), BLUE_A, &spoofed, Verdict::SourceAddress)?;
            malformed(table, a, b)?;
        }
        Ok(())
    })
}

fn malformed(table: &mut super::table::Table<'_>, a: IpAddr, b: IpAddr) -> Result<()> {
    let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
    let packet = udp(a, b);
    let head = if a.is_ipv4() { 20 } else { 40 };
    let mut case = |name: &str, quoted: &[u8], expected| {
        let error = ip(b, a).packet(&unreachable(a.is_ipv4(), quoted));
        let frame = from(BLUE_B).frame(&error);
        table.sent(&format!("{family} quote {name}"), BLUE_B, &frame, expected)?;
        // The missing bytes are present, but outside the packet.
        let padded = [frame, packet.clone()].concat();
        table.sent(&format!("{family} quote {name}, padded"), BLUE_B, &padded, expected)
    };
    case("is missing", &[], Verdict::Truncated)?;
    case("ends inside the header", &packet[..head - 1], Verdict::Truncated)?;
    case("ends before the ports", &packet[..head], Verdict::Truncated)?;
    case("ends inside the ports", &packet[..head + 3], Verdict::Truncated)?;
    case(
        "of another version",
        &[&[0x50][..], &packet[1..]].concat(),
        Verdict::Malformed,
    )?;
    let later = if a.is_ipv4() {
        case(
            "with a short header length",
            &[&[0x44][..], &packet[1..]].concat(),
            Verdict::Malformed,
        )?;
        case(
            "with a header length beyond it",
            &[&[0x4f][..], &packet[1..]].concat(),
            Verdict::Truncated,
        )?;
        ip(a, b).fragment(17, &[0; 16], 800, true)
    } else {
        let mut extended = packet.clone();
        extended[6] = 44;
        extended
    };
    case("of a fragment", &later, Verdict::IcmpUnrelated)?;
    Ok(())
}

#[test]
fn types_that_pods_do_not_exchange_are_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ICMP types", |table| {
        for (a, b) in FAMILIES {
            let kinds: &[u8] = if a.is_ipv4() {
                // Source quench, redirect, router discovery, information, address mask, traceroute, reserved.
                &[4, 5, 9, 10, 15, 16, 17, 18, 30, 42, 43, 255]
            } else {
                // Reserved, private errors, router renumbering, node information, mobility, certification paths.
                &[0, 5, 100, 127, 138, 139, 140, 144, 148, 149, 155, 160, 200, 255]
            };
            for kind in kinds {
                let payload = Payload::Icmp {
                    kind: *kind,
                    code: 0,
                    body: [&[0; 4][..], &udp(a, b)].concat(),
                };
                let frame = from(BLUE_A).frame(&ip(a, b).packet(&payload));
                let family = if a.is_ipv4() { "ICMP" } else { "ICMPv6" };
                table.fresh(&format!("{family} type {kind}"), BLUE_A, &frame, Verdict::IcmpType)?;
                let frame = to(DEFAULT_A).frame(&ip(b, a).packet(&payload));
                table.received(&format!("{family} type {kind}"), DEFAULT_A, &frame, Verdict::IcmpType)?;
            }
        }
        Ok(())
    })
}
