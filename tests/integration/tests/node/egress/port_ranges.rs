//! Tests that an overlap of the ports for masquerading with those that the node's own sockets get is reported.

use std::fs;

use anyhow::{Result, ensure};
use kni_integration::{
    Node, Outside,
    agent::{METRICS, metrics},
    eventually, patience, require,
};

use super::world::{World, masquerading};

const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

fn metric(world: &World) -> Result<String> {
    let page = metrics(&world.stage.node, METRICS)?;
    let line = page
        .lines()
        .find(|line| line.starts_with("kni_masquerade_ports_shared"));
    Ok(line.unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_that_the_kernel_hands_out_too_are_reported() -> Result<()> {
    require!(root, netns, bpf, ip);
    for (range, reserved, shared) in [
        ("32768 60999", "", 0),
        ("1024 65535", "", 4536),
        ("1024 65535", "61000-65535", 0),
        ("1024 61009", "61000-61003,61005", 5),
    ] {
        let node = Node::new("ranges")?;
        node.enter(|| fs::write(RANGE, range).and_then(|()| fs::write(RESERVED, format!("{reserved}\n"))))??;
        let outside = Outside::new(&node)?;
        let args = ["--metrics-address", METRICS];
        let world = World::on(node, outside, masquerading(), &args).await?;
        let case = format!("{range}, reserved {reserved:?}");
        eventually(patience(), async || {
            let line = metric(&world)?;
            ensure!(line.ends_with(&format!(" {shared}")), "{case}: metric {line:?}");
            Ok(())
        })
        .await?;
        let status = world.stage.knictl(&["status"])?;
        let log = world.stage.agent.log();
        for told in [&status, &log] {
            let found = told.contains("ip_local_reserved_ports");
            ensure!(found == (shared > 0), "{case}: {told}");
        }
        // A warning, no failure: the agent is ready.
        ensure!(world.stage.status().await.is_ok());
    }
    Ok(())
}
