//! Tests lengths and versions in IP headers: the frame must contain the whole packet, and later bytes are ignored.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::Verdict::{self, Malformed, Redirected, Truncated};
use kni_integration::{frames::TcpFlags, model::Seen, programs::action_of, require};

use super::table::{A4, A6, B4, B6, BLUE_A, BLUE_B, FAMILIES, Table, from, ip, table, tcp, udp};

/// Changed bytes of a frame with 4 bytes of UDP payload: name, offset, bytes, verdict.
type Change = (&'static str, usize, &'static [u8], Verdict);

const IPV4: &[Change] = &[
    ("version 5", 14, &[0x55], Malformed),
    ("header length 16", 14, &[0x44], Malformed),
    ("header length 60, total 32", 14, &[0x4f], Malformed),
    ("total length 19", 16, &[0, 19], Malformed),
    ("total length 0", 16, &[0, 0], Malformed),
    ("total length one too long", 16, &[0, 33], Truncated),
    ("total length 65535", 16, &[0xff, 0xff], Truncated),
    ("total length ends before the ports", 16, &[0, 20], Truncated),
    ("total length ends inside the UDP header", 16, &[0, 27], Truncated),
    ("total length ends behind the UDP header", 16, &[0, 28], Redirected),
];

const IPV6: &[Change] = &[
    ("version 4", 14, &[0x40], Malformed),
    ("payload length one too long", 18, &[0, 13], Truncated),
    ("payload length 65535", 18, &[0xff, 0xff], Truncated),
    ("payload length 0", 18, &[0, 0], Truncated),
    ("payload length ends inside the UDP header", 18, &[0, 7], Truncated),
    ("payload length ends behind the UDP header", 18, &[0, 8], Redirected),
];

#[test]
fn lengths_and_versions_must_be_true() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("lengths", |table| {
        let (v4, v6): ([IpAddr; 2], [IpAddr; 2]) = ([A4.into(), B4.into()], [A6.into(), B6.into()]);
        for (family, [a, b], changes) in [("IPv4", v4, IPV4), ("IPv6", v6, IPV6)] {
            for (name, at, bytes, expected) in changes {
                let mut frame = from(BLUE_A).frame(&udp(a, b));
                frame[*at..at + bytes.len()].copy_from_slice(bytes);
                table.fresh(&format!("{family} {name}"), BLUE_A, &frame, *expected)?;
            }
        }
        for (a, b) in FAMILIES {
            let padded = [from(BLUE_A).frame(&udp(a, b)), vec![0xaa; 30]].concat();
            table.reaches("padding behind the packet", BLUE_A, &padded, BLUE_B)?;
            let empty = from(BLUE_A).frame(&ip(a, b).around(6, &[]));
            table.fresh("TCP without a header", BLUE_A, &empty, Truncated)?;
            // The bytes at the position of the flags are padding.
            let ports_only = from(BLUE_A).frame(&ip(a, b).around(6, &[15, 160, 0, 80, 0, 0, 0, 1]));
            let hidden = [ports_only, vec![0x10; 12]].concat();
            table.fresh("TCP flags in the padding", BLUE_A, &hidden, Truncated)?;
        }
        segments(table)
    })
}

/// A packet of several segments: its length fields cover the whole packet, or are zero above 64 KiB (RFC 2675).
fn segments(table: &mut Table<'_>) -> Result<()> {
    for (a, b) in FAMILIES {
        let mut frame = from(BLUE_A).frame(&tcp(a, b, TcpFlags::ACK));
        let length = if a.is_ipv4() { 16 } else { 18 };
        frame[length..length + 2].fill(0);
        let programs = table.step.programs();
        let ran = programs.run_as(Seen::from_pod(BLUE_A), &frame, 1400)?;
        ensure!(
            ran.action == action_of(Redirected),
            "a segmented packet is not redirected: {}",
            ran.action
        );
        let expected = table.step.model.evaluate(
            Seen::from_pod(BLUE_A),
            &from(BLUE_A).frame(&tcp(a, b, TcpFlags::ACK)),
            &mut |_| 0,
        );
        ensure!(ran.frame[..12] == expected.frame[..12], "wrong MAC addresses");
    }
    Ok(())
}
