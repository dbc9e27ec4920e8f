//! Tests that the fabric of a network is decided once, for all nodes, and that a restored network gets one.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_api::{Fabric, IN_USE_FINALIZER, PodNetwork};
use kni_integration::{
    Cluster,
    cluster::{objects, patience},
    require, wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::scene::{network_object, wait_for_condition};

/// Time in which a loop of writes would show.
const REST: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn networks_are_overlay_unless_their_spec_or_an_earlier_decision_differs() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-fabric").await?;
    cluster.apply(&[network("new", &json!({}))]).await?;
    wait_for_fabric(&cluster, "new", Fabric::Overlay).await?;
    cluster
        .apply(&[network("native", &json!({ "fabric": "Native" }))])
        .await?;
    wait_for_fabric(&cluster, "native", Fabric::Native).await?;

    // A backup leaves the status out, and keeps the finalizer; conditions of others are no decision either.
    cluster.controllers[0].kill()?;
    leave_behind(&cluster, "restored", false).await?;
    leave_behind(&cluster, "touched", true).await?;
    leave_behind(&cluster, "stated", true).await?;
    patch(&cluster, "stated", &json!({ "fabric": "None" })).await?;
    cluster.start_controller().await?;
    wait_for_fabric(&cluster, "restored", Fabric::Overlay).await?;
    wait_for_condition(&cluster, "restored", "Ready", true).await?;
    wait_for_fabric(&cluster, "touched", Fabric::Overlay).await?;
    wait_for_fabric(&cluster, "stated", Fabric::None).await?;
    for (name, fabric) in [("new", Fabric::Overlay), ("native", Fabric::Native)] {
        ensure!(
            fabric_of(&cluster, name).await? == Some(fabric),
            "{name} keeps its fabric"
        );
    }

    exported_and_created_again(&cluster).await?;
    quiet(&cluster).await?;
    patch(&cluster, "stated", &json!({ "fabric": "Native" })).await?;
    wait_for_fabric(&cluster, "stated", Fabric::Native).await?;
    patch(&cluster, "stated", &json!({ "fabric": null })).await?;
    // The condition shows that kni-controller has seen the spec.
    let generation = network_object(&cluster, "stated").await?.metadata.generation;
    wait::until("kni-controller has seen the spec", patience(), async || {
        let status = network_object(&cluster, "stated").await?.status.context("no status")?;
        let mut conditions = status.conditions.iter();
        let accepted = conditions.find(|condition| condition.type_ == "Accepted");
        Ok(accepted.is_some_and(|accepted| accepted.observed_generation == generation))
    })
    .await?;
    ensure!(
        fabric_of(&cluster, "stated").await? == Some(Fabric::Native),
        "what was applied stays"
    );
    patch(&cluster, "new", &json!({ "fabric": "None" })).await?;
    wait_for_fabric(&cluster, "new", Fabric::None).await
}

/// `kubectl get -o yaml` of a network, then `kubectl create` of the result once the network is gone: the API server
/// drops the status, and keeps the finalizer.
async fn exported_and_created_again(cluster: &Cluster) -> Result<()> {
    let mut exported = network_object(cluster, "touched").await?;
    let decided = exported.status.as_ref().and_then(|status| status.fabric);
    ensure!(decided == Some(Fabric::Overlay), "it has a status: {exported:?}");
    ensure!(
        exported.finalizers() == [IN_USE_FINALIZER],
        "{:?}",
        exported.finalizers()
    );
    let former = exported.metadata.uid.take();
    (exported.metadata.resource_version, exported.metadata.managed_fields) = (None, None);
    api(cluster).delete("touched", &DeleteParams::default()).await?;
    wait::until("network touched is gone", patience(), async || {
        Ok(api(cluster).get_opt("touched").await?.is_none())
    })
    .await?;
    let created = api(cluster).create(&PostParams::default(), &exported).await?;
    ensure!(created.metadata.uid != former, "it is another network");
    let is_as_expected = created.finalizers() == [IN_USE_FINALIZER] && created.status.is_none();
    ensure!(is_as_expected, "the finalizer alone is kept: {created:?}");
    wait_for_fabric(cluster, "touched", Fabric::Overlay).await?;
    wait_for_condition(cluster, "touched", "Ready", true).await.map(drop)
}

/// Once the networks have their numbers, they are not written any more.
async fn quiet(cluster: &Cluster) -> Result<()> {
    wait::until("the networks have numbers", patience(), async || {
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

/// A network with the finalizer and perhaps a condition, whose fabric was not decided.
async fn leave_behind(cluster: &Cluster, name: &str, has_condition: bool) -> Result<()> {
    let mut object = network(name, &json!({}));
    object["metadata"]["finalizers"] = json!([IN_USE_FINALIZER]);
    cluster.apply(&[object]).await?;
    if has_condition {
        let condition = json!({
            "type": "Accepted", "status": "True", "reason": "Valid", "message": "the network is valid",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let status = Patch::Merge(json!({ "status": { "conditions": [condition] } }));
        api(cluster)
            .patch_status(name, &PatchParams::default(), &status)
            .await?;
    }
    let status = network_object(cluster, name).await?.status;
    let fabric = status.and_then(|status| status.fabric);
    ensure!(fabric.is_none(), "kni-controller still runs");
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
    wait::until(&format!("network {name} is {expected:?}"), patience(), async || {
        Ok(fabric_of(cluster, name).await? == Some(expected))
    })
    .await
    .map(drop)
}
