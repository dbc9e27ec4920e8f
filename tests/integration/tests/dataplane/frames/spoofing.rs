//! Tests frames with a forged source, or that bypass the gateway.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict;
use kni_integration::{frames::Link, programs::FOREIGN, require};

use super::table::{
    A4, A6, B4, B6, BLUE_A, BLUE_B, DEFAULT_A, FAMILIES, FREE, OUTSIDE4, OUTSIDE6, RED_A, RED_B, from, host_mac, ip,
    mac, table, udp,
};

#[test]
fn spoofed_frames_are_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("spoofing", |table| {
        for (a, b) in FAMILIES {
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let outside: IpAddr = if a.is_ipv4() { OUTSIDE4.into() } else { OUTSIDE6.into() };
            let zero: IpAddr = if a.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let mut refused = |name: &str, link: &Link, source: IpAddr, to: IpAddr, expected| {
                let name = format!("{family} {name}");
                table.fresh(&name, BLUE_A, &link.frame(&udp(source, to)), expected)
            };
            let own = from(BLUE_A);
            refused("the peer's source address", &own, b, a, Verdict::SourceAddress)?;
            refused("a foreign source address", &own, outside, b, Verdict::SourceAddress)?;
            refused("no source address", &own, zero, b, Verdict::SourceAddress)?;
            let wrong = [
                ("the peer's", mac(BLUE_B)),
                ("the same address's in another network", mac(RED_A)),
                ("the gateway's", host_mac(BLUE_A)),
                ("a broadcast", [0xff; 6]),
                ("an all-zero", [0; 6]),
            ];
            for (whose, source) in wrong {
                let link = Link::new(source, host_mac(BLUE_A));
                refused(&format!("{whose} source MAC"), &link, a, b, Verdict::SourceMac)?;
            }
            for (whose, destination) in [
                ("the peer's", mac(BLUE_B)),
                ("the other network's peer's", mac(RED_B)),
                ("the other network's gateway's", host_mac(RED_A)),
                ("a broadcast", [0xff; 6]),
                ("the own", mac(BLUE_A)),
            ] {
                let link = Link::new(mac(BLUE_A), destination);
                refused(
                    &format!("{whose} destination MAC"),
                    &link,
                    a,
                    b,
                    Verdict::DestinationMac,
                )?;
            }
        }
        Ok(())
    })
}

#[test]
fn only_an_endpoints_own_interface_sends_for_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("interfaces", |table| {
        for (a, b) in FAMILIES {
            let family = if a.is_ipv4() { "IPv4" } else { "IPv6" };
            let frame = from(RED_A).frame(&udp(a, b));
            let name = |rest: &str| format!("{family} {rest}");
            // Addresses are valid in both networks: only the MAC address is wrong.
            table.fresh(
                &name("red's frame on blue's interface"),
                BLUE_A,
                &frame,
                Verdict::SourceMac,
            )?;
            table.fresh(&name("on a free interface"), FREE, &frame, Verdict::EndpointNotReady)?;
            table.fresh(
                &name("on no endpoint's interface"),
                FOREIGN,
                &frame,
                Verdict::NoEndpoint,
            )?;
            table.received(&name("to a free interface"), FREE, &frame, Verdict::EndpointNotReady)?;
            table.received(
                &name("to no endpoint's interface"),
                FOREIGN,
                &frame,
                Verdict::NoEndpoint,
            )?;
        }
        Ok(())
    })
}

/// DHCP uses a source address other than the pod's; addresses are assigned by KNI.
#[test]
fn what_asks_for_an_address_is_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("unconfigured", |table| {
        let discover = ip([0; 4], [255; 4]).packet(&kni_integration::frames::Payload::udp(68, 67, &[1; 240]));
        let mut link = from(DEFAULT_A);
        link.destination = [0xff; 6];
        table.fresh(
            "DHCP discover",
            DEFAULT_A,
            &link.frame(&discover),
            Verdict::SourceAddress,
        )?;
        let link_local: IpAddr = "fe80::1234".parse()?;
        let solicit: IpAddr = "ff02::1:2".parse()?;
        let frame = from(DEFAULT_A).frame(&udp(link_local, solicit));
        table.fresh("DHCPv6 solicit", DEFAULT_A, &frame, Verdict::SourceAddress)?;
        let frame = from(DEFAULT_A).frame(&udp(link_local, B6));
        table.fresh("link-local source", DEFAULT_A, &frame, Verdict::SourceAddress)?;
        let mapped_source = A4.to_ipv6_mapped();
        let frame = from(BLUE_A).frame(&udp(mapped_source, B6));
        table.fresh("v4-mapped source in IPv6", BLUE_A, &frame, Verdict::Malformed)?;
        let frame = from(BLUE_A).frame(&udp(A6, B4.to_ipv6_mapped()));
        table.fresh("v4-mapped destination in IPv6", BLUE_A, &frame, Verdict::Malformed)?;
        let compatible: IpAddr = "::10.0.0.3".parse()?;
        let frame = from(BLUE_A).frame(&udp(A6, compatible));
        table.fresh("v4-compatible destination in IPv6", BLUE_A, &frame, Verdict::NoRoute)?;
        Ok(())
    })
}
