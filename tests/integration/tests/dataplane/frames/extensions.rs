//! Tests IPv6 extension headers.

use anyhow::Result;
use kni_common::Verdict::{ExtensionHeaders, Malformed, Redirected, SourceRoute, Truncated};
use kni_integration::{
    frames::{Extension, Ip, Payload, TcpFlags},
    require,
};

use super::table::{A6, B6, BLUE_A, from, ip, table};

fn hop() -> Extension {
    Extension::HopByHop(vec![1, 4, 0, 0, 0, 0])
}

fn destination() -> Extension {
    Extension::DestinationOptions(vec![1, 4, 0, 0, 0, 0])
}

fn routing(kind: u8) -> Extension {
    Extension::Routing(kind, 0, vec![0; 4])
}

/// A routing header whose packet is still on its way to the address in it.
fn unfinished(kind: u8) -> Extension {
    Extension::Routing(kind, 1, vec![0; 20])
}

#[test]
fn ipv6_extension_headers_are_walked() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("IPv6 extension headers", |table| {
        let long = Extension::DestinationOptions([&[1, 252][..], &[0; 252]].concat());
        let atomic = Extension::Fragment {
            offset: 0,
            more: false,
            id: 7,
        };
        for (name, extensions, expected) in [
            ("hop-by-hop", vec![hop()], Redirected),
            ("destination options", vec![destination()], Redirected),
            ("routing type 2", vec![routing(2)], Redirected),
            ("routing type 4", vec![routing(4)], Redirected),
            ("routing type 253", vec![routing(253)], Redirected),
            ("atomic fragment", vec![atomic.clone()], Redirected),
            ("256 bytes of options", vec![long], Redirected),
            (
                "all kinds",
                vec![hop(), destination(), routing(3), atomic, destination()],
                Redirected,
            ),
            ("6 headers", vec![destination(); 6], Redirected),
            ("7 headers", vec![destination(); 7], ExtensionHeaders),
            ("routing type 0", vec![routing(0)], SourceRoute),
            (
                "routing type 0 behind others",
                vec![hop(), destination(), routing(0)],
                SourceRoute,
            ),
            ("routing type 2 with a segment left", vec![unfinished(2)], SourceRoute),
            ("routing type 3 with a segment left", vec![unfinished(3)], SourceRoute),
            ("routing type 4 with a segment left", vec![unfinished(4)], SourceRoute),
            (
                "routing type 253 with a segment left, behind others",
                vec![hop(), destination(), unfinished(253)],
                SourceRoute,
            ),
            ("hop-by-hop not first", vec![destination(), hop()], Malformed),
            ("two hop-by-hop", vec![hop(), hop()], Malformed),
        ] {
            let with = extensions.iter().cloned().fold(ip(A6, B6), Ip::extension);
            for (what, payload) in [
                ("UDP", Payload::udp(4000, 53, b"data")),
                ("TCP", Payload::tcp(4000, 80, TcpFlags::SYN)),
                ("SCTP", Payload::sctp_init(1, 2)),
                ("echo", Payload::echo_request(false, 7, 1, b"")),
            ] {
                let frame = from(BLUE_A).frame(&with.packet(&payload));
                table.fresh(&format!("{name}, {what}"), BLUE_A, &frame, expected)?;
            }
        }
        Ok(())
    })
}

#[test]
fn what_only_looks_like_an_extension_header_is_not_walked() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("IPv6 headers that lie", |table| {
        // Protocols that only resemble extension headers have no ports.
        for (name, protocol) in [
            ("authentication", 51),
            ("mobility", 135),
            ("HIP", 139),
            ("Shim6", 140),
            ("none", 59),
        ] {
            let frame = from(BLUE_A).frame(&ip(A6, B6).around(protocol, &[59, 0, 0, 0, 0, 0, 0, 0]));
            table.fresh(name, BLUE_A, &frame, Redirected)?;
        }
        let mut frame = from(BLUE_A).frame(
            &ip(A6, B6)
                .extension(destination())
                .packet(&Payload::udp(4000, 53, b"data")),
        );
        frame[55] = 9;
        table.fresh("longer than the packet", BLUE_A, &frame, Truncated)?;
        frame[54] = 59;
        table.fresh("longer than the packet, none behind", BLUE_A, &frame, Truncated)?;
        let frame = from(BLUE_A).frame(&ip(A6, B6).around(60, &[17, 0, 0, 0]));
        table.fresh("cut inside", BLUE_A, &frame, Truncated)?;
        let chained = from(BLUE_A).frame(&ip(A6, B6).around(60, &[60, 0, 1, 4, 0, 0, 0, 0]));
        table.fresh("promises another", BLUE_A, &chained, Truncated)?;
        Ok(())
    })
}
