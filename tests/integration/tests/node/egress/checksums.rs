//! Tests sums over whole packets that a device has computed (`CHECKSUM_COMPLETE`): an uplink that unpacks VXLAN with
//! outer checksums leaves one with each packet, and what the programs change must not falsify it.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces, Node, Outside,
    foreign::DeviceSums,
    node::{FABRIC_V4, NODE_V4},
    require,
    traffic::{tcp_get, udp_ask},
};
use nix::net::if_::if_nametoindex;

use super::{
    PORT,
    world::{World, masquerading, patience, server},
};
use crate::node_traffic::checksums::without_offload;

const NODE_INNER: &str = "2001:db8:77::2";
const ROUTER_INNER: &str = "2001:db8:77::1";

/// A tunnel between node and router whose outer UDP checksums are computed by the stack and checked by it.
fn tunnel(ns: &Namespaces, below: &str, own: &str, other: &str, inner: &str) -> Result<()> {
    without_offload(ns, below)?;
    ns.ip(&[&format!(
        "link add vx0 type vxlan id 7 local {own} remote {other} dev {below} dstport 4789 udpcsum"
    )])?;
    ns.ip(&["link set vx0 up"])?;
    ns.add_address("vx0", &format!("{inner}/64"))
}

#[tokio::test(flavor = "multi_thread")]
async fn sums_of_a_device_stay_right() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("sums")?;
    let outside = Outside::new(&node)?;
    tunnel(&node, "uplink0", NODE_V4, FABRIC_V4, NODE_INNER)?;
    tunnel(&outside.router, "fabric0", FABRIC_V4, NODE_V4, ROUTER_INNER)?;
    node.ip(&[&format!("route replace default via {ROUTER_INNER} dev vx0")])?;
    let world = World::on(node, outside, masquerading(), &["--uplink", "vx0"]).await?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("sums").await?;
    let sums = pod.inside.enter(|| DeviceSums::attach(if_nametoindex("eth0")?))??;
    let there = server(false);
    for _ in 0..10 {
        udp_ask(&pod.inside, there.ip(), PORT, patience()).context("UDP")?;
        tcp_get(&pod.inside, there.ip(), PORT, patience()).context("TCP")?;
    }
    let (right, wrong) = sums.right_and_wrong()?;
    ensure!(right >= 20 && wrong == 0, "{right} right sums, {wrong} wrong ones");
    Ok(())
}
