//! Tests ARP and neighbour discovery of pods behind the bridge plugin: others on the bridge learn a pod's own addresses
//! from it, and those of no one else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    eventually,
    frames::{ETHERTYPE_ARP, Ip, Link, Mac, PacketSocket, Payload, arp_request, parse_mac},
    patience, require,
};

use super::{policy::Scene, scene::address};

/// Times that each frame is sent.
const TIMES: u64 = 20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: Mac = [0x33, 0x33, 0, 0, 0, 1];
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x77);
/// The gateway of the bridge, which every pod resolves.
const GATEWAY4: Ipv4Addr = Ipv4Addr::new(10, 245, 0, 1);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x245, 0, 0, 0, 0, 0, 1);

/// What the pod sends, and the reason of the drop, if any.
struct Case {
    what: &'static str,
    frame: Vec<u8>,
    dropped: Option<&'static str>,
}

/// A neighbour advertisement, router advertisement or redirect: the ICMPv6 type and the body after the checksum.
fn discovery(mac: Mac, source: Ipv6Addr, kind: u8, body: Vec<u8>) -> Vec<u8> {
    let ip = Ip::new(source.into(), ALL_NODES.into()).hop_limit(255);
    let packet = ip.packet(&Payload::Icmp { kind, code: 0, body });
    Link::new(mac, ALL_NODES_MAC).frame(&packet)
}

fn advertisement(mac: Mac, source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    // Override, and the target link-layer address option.
    let body = [&[0x20, 0, 0, 0][..], &target.octets(), &[2, 1], &mac].concat();
    discovery(mac, source, 136, body)
}

/// Duplicate address detection.
fn solicitation(mac: Mac, target: Ipv6Addr) -> Vec<u8> {
    let body = [&[0; 4][..], &target.octets()].concat();
    discovery(mac, Ipv6Addr::UNSPECIFIED, 135, body)
}

fn cases(mac: Mac, v4: Ipv4Addr, v6: Ipv6Addr) -> Vec<Case> {
    let arp = |sender, reply: bool| {
        let mut frame = arp_request(mac, sender, sender);
        if reply {
            frame[21] = 2;
        }
        frame
    };
    let foreign_mac = Link::new(mac, [0xff; 6]).frame_of(ETHERTYPE_ARP, &arp_request([2; 6], v4, v4)[14..]);
    // Current hop limit 64, the lifetime of a default router, no timers.
    let router = discovery(mac, LINK_LOCAL, 134, vec![64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0]);
    let redirect = [&[0; 4][..], &LINK_LOCAL.octets(), &GATEWAY6.octets()].concat();
    let case = |what, frame, dropped| Case { what, frame, dropped };
    let forged = Some("source_address");
    vec![
        case("gratuitous ARP of its own", arp(v4, false), None),
        case("ARP reply of its own", arp(v4, true), None),
        case("gratuitous ARP of the gateway", arp(GATEWAY4, false), forged),
        case("ARP reply of the gateway", arp(GATEWAY4, true), forged),
        case("ARP of a foreign MAC address", foreign_mac, forged),
        case("advertisement of its own", advertisement(mac, v6, v6), None),
        case(
            "advertisement of link-local",
            advertisement(mac, LINK_LOCAL, LINK_LOCAL),
            None,
        ),
        case("advertisement of the gateway", advertisement(mac, v6, GATEWAY6), forged),
        case(
            "the same from link-local",
            advertisement(mac, LINK_LOCAL, GATEWAY6),
            forged,
        ),
        case("search for its own address", solicitation(mac, v6), None),
        case("search for the gateway's address", solicitation(mac, GATEWAY6), forged),
        case("router advertisement", router, Some("icmp_type")),
        case("redirect", discovery(mac, LINK_LOCAL, 137, redirect), Some("icmp_type")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_behind_a_plugin_tells_others_of_its_own_addresses_only() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let scene = Scene::set("plugin-link").await?;
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (
        address(&scene.friend, "eth0", true).parse()?,
        address(&scene.friend, "eth0", false).parse()?,
    ) else {
        unreachable!("an address of each family");
    };
    let link = scene.friend.inside.run("ip", &["-br", "link", "show", "eth0"])?;
    let mac = link
        .split_whitespace()
        .find_map(parse_mac)
        .context("the pod's MAC address")?;
    let sender = PacketSocket::open(&scene.friend.inside, "eth0")?;
    let receiver = PacketSocket::open_arriving(&scene.server.inside, "eth0")?;
    for Case { what, frame, dropped } in cases(mac, v4, v6) {
        let count = async || match dropped {
            Some(reason) => scene.drops(&scene.friend, reason).await,
            None => Ok(0),
        };
        let before = count().await?;
        receiver.drain(|_earlier| ())?;
        for _ in 0..TIMES {
            sender.send(&frame)?;
        }
        let expected = if dropped.is_some() { TIMES } else { 0 };
        eventually(patience(), async || {
            let more = count().await? - before;
            ensure!(more == expected, "{what}: {more} drops, expected {expected}");
            Ok(())
        })
        .await?;
        if dropped.is_none() {
            for _ in 0..TIMES {
                let arrived = receiver.receive(patience(), |seen| seen == frame)?;
                arrived.with_context(|| format!("{what}: not all arrived"))?;
            }
        } else {
            // Each one is counted as a drop, so none is under way.
            let mut arrived = 0;
            receiver.drain(|seen| arrived += u32::from(seen == frame))?;
            ensure!(arrived == 0, "{what}: {arrived} arrived");
        }
    }
    Ok(())
}
