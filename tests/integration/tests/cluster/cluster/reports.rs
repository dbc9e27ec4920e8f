//! Tests reports of interfaces: correct soon after a change, and again soon after a write by another client.
//!
//! Soon is two seconds, and on a busy machine longer by a multiple of what a control write and one look at the reports
//! take at the same time.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kni_api::PodInterface;
use kni_integration::{
    Cluster,
    cluster::{objects, truth::STATUS},
    require, wait,
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::scene::{patch_metadata, prompt, tenants, wait_for_truth};

/// How long the reports are looked at after that: longer than a round of the agents' reports.
const STAYS: Duration = Duration::from_millis(1200);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "one lie after the other")]
async fn what_is_told_of_interfaces_is_right_within_two_seconds() -> Result<()> {
    require!(root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-reports", 2).await?;
    tenants(&cluster).await?;
    cluster
        .apply(&[objects::attachment("plain", "extra", "blue", "data0")])
        .await?;
    let joined = json!({ "labels": { "join": "extra" } });
    let pods = cluster
        .run(&[
            objects::pod_with("plain", "a", "node1", &joined),
            objects::pod("plain", "b", "node2"),
            objects::pod("red-team", "a", "node2"),
        ])
        .await?;
    right("pods were started", &cluster).await?;

    let interfaces: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    let name = |ifname: &str| kni_api::pod_interface::name("a", &pods[0].uid, ifname);
    interfaces.delete(&name("eth0"), &DeleteParams::default()).await?;
    right("an object was deleted", &cluster).await?;

    let params = PatchParams::default();
    let status = |status: &Value| Patch::Merge(json!({ "status": status }));
    for (what, lie) in [
        ("the MAC address was edited", json!({ "mac": "02:00:00:00:00:01" })),
        ("addresses were taken away", json!({ "addresses": [] })),
        ("the index was edited", json!({ "interfaceIndex": 4711 })),
        ("conditions were taken away", json!({ "conditions": [] })),
    ] {
        interfaces
            .patch_status(&name("data0"), &params, &status(&lie))
            .await
            .context(what)?;
        right(what, &cluster).await?;
    }
    let unlabelled =
        Patch::Merge(json!({ "metadata": { "labels": { "kni.dev/network": null }, "ownerReferences": null } }));
    interfaces.patch(&name("eth0"), &params, &unlabelled).await?;
    right("label and owner were taken away", &cluster).await?;
    let foreign = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": { "name": "ghost.eth0", "namespace": "plain" },
        "spec": {
            "podName": "ghost", "podUid": "0", "nodeName": "node1", "podNetworkName": "default",
            "interfaceName": "eth0", "sandboxId": "0",
        },
    });
    cluster.apply(&[foreign]).await?;
    right("an object of no pod was made", &cluster).await?;
    let present = interfaces.get(&name("eth0")).await?;
    let second = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": { "name": "a.eth0", "namespace": "plain", "labels": present.metadata.labels },
        "spec": present.spec,
    });
    cluster.apply(&[second]).await?;
    right("a second object of an interface was made", &cluster).await?;

    for (what, annotation) in [
        ("the annotation was taken away", Value::Null),
        ("the annotation was edited", json!("[]")),
        ("the annotation was spoilt", json!("{")),
    ] {
        patch_metadata(&cluster, &pods[2], &json!({ "annotations": { STATUS: annotation } })).await?;
        right(what, &cluster).await?;
    }
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "red-team");
    let told = api.get("a").await?.metadata.annotations.context("annotations")?;
    let told: Vec<Value> = serde_json::from_str(told.get(STATUS).context("no annotation")?)?;
    ensure!(
        told[0]["interface"] == "eth0" && told[0]["default"] == false,
        "the primary interface of another network than the default one: {told:?}"
    );

    cluster.remove("plain", &["a", "b"]).await?;
    right("pods were deleted", &cluster).await?;
    cluster.remove("red-team", &["a"]).await?;
    right("the last pod was deleted", &cluster).await?;

    // None of this needs a permission that the deployment does not grant.
    let forbidden = cluster.audit()?;
    let forbidden = forbidden.forbidden();
    ensure!(forbidden.is_empty(), "{forbidden:#?}");
    Ok(())
}

async fn right(after: &str, cluster: &Cluster) -> Result<()> {
    let took = wait_for_truth(cluster).await.with_context(|| after.to_owned())?;
    println!("right again {took:?} after {after}");
    let start = Instant::now();
    let wrong = cluster.untrue().await?;
    // The check itself takes part of the time: the one that succeeded, and one before that began too early.
    let limit = prompt(cluster).await? + 2 * start.elapsed();
    ensure!(took < limit, "it took {took:?} after {after}, not {limit:?}");
    ensure!(wrong.is_empty(), "wrong again after {after}: {wrong:?}");
    // The reports must remain correct.
    wait::remains_right(after, STAYS, async || cluster.untrue().await).await
}
