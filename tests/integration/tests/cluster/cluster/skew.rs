//! Tests agents under definitions of a later release.

use anyhow::{Context as _, Result, ensure};
use kni_api::NodeNetwork;
use kni_integration::{
    Cluster,
    cluster::{MemberOptions, Refusal, definitions, objects, patience},
    require, wait,
};
use kube::{Api, ResourceExt as _, api::DynamicObject};
use serde_json::{Value, json};

use super::scene::{assert_reached, guarded, tenants, wait_for_silence, wait_for_truth};

/// Network green with its namespace, and an egress policy, both with a field of a later release.
fn later_objects() -> [Value; 3] {
    let of_green = json!({ "zzz": "new", "namespaceSelector": { "matchLabels": { "tenant": "green" } } });
    let leave = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
        "metadata": { "namespace": "red-team", "name": "leave" },
        "spec": { "podSelector": {}, "defaultAction": "Allow", "zzz": "new" },
    });
    [
        objects::namespace("green-team", &json!({ "tenant": "green" })),
        objects::network("green", &["10.30.0.0/16"], &of_green),
        leave,
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn definitions_of_a_later_release_concern_the_objects_that_use_them() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-skew").await?;
    let options = MemberOptions {
        proxied: true,
        ..MemberOptions::default()
    };
    cluster.add_node(options).await?;
    tenants(&cluster).await?;
    let (pods, _server) = guarded(&cluster).await?;
    wait_for_truth(&cluster).await?;
    let (ready, degraded) = conditions(&cluster).await?;
    ensure!(ready == "True" && degraded.0 == "False", "{ready} {degraded:?}");

    // Objects of a later release.
    definitions::apply(&cluster.client, definitions::later()?).await?;
    write_later(&cluster, &red()).await?;
    // A watch from before serves objects without the new field until the API server ends it, after minutes: the agent
    // would understand green.
    let proxy = cluster.nodes[0].proxy.as_ref().context("no proxy")?;
    proxy.faults.cut();
    cluster.apply(&later_objects()).await?;
    let told = wait_for_report(
        &cluster,
        &["podnetworks red", "podnetworks green", "egresspolicies red-team/leave"],
    );
    println!("later objects: {}", told.await?);
    let refused = refused_policies(&cluster).await?;
    ensure!(refused.len() == 1 && refused[0].contains("leave"), "{refused:?}");

    // The last version of red that is understood stays, and all others are not affected.
    cluster
        .run(&[
            objects::pod("red-team", "later", "node1"),
            objects::pod("blue-team", "later", "node1"),
        ])
        .await?;
    attach_is_refused(&cluster, "green", "unreadable").await?;
    // Nor do its namespaces fall back to the default network.
    of_green_is_refused(&cluster, "early").await?;
    assert_reached(&pods[1], &pods[0]);

    // Also when this agent never understood it.
    let agent = &mut cluster.nodes[0].agent;
    agent.kill9()?;
    agent.restart()?;
    cluster
        .run(&[
            objects::pod("red-team", "again", "node1"),
            objects::pod("blue-team", "again", "node1"),
        ])
        .await?;
    wait_for_report(&cluster, &["podnetworks red", "podnetworks green"]).await?;
    of_green_is_refused(&cluster, "restarted").await?;
    assert_reached(&pods[1], &pods[0]);
    wait_for_silence(&pods[2], &pods[0]).await?;
    println!("a restarted agent: red and blue take pods, green does not");

    // Back to what is understood.
    write_red(&cluster, &json!({ "spec": { "zzz": null } })).await?;
    wait::until("red is understood", patience(), async || {
        Ok(!conditions(&cluster).await?.1.1.contains("podnetworks red"))
    })
    .await?;
    cluster.run(&[objects::pod("red-team", "last", "node1")]).await?;
    wait_for_truth(&cluster).await?;
    Ok(())
}

fn red() -> Value {
    json!({ "spec": { "zzz": "new" } })
}

async fn write_red(cluster: &Cluster, patch: &Value) -> Result<DynamicObject> {
    let network = objects::network("red", &[], &json!({}));
    let (resource, _, name) = objects::locate(&network)?;
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let patch = kube::api::Patch::Merge(patch);
    Ok(api.patch(&name, &kube::api::PatchParams::default(), &patch).await?)
}

/// Writes a field of a later release. The API server drops it until it uses the new definition.
async fn write_later(cluster: &Cluster, patch: &Value) -> Result<()> {
    wait::until("the API server keeps the new field", patience(), async || {
        Ok(write_red(cluster, patch).await?.data["spec"]["zzz"] == "new")
    })
    .await
    .map(drop)
}

/// The status of the node's condition Ready, and status and message of Degraded.
async fn conditions(cluster: &Cluster) -> Result<(String, (String, String))> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let status = api.get("node1").await?.status.context("no status")?;
    let find = |kind: &str| {
        let found = status.conditions.iter().find(|condition| condition.type_ == kind);
        found.map(|found| (format!("{:?}", found.status), found.message.clone()))
    };
    Ok((
        find("Ready").context("no Ready")?.0,
        find("Degraded").context("no Degraded")?,
    ))
}

/// Waits until the node reports each of these objects; returns the report.
async fn wait_for_report(cluster: &Cluster, named: &[&str]) -> Result<String> {
    wait::until_some("the node names the objects", patience(), async || {
        let (ready, (_, message)) = conditions(cluster).await?;
        ensure!(ready == "True", "the node is not ready: {message}");
        if let Some(missing) = named.iter().find(|name| !message.contains(**name)) {
            let stored = write_red(cluster, &json!({})).await?.data;
            anyhow::bail!("{missing} is not in {message:?}; red is {stored}");
        }
        ensure!(message.contains("zzz"), "the field is not named: {message}");
        Ok(Some(message))
    })
    .await
}

async fn refused_policies(cluster: &Cluster) -> Result<Vec<String>> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let status = api.get("node1").await?.status.context("no status")?;
    let refused = status.policies.refused.iter();
    Ok(refused
        .map(|refused| format!("{} {}: {}", refused.kind, refused.name, refused.reason))
        .collect())
}

/// Creates a pod that names a network, waits until the agent refuses it, and removes it again.
async fn attach_is_refused(cluster: &Cluster, network: &str, name: &str) -> Result<()> {
    let annotations = json!({ "annotations": { "kni.dev/network": network } });
    let refusal = refusal_of(cluster, &objects::pod_with("plain", name, "node1", &annotations)).await?;
    println!("{refusal}");
    cluster.remove("plain", &[name]).await
}

/// The same for a pod of the namespace of green that names none.
async fn of_green_is_refused(cluster: &Cluster, name: &str) -> Result<()> {
    let refusal = refusal_of(cluster, &objects::pod("green-team", name, "node1")).await?;
    ensure!(refusal.message.contains("network green"), "{refusal}");
    cluster.remove("green-team", &[name]).await
}

async fn refusal_of(cluster: &Cluster, pod: &Value) -> Result<Refusal> {
    let pods = cluster.create_pods(std::slice::from_ref(pod)).await?;
    let pod = format!("{}/{}", pods[0].namespace().unwrap_or_default(), pods[0].name_any());
    wait::until_some("the agent refuses the pod", patience(), async || {
        let mut refusals = cluster.nodes[0].kubelet.refusals().into_iter();
        Ok(refusals.find(|refusal| refusal.pod == pod))
    })
    .await
}
