//! Tests restarts of containerd during traffic between pods.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Manifest, eventually, patience, require};
use kni_local_node::{Part, cri::v1};
use serde_json::Value;

use super::scene::{PORT, Scene, pod};

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_containerd_costs_no_traffic() -> Result<()> {
    require!(root, netns, bpf, machine);
    let mut scene = Scene::start("containerd-restart", Manifest::overlapping()).await?;
    let before = scene.machine.at_rest()?;
    let server = scene.run(pod("server", &[])).await?;
    let client = scene.run(pod("client", &[])).await?;
    let (address, port) = (server.addresses[0].to_string(), PORT.to_string());
    let watch = ["ping-loop", &address, &port];
    let watch = scene
        .cri
        .run_container(&client.id, &client.sandbox, "watches", &watch)
        .await?;
    wait_for_answers(&scene, &watch, 1).await?;

    for crash in [false, true] {
        if crash {
            scene.machine.local.kill(Part::Containerd)?;
        } else {
            scene.machine.local.stop(Part::Containerd)?;
        }
        scene.machine.local.start(Part::Containerd)?;
        scene.machine.local.wait_for_containerd()?;
        scene.cri = scene.machine.local.cri().await?;
        let seen = last_report(&scene, &watch).await?["answers"]
            .as_u64()
            .context("no count")?;
        wait_for_answers(&scene, &watch, seen + 1).await?;
    }
    assert_eq!(scene.ask(&client, server.addresses[1], "udp").await?, "server");

    let request = v1::StopContainerRequest {
        container_id: watch.clone(),
        timeout: 10,
    };
    scene.cri.runtime().stop_container(request).await?;
    let report = last_report(&scene, &watch).await?;
    for (field, expected) in [("connections", 1), ("broken", 0), ("wrong", 0)] {
        assert_eq!(report[field], expected, "{report}");
    }
    scene.remove_all(&[server, client]).await?;
    scene.assert_as_before(&before);
    Ok(())
}

async fn wait_for_answers(scene: &Scene, watch: &str, count: u64) -> Result<()> {
    eventually(patience(), async || {
        let report = last_report(scene, watch).await?;
        ensure!(
            report["answers"].as_u64() >= Some(count),
            "no {count} answers: {report:?}"
        );
        Ok(())
    })
    .await
}

/// The last complete line of the container's output.
async fn last_report(scene: &Scene, container: &str) -> Result<Value> {
    let request = v1::ContainerStatusRequest {
        container_id: container.into(),
        verbose: false,
    };
    let status = scene.cri.runtime().container_status(request).await?.into_inner();
    let path = status.status.context("no status")?.log_path;
    let log = scene.machine.node.enter(|| std::fs::read_to_string(&path))?;
    let log = log.with_context(|| path.clone())?;
    let line = log.lines().next_back().context("nothing printed yet")?;
    // Time, stream and a completeness mark come first.
    let text = line.splitn(4, ' ').last().context("not a line of a log")?;
    serde_json::from_str(text).with_context(|| line.to_owned())
}
