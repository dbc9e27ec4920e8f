//! Tests that masquerading continues while no agent is running, and that the next agent takes it over without packet
//! loss.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{
    require,
    traffic::{Stream, tcp_get},
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_costs_no_packet() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut world = World::start("takeover", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("takeover").await?;
    let blue = world
        .stage
        .pod_in("blue", "takeover-blue", "10.10.0.11,fd10::11")
        .await?;
    let links = |uplink: &kni_proto::runtime::Uplink| -> Vec<u32> {
        uplink.programs.iter().map(|program| program.link_id).collect()
    };
    let before = links(&world.uplink().await?);
    assert_eq!(before.len(), 2);
    let mut streams = Vec::new();
    for v4 in FAMILIES {
        for pod in [&pod, &blue] {
            let to: SocketAddr = server(v4);
            streams.push(Stream::udp(&pod.inside, to)?);
            streams.push(Stream::tcp(&pod.inside, to)?);
        }
    }
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        world.stage.agent.kill9()?;
        // No agent is running, but new flows can be opened.
        for v4 in FAMILIES {
            let answer = tcp_get(&pod.inside, server(v4).ip(), PORT, patience()).context("without an agent")?;
            assert_eq!(answer.identity, "server");
        }
        world.stage.agent.restart()?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    for stream in streams {
        stream.wait_for_answers(501_u64.saturating_sub(stream.answered()))?;
        let report = stream.stop();
        assert!(report.sent > 500, "{report:?}");
        report.assert_whole("server");
    }
    assert_eq!(
        links(&world.uplink().await?),
        before,
        "the links were taken over in place"
    );
    for pod in [&pod, &blue] {
        for reason in [
            "masquerade_address",
            "masquerade_ports",
            "destination_not_ready",
            "no_route",
        ] {
            assert_eq!(world.stage.drops(pod, "from_pod", reason).await?, 0, "{reason}");
        }
    }
    watch.assert_clean();
    Ok(())
}
