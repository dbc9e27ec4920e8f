//! Tests IPv4 options.

use anyhow::Result;
use kni_common::Verdict::{self, ExtensionHeaders, Malformed, Redirected, SourceRoute};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{A4, B4, BLUE_A, from, ip, table};

const OPTIONS: &[(&str, &[u8], Verdict)] = &[
    ("router alert", &[148, 4, 0, 0], Redirected),
    ("timestamp", &[68, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0], Redirected),
    ("record route", &[7, 7, 4, 0, 0, 0, 0, 0], Redirected),
    ("security", &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Redirected),
    ("padding only", &[1, 1, 1, 0], Redirected),
    ("anything behind the end", &[0, 131, 3, 4], Redirected),
    ("unknown option", &[200, 4, 1, 2], Redirected),
    ("loose source route", &[131, 7, 4, 10, 0, 0, 9, 0], SourceRoute),
    ("strict source route", &[137, 7, 4, 10, 0, 0, 9, 0], SourceRoute),
    ("source route behind padding", &[1, 1, 131, 3, 4, 0, 0, 0], SourceRoute),
    ("source route without a length", &[1, 1, 1, 137], SourceRoute),
    (
        "source route behind an option",
        &[148, 4, 0, 0, 131, 3, 4, 0],
        SourceRoute,
    ),
    ("length 0", &[68, 0, 0, 0], Malformed),
    ("length 1", &[68, 1, 0, 0], Malformed),
    ("longer than the header", &[68, 5, 0, 0], Malformed),
    ("length behind the header", &[1, 1, 1, 68], Malformed),
    ("10 options", &[1, 1, 1, 1, 1, 1, 1, 1, 1, 68, 3, 5], Redirected),
    (
        "10 options and the end",
        &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        ExtensionHeaders,
    ),
    ("12 options", &[1; 12], ExtensionHeaders),
    ("40 options", &[1; 40], ExtensionHeaders),
];

#[test]
fn ipv4_options_are_walked() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("IPv4 options", |table| {
        let mut longest = vec![222, 40];
        longest.resize(40, 0);
        let longest = ("40 bytes of one option", &longest[..], Redirected);
        for (name, options, expected) in OPTIONS.iter().copied().chain([longest]) {
            for (what, payload) in [
                ("UDP", Payload::udp(4000, 53, b"data")),
                ("TCP", Payload::tcp(4000, 80, TcpFlags::SYN)),
            ] {
                let frame = from(BLUE_A).frame(&ip(A4, B4).options(options).packet(&payload));
                table.fresh(&format!("{name}, {what}"), BLUE_A, &frame, expected)?;
            }
        }
        Ok(())
    })
}
