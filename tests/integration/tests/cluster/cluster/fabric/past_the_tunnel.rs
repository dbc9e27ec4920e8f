//! Tests packets in the name of pods that come to a node without a tunnel: plain frames of a host on the wire between
//! the nodes.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_integration::{
    cluster::Member,
    frames::{Ip, Link, Mac, PacketSocket, Payload, parse_mac},
};
use kube::{Api, api::ListParams};
use serde_json::Value;

use super::{
    super::scene::{PORT, address},
    bed::Bed,
    forgery::refused,
};

/// No frame is delivered in the name of a pod of the default network, nor does the node carry it on to another one,
/// which would believe the node.
pub(super) async fn frames(bed: &Bed) -> Result<()> {
    let member = &bed.cluster.nodes[0];
    no_source_is_checked(member)?;
    let mac = uplink(member)?;
    let socket = PacketSocket::open(bed.cluster.fabric.inside(), "port11")?;
    for v4 in [true, false] {
        let [own, there, third] = [1, 2, 3].map(|node| address(bed.pod("plain", node), v4));
        let cases = [
            ("a pod of another node", there, own, ("to_pod", "foreign_node")),
            ("no pod", unowned(bed, v4).await?, own, ("to_pod", "owner_unknown")),
            ("the receiver", own, own, ("to_pod", "source_address")),
            (
                "a pod of the node to another node",
                own,
                there,
                ("to_overlay", "source_address"),
            ),
            (
                "a pod of a third node to another one",
                third,
                there,
                ("to_overlay", "foreign_node"),
            ),
        ];
        for (what, from, to, (direction, reason)) in cases {
            let packet = Ip::new(from, to).packet(&Payload::udp(999, PORT, b"in another's name"));
            let frame = Link::new([2, 0, 0, 0, 7, 7], mac).frame(&packet);
            let what = format!("a frame in the name of {what}, {from} to {to}");
            refused((bed, &what), (member, direction, reason), |_number| {
                Ok(socket.send(&frame)?)
            })
            .await?;
        }
    }
    Ok(())
}

/// An address of the default network in no block of a node.
pub(super) async fn unowned(bed: &Bed, v4: bool) -> Result<IpAddr> {
    let blocks: Api<AddressBlock> = Api::all(bed.cluster.client.clone());
    let blocks = blocks.list(&ListParams::default()).await?.items;
    let taken = blocks.iter().filter(|block| block.spec.network == "default");
    let taken: Vec<IpNet> = taken.map(|block| block.spec.cidr.parse()).collect::<Result<_, _>>()?;
    let mut candidates = (0..=255_u8).rev().map(|block| {
        if v4 {
            IpAddr::from([10, 244, block, 9])
        } else {
            IpAddr::from([0xfd00, 0x244, 0, 0, 0xffff, u16::from(block), 0, 9])
        }
    });
    let free = candidates.find(|address| !taken.iter().any(|block| block.contains(address)));
    free.context("a free block")
}

/// Turns off the kernel's own check, which IPv6 does not have.
pub(super) fn no_source_is_checked(member: &Member) -> Result<()> {
    for interface in ["all", "uplink0"] {
        let file = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        member.node.enter(|| std::fs::write(&file, "0"))?.context(file)?;
    }
    Ok(())
}

/// The MAC address of the node's uplink.
pub(super) fn uplink(member: &Member) -> Result<Mac> {
    let shown: Value = serde_json::from_str(&member.node.run("ip", &["-j", "link", "show", "uplink0"])?)?;
    let mac = shown[0]["address"].as_str().and_then(parse_mac);
    mac.context("a MAC address")
}
