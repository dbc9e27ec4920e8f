//! Tests that translated connections outlive the agent.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::Result;
use kni_integration::{require, traffic::Stream};

use super::{FAMILIES, HOST_PORT, Scene, VIP_PORT, node, vip_at};

const WHILE: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread")]
async fn translated_connections_survive_a_killed_agent() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let mut scene = Scene::set("survival").await?;
    let mut streams = Vec::new();
    for v4 in FAMILIES {
        let (to, host_port) = (vip_at(v4, VIP_PORT), SocketAddr::new(node(v4), HOST_PORT));
        let fabric = scene.stage.node.fabric();
        streams.push(("client, TCP", Stream::tcp(&scene.client.inside, to)?));
        streams.push(("client, UDP", Stream::udp(&scene.client.inside, to)?));
        streams.push(("node, TCP", Stream::tcp(&scene.stage.node, to)?));
        streams.push(("outside, TCP", Stream::tcp(fabric, host_port)?));
    }
    thread::sleep(WHILE);
    scene.stage.agent.kill9()?;
    thread::sleep(WHILE);
    // New connections work, too, while no agent is running.
    for v4 in FAMILIES {
        let to = vip_at(v4, VIP_PORT);
        streams.push((
            "client, opened without an agent",
            Stream::tcp(&scene.client.inside, to)?,
        ));
    }
    thread::sleep(WHILE);
    scene.stage.agent.restart()?;
    thread::sleep(WHILE);
    for (what, stream) in streams {
        let report = stream.stop();
        println!("{what}: {report:?}");
        report.assert_whole("backend");
    }
    Ok(())
}
