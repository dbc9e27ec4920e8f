//! Tests the network status of containerd while no agent is running.

use anyhow::Result;
use kni_integration::{Manifest, require};

use super::scene::{Scene, pod};

#[tokio::test(flavor = "multi_thread")]
async fn the_network_is_ready_while_the_agent_serves() -> Result<()> {
    require!(root, netns, bpf, machine);
    let mut scene = Scene::start("containerd-status", Manifest::overlapping()).await?;
    let pods = scene.run(pod("stays", &[])).await?;

    scene.agent.terminate()?;
    let (reason, message) = scene.wait_for_network(false).await?;
    assert_eq!(reason, "NetworkPluginNotReady");
    assert!(
        message.contains("kni.sock"),
        "the message tells what is missing: {message}"
    );
    let refused = scene.cri.run_sandbox(&pod("refused", &[])).await;
    assert!(refused.is_err(), "a pod without a network: {refused:?}");

    scene.agent.restart()?;
    scene.wait_for_network(true).await?;
    let runs = scene.run(pod("runs", &[])).await?;
    assert_eq!(scene.ask(&runs, pods.addresses[0], "tcp").await?, "stays");
    scene.remove_all(&[pods, runs]).await
}
