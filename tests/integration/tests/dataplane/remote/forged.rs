//! Tests packets that a process of the node sends by the uplink to the tunnel's port of another node, with any VLAN
//! tags, options or extension headers in front of the port.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction::ToUplink, Verdict::OverlayPort};
use kni_integration::{
    frames::{Extension, Ip, Link, Payload, TcpFlags},
    require,
};

use super::scene::{NODE, OWN, Scene, THEIRS, VXLAN_PORT, inside, own_underlay, tagged, underlay};

const UDP: u8 = 17;

fn node(v4: bool) -> Ip {
    Ip::new(own_underlay(v4), underlay(NODE, v4))
}

fn destination() -> Extension {
    Extension::DestinationOptions(vec![1, 4, 0, 0, 0, 0])
}

fn fragment(more: bool) -> Extension {
    Extension::Fragment { offset: 0, more, id: 9 }
}

/// A routing header with that many segments left, as a process without capabilities may set.
fn routing(left: u8) -> Extension {
    let IpAddr::V6(next) = underlay(NODE, false) else {
        unreachable!("an IPv6 address")
    };
    Extension::Routing(2, left, [&[0; 4][..], &next.octets()].concat())
}

/// Headers that lead to the payload.
fn headers() -> Vec<(String, Ip)> {
    let options: [&[u8]; 8] = [
        &[],
        &[148, 4, 0, 0],
        &[1; 10],
        &[1; 12],
        &[1; 40],
        &[131, 7, 4, 10, 0, 0, 9, 0],
        &[68, 1, 0, 0],
        &[0, 9, 9, 9],
    ];
    let v4 = options
        .into_iter()
        .map(|options| (format!("options {options:?}"), node(true).options(options)));
    let v6 = [
        vec![],
        vec![Extension::HopByHop(vec![1, 4, 0, 0, 0, 0])],
        vec![destination(); 6],
        vec![destination(); 7],
        vec![destination(); 40],
        vec![destination(), Extension::HopByHop(vec![1, 4, 0, 0, 0, 0])],
        vec![Extension::DestinationOptions(vec![0; 1000]), destination()],
        vec![routing(0)],
        vec![routing(1)],
        vec![routing(1), fragment(false)],
        vec![routing(1), fragment(true)],
    ];
    let v6 = v6.into_iter().map(|extensions| {
        let what = format!("{} extension headers: {:?}", extensions.len(), extensions.last());
        (what, extensions.into_iter().fold(node(false), Ip::extension))
    });
    v4.chain(v6).collect()
}

/// The packet leaves by the uplink.
fn leaves(scene: &Scene<'_>, what: &str, packet: &[u8]) -> Result<()> {
    scene.send_by_uplink(packet)?;
    scene
        .on_fabric(|found| found == packet)
        .map(drop)
        .with_context(|| what.to_owned())
}

fn refused(scene: &Scene<'_>, what: &str, packet: &[u8]) -> Result<()> {
    scene.dropped(what, ToUplink, OverlayPort, || scene.send_by_uplink(packet))
}

fn to_port(port: u16) -> Payload {
    Payload::udp(OWN, port, b"anything")
}

#[test]
fn no_header_hides_the_port_of_the_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("forged-headers", |scene| {
        for (what, ip) in headers() {
            refused(scene, &what, &ip.packet(&to_port(VXLAN_PORT)))?;
        }
        // The first fragment has the port, and the others are of no use without it.
        for v4 in [true, false] {
            let fragments = node(v4).fragments(&to_port(VXLAN_PORT), 8);
            let (first, later) = fragments.split_first().context("several fragments")?;
            refused(scene, "a first fragment", first)?;
            for fragment in later {
                leaves(scene, "a later fragment", fragment)?;
            }
        }
        // The port may be in the next fragment.
        let split = node(false).extension(fragment(true)).extension(destination());
        refused(scene, "a fragment of headers", &split.around(UDP, &[]))?;
        let split = node(false).extension(fragment(true)).around(60, &[]);
        refused(scene, "a fragment without headers", &split)
    })
}

#[test]
fn other_packets_of_the_node_leave_whatever_their_headers() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("unforged-headers", |scene| {
        let mut datagrams = 0;
        for (what, ip) in headers() {
            // Behind so many headers that the port is not found, only datagrams would be worth a drop, and none is
            // known.
            let found = ip.extensions.len() < 40;
            for payload in [
                to_port(THEIRS),
                Payload::tcp(OWN, VXLAN_PORT, TcpFlags::SYN),
                Payload::sctp_init(OWN, VXLAN_PORT),
                Payload::echo_request(ip.source.is_ipv4(), 7, VXLAN_PORT, b""),
                Payload::Raw {
                    protocol: 41,
                    bytes: VXLAN_PORT.to_be_bytes().repeat(40),
                },
            ] {
                if found {
                    leaves(scene, &format!("{payload:?} behind {what}"), &ip.packet(&payload))?;
                    datagrams += 1;
                }
            }
        }
        ensure!(datagrams == 18 * 5, "{datagrams} packets");
        // Without a tunnel the port is one like any other.
        scene.remove_tunnel()?;
        for (what, ip) in headers() {
            leaves(scene, &what, &ip.packet(&to_port(VXLAN_PORT)))?;
        }
        Ok(())
    })
}

/// A frame behind these tags, all of this EtherType.
fn behind(tags: &[u16], ethertype: [u8; 2], link: Link, packet: &[u8]) -> Vec<u8> {
    let mut frame = tagged(link, tags).frame(packet);
    for at in (0..tags.len()).map(|tag| 12 + 4 * tag) {
        frame[at..at + 2].copy_from_slice(&ethertype);
    }
    frame
}

/// The kernel of a receiver removes every tag without a VLAN.
#[test]
fn no_vlan_tag_hides_the_port_of_the_tunnel() -> Result<()> {
    const PRIORITY: u16 = 5 << 13;
    require!(root, netns, bpf, ip);
    inside("forged-tags", |scene| {
        for ethertype in [[0x81, 0x00], [0x88, 0xa8]] {
            for tags in [&[0][..], &[PRIORITY], &[7], &[0, 0], &[0, 7], &[7, 0], &[7, 7]] {
                for (what, ip) in headers() {
                    let what = format!("tags {tags:?} of {ethertype:?}, {what}");
                    let sent = |port| {
                        let packet = ip.packet(&to_port(port));
                        scene.send_frame_by_uplink(|link| behind(tags, ethertype, link, &packet))
                    };
                    scene.dropped(&what, ToUplink, OverlayPort, || sent(VXLAN_PORT))?;
                    if ip.extensions.len() < 40 {
                        sent(THEIRS)?;
                        let packet = ip.packet(&to_port(THEIRS));
                        scene.leaves_behind_tags(&packet).context(what)?;
                    }
                }
            }
            // Behind more tags than any process has a reason for, nothing is looked for.
            let packet = node(true).packet(&to_port(THEIRS));
            scene.dropped("three tags", ToUplink, OverlayPort, || {
                scene.send_frame_by_uplink(|link| behind(&[0, 0, 0], ethertype, link, &packet))
            })?;
        }
        Ok(())
    })
}
