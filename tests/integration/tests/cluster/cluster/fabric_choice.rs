//! Tests that the fabric of a network is decided once, for all nodes, and that a network from before keeps what it had.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_api::{Fabric, IN_USE_FINALIZER, PodNetwork};
use kni_integration::{
    Cluster,
    cluster::{PATIENCE, objects},
    require, wait,
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::scene::{network_object, wait_for_condition};

/// Time in which a loop of writes would show.
const REST: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn new_networks_are_overlay_and_those_from_before_keep_their_nodes_apart() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-fabric").await?;
    cluster.apply(&[network("new", &json!({}))]).await?;
    wait_for_fabric(&cluster, "new", Fabric::Overlay).await?;
    wait_for_condition(&cluster, "new", "FabricChosen", true).await?;
    cluster
        .apply(&[network("native", &json!({ "fabric": "Native" }))])
        .await?;
    wait_for_fabric(&cluster, "native", Fabric::Native).await?;

    // What an earlier release leaves behind.
    cluster.controllers[0].kill()?;
    leave_behind(&cluster, "old").await?;
    leave_behind(&cluster, "stated").await?;
    patch(&cluster, "stated", &json!({ "fabric": "Overlay" })).await?;
    cluster.start_controller().await?;
    wait_for_fabric(&cluster, "old", Fabric::None).await?;
    wait_for_fabric(&cluster, "stated", Fabric::Overlay).await?;
    wait_for_condition(&cluster, "stated", "FabricChosen", true).await?;
    let advice = wait_for_condition(&cluster, "old", "FabricChosen", false).await?;
    ensure!(advice.contains("set it to Overlay or Native"), "{advice}");
    ensure!(
        fabric_of(&cluster, "new").await? == Some(Fabric::Overlay),
        "it is no network from before"
    );

    quiet(&cluster).await?;
    patch(&cluster, "old", &json!({ "fabric": "Overlay" })).await?;
    wait_for_fabric(&cluster, "old", Fabric::Overlay).await?;
    wait_for_condition(&cluster, "old", "FabricChosen", true).await?;
    patch(&cluster, "old", &json!({ "fabric": null })).await?;
    let kept = wait::until_some("the condition follows the spec", PATIENCE, async || {
        let message = wait_for_condition(&cluster, "old", "FabricChosen", true).await?;
        Ok(message.contains("absent").then_some(message))
    });
    println!("without spec.fabric: {}", kept.await?);
    ensure!(
        fabric_of(&cluster, "old").await? == Some(Fabric::Overlay),
        "what was applied stays"
    );
    patch(&cluster, "new", &json!({ "fabric": "None" })).await?;
    wait_for_fabric(&cluster, "new", Fabric::None).await?;
    wait_for_condition(&cluster, "new", "FabricChosen", true)
        .await
        .map(drop)
}

/// Once the networks have their numbers, they are not written any more.
async fn quiet(cluster: &Cluster) -> Result<()> {
    wait::until("the networks have numbers", PATIENCE, async || {
        let networks = api(cluster).list(&ListParams::default()).await?;
        Ok(networks
            .iter()
            .all(|network| network.status.as_ref().is_some_and(|status| status.number.is_some())))
    })
    .await?;
    // The write of the number may enter the log after the number has been read.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = cluster.audit()?;
    tokio::time::sleep(REST).await;
    let summary = cluster.audit()?.since(&before)?.summary();
    let written = summary.iter().filter(|(row, _)| row.contains("/podnetworks/"));
    let written: Vec<_> = written.collect();
    ensure!(written.is_empty(), "networks at rest are written: {written:#?}");
    Ok(())
}

fn network(name: &str, more: &Value) -> Value {
    objects::network(name, &["10.20.0.0/16"], more)
}

/// A network with the finalizer and the conditions of an earlier release, which knows no fabric.
async fn leave_behind(cluster: &Cluster, name: &str) -> Result<()> {
    let mut object = network(name, &json!({}));
    object["metadata"]["finalizers"] = json!([IN_USE_FINALIZER]);
    cluster.apply(&[object]).await?;
    let condition = json!({
        "type": "Accepted", "status": "True", "reason": "Valid", "message": "the network is valid",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let status = Patch::Merge(json!({ "status": { "conditions": [condition], "accessReviewed": true } }));
    api(cluster)
        .patch_status(name, &PatchParams::default(), &status)
        .await?;
    ensure!(fabric_of(cluster, name).await?.is_none(), "kni-controller still runs");
    Ok(())
}

fn api(cluster: &Cluster) -> Api<PodNetwork> {
    Api::all(cluster.client.clone())
}

async fn patch(cluster: &Cluster, name: &str, spec: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({ "spec": spec }));
    api(cluster).patch(name, &PatchParams::default(), &patch).await?;
    Ok(())
}

async fn fabric_of(cluster: &Cluster, name: &str) -> Result<Option<Fabric>> {
    let status = network_object(cluster, name).await?.status.context("no status")?;
    Ok(status.fabric)
}

async fn wait_for_fabric(cluster: &Cluster, name: &str, expected: Fabric) -> Result<()> {
    wait::until(&format!("network {name} is {expected:?}"), PATIENCE, async || {
        Ok(fabric_of(cluster, name).await? == Some(expected))
    })
    .await
    .map(drop)
}
