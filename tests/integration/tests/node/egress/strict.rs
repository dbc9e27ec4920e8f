//! Tests that a node with a strict reverse path filter accepts the packets of pods.

use std::fs;

use anyhow::{Context as _, Result};
use kni_integration::{
    Node, Outside,
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::{Servers, tcp_get, udp_ask},
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

#[tokio::test(flavor = "multi_thread")]
async fn every_way_works_under_strict_reverse_path_filtering() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("strict")?;
    for name in [
        "all/rp_filter",
        "default/rp_filter",
        "uplink0/rp_filter",
        "all/src_valid_mark",
        "default/src_valid_mark",
    ] {
        let file = format!("/proc/sys/net/ipv4/conf/{name}");
        node.enter(|| fs::write(&file, "1"))?.context(file.clone())?;
    }
    let outside = Outside::new(&node)?;
    let world = World::on(node, outside, masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let _on_node = Servers::start(&world.stage.node, "node", PORT)?;
    let (pod, other) = (world.stage.pod("strict").await?, world.stage.pod("other").await?);
    let blue = world.stage.pod_in("blue", "strict-blue", "10.10.0.11,fd10::11").await?;
    let _on_pod = Servers::start(&pod.inside, "pod", PORT)?;
    for v4 in FAMILIES {
        let node = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        for (what, from, to, identity) in [
            ("a pod to the server", &pod.inside, server(v4).ip(), "server"),
            (
                "a pod of another network to the server",
                &blue.inside,
                server(v4).ip(),
                "server",
            ),
            ("a pod to a pod", &other.inside, address(&pod, v4), "pod"),
            ("a pod to the node", &pod.inside, node, "node"),
            ("the node to a pod", &*world.stage.node, address(&pod, v4), "pod"),
        ] {
            for answer in [tcp_get(from, to, PORT, patience()), udp_ask(from, to, PORT, patience())] {
                let answer = answer.with_context(|| format!("{what}, IPv4 {v4}"))?;
                assert_eq!(answer.identity, identity, "{what}");
            }
        }
    }
    // The filter is active: packets from an interface without a route back are dropped.
    let filter = world
        .stage
        .node
        .enter(|| fs::read_to_string("/proc/sys/net/ipv4/conf/all/rp_filter"))??;
    assert_eq!(filter.trim(), "1", "the agent changed the node's own setting");
    watch.assert_clean();
    Ok(())
}
