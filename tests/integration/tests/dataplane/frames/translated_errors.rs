//! Tests ICMP errors about translated flows: both ends see their own addresses, inside and outside.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::Verdict::{Delivered, IcmpFragment, IcmpUnrelated, PassedToStack};
use kni_integration::{frames::Payload, require};

use super::table::{
    BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, FAMILIES, family, from, ip, outside_like, service, table, to,
    virtual_like,
};

fn unreachable(is_v4: bool, quoted: &[u8]) -> Payload {
    let (kind, code) = if is_v4 { (3, 3) } else { (1, 4) };
    let body = [&[0; 4][..], quoted].concat();
    Payload::Icmp { kind, code, body }
}

/// The header and first eight bytes of a datagram. The quoted checksum is unchanged: that of `sum`'s datagram.
fn quote(source: IpAddr, destination: IpAddr, ports: (u16, u16), sum: &[u8]) -> Vec<u8> {
    let head = if source.is_ipv4() { 20 } else { 40 };
    let mut packet = ip(source, destination).packet(&Payload::udp(ports.0, ports.1, b"quoted"));
    packet.truncate(head + 8);
    packet[head + 6..].copy_from_slice(&sum[head + 6..head + 8]);
    packet
}

fn datagram(source: IpAddr, destination: IpAddr, ports: (u16, u16)) -> Vec<u8> {
    ip(source, destination).packet(&Payload::udp(ports.0, ports.1, b"quoted"))
}

#[test]
fn an_error_is_translated_with_what_it_quotes() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("translated errors", |table| {
        for (a, b) in FAMILIES {
            let (virt, v4) = (virtual_like(a), a.is_ipv4());
            let name = |rest: &str| format!("{} {rest}", family(a));
            table.step.serve((BLUE, virt, 17, 80), &service(1, &[(b, 8080)]))?;
            let gotten = datagram(a, b, (4000, 8080));
            table.becomes(
                &name("question"),
                BLUE_A,
                &from(BLUE_A).frame(&datagram(a, virt, (4000, 80))),
                BLUE_B,
                &gotten,
            )?;
            let about = quote(a, b, (4000, 8080), &gotten);
            let error = from(BLUE_B).frame(&ip(b, a).packet(&unreachable(v4, &about)));
            let seen = ip(virt, a).packet(&unreachable(v4, &quote(a, virt, (4000, 80), &gotten)));
            table.becomes(&name("error of the backend"), BLUE_B, &error, BLUE_A, &seen)?;
            let answer = datagram(b, a, (8080, 4000));
            let translated = datagram(virt, a, (80, 4000));
            table.becomes(
                &name("answer"),
                BLUE_B,
                &from(BLUE_B).frame(&answer),
                BLUE_A,
                &translated,
            )?;
            let about = quote(virt, a, (80, 4000), &translated);
            let error = from(BLUE_A).frame(&ip(a, virt).packet(&unreachable(v4, &about)));
            let seen = ip(a, b).packet(&unreachable(v4, &quote(b, a, (8080, 4000), &translated)));
            table.becomes(&name("error of the client"), BLUE_A, &error, BLUE_B, &seen)?;
            let about = quote(a, b, (4001, 8080), &gotten);
            let error = from(BLUE_B).frame(&ip(b, a).packet(&unreachable(v4, &about)));
            table.sent(&name("error about another port"), BLUE_B, &error, IcmpUnrelated)?;
        }
        Ok(())
    })
}

/// The owner of a later fragment is unknown.
#[test]
fn an_error_about_a_translated_fragment_is_dropped() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("errors about fragments", |table| {
        let (a, b) = FAMILIES[0];
        let virt = virtual_like(a);
        table.step.serve((BLUE, virt, 17, 80), &service(1, &[(b, 8080)]))?;
        for (what, there, port, expected) in [("translated", virt, 80, Some(IcmpFragment)), ("direct", b, 9090, None)] {
            let payload = |port| Payload::udp(4000, port, &[7; 40]);
            let first = |to: IpAddr, port| ip(a, to).fragments(&payload(port), 24).swap_remove(0);
            let sent = from(BLUE_A).frame(&first(there, port));
            let gotten = first(b, if port == 80 { 8080 } else { port });
            table.becomes(what, BLUE_A, &sent, BLUE_B, &gotten)?;
            let error = from(BLUE_B).frame(&ip(b, a).packet(&unreachable(true, &gotten)));
            match expected {
                Some(reason) => drop(table.sent("error about its first fragment", BLUE_B, &error, reason)?),
                None => table.reaches("error about its first fragment", BLUE_B, &error, BLUE_A)?,
            }
        }
        Ok(())
    })
}

/// The address of a router is unchanged; the quoted packet becomes the packet that the pod has sent.
#[test]
fn an_error_of_a_router_is_about_what_the_pod_sent() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("errors of routers", |table| {
        for (a, _) in FAMILIES {
            let (virt, far, v4) = (virtual_like(a), outside_like(a), a.is_ipv4());
            let router: IpAddr = if v4 {
                [192, 0, 2, 1].into()
            } else {
                "2001:db8:1::1".parse()?
            };
            let name = |rest: &str| format!("{} {rest}", family(a));
            table.step.serve((DEFAULT, virt, 17, 80), &service(1, &[(far, 8080)]))?;
            let sent = datagram(a, far, (4000, 8080));
            table.sent(
                &name("question"),
                DEFAULT_A,
                &from(DEFAULT_A).frame(&datagram(a, virt, (4000, 80))),
                PassedToStack,
            )?;
            for (who, teller, seen) in [("a router", router, router), ("the backend", far, virt)] {
                let about = quote(a, far, (4000, 8080), &sent);
                let error = to(DEFAULT_A).frame(&ip(teller, a).packet(&unreachable(v4, &about)));
                let out = table.forwarded(&name(who), 2, DEFAULT_A, &error, Delivered)?;
                let quoted = quote(a, virt, (4000, 80), &sent);
                let expected = to(DEFAULT_A).frame(&ip(seen, a).packet(&unreachable(v4, &quoted)));
                ensure!(out == expected, "{}: the pod gets another error", name(who));
            }
            if v4 {
                let first = ip(a, far)
                    .fragments(&Payload::udp(4000, 8080, &[7; 40]), 24)
                    .swap_remove(0);
                let error = to(DEFAULT_A).frame(&ip(router, a).packet(&unreachable(true, &first)));
                table.forwarded("about a fragment", 2, DEFAULT_A, &error, IcmpFragment)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_pod_that_reaches_itself_has_nobody_to_tell() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("errors of hairpins", |table| {
        for (a, _) in FAMILIES {
            let (virt, v4) = (virtual_like(a), a.is_ipv4());
            table.step.serve((BLUE, virt, 17, 80), &service(1, &[(a, 8080)]))?;
            let gotten = datagram(virt, a, (4000, 8080));
            table.becomes(
                "question",
                BLUE_A,
                &from(BLUE_A).frame(&datagram(a, virt, (4000, 80))),
                BLUE_A,
                &gotten,
            )?;
            let error = ip(a, virt).packet(&unreachable(v4, &quote(virt, a, (4000, 8080), &gotten)));
            table.silent("error", BLUE_A, &from(BLUE_A).frame(&error), IcmpUnrelated)?;
        }
        Ok(())
    })
}
