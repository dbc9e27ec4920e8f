//! Tests conditions of networks, policies and nodes, and the deletion of a network that is in use.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use kni_api::{ConditionStatus, EgressPolicy, NodeNetwork, PodNetwork};
use kni_integration::{
    Cluster,
    cluster::{deployed, objects, patience},
    require, wait,
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::scene::{assert_reached, network_object, serve, tenants, wait_for_condition};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn conditions_tell_how_networks_and_policies_stand() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-standing", 2).await?;
    tenants(&cluster).await?;
    for kind in ["Accepted", "Ready", "Programmed", "AddressesAvailable"] {
        wait_for_condition(&cluster, "red", kind, true).await?;
    }
    // The nodes may be reported at different times.
    wait::until("the network is in force on both nodes", patience(), async || {
        let told = wait_for_condition(&cluster, "red", "Programmed", true).await?;
        ensure!(told.contains("2 of 2"), "{told:?}");
        let status = network_object(&cluster, "red").await?.status.context("status")?;
        ensure!((status.nodes.ready, status.nodes.total) == (2, 2), "{:?}", status.nodes);
        ensure!(status.namespaces == ["red-team"], "{:?}", status.namespaces);
        Ok(true)
    })
    .await?;

    // A second default is refused, with a reason.
    let second = objects::network("second", &["10.99.0.0/24"], &json!({ "default": true }));
    cluster.apply(std::slice::from_ref(&second)).await?;
    let told = wait_for_condition(&cluster, "second", "Accepted", false).await?;
    ensure!(told.contains("default"), "{told:?}");
    wait_for_condition(&cluster, "second", "Programmed", false).await?;
    cluster.delete(&second).await?;

    // A disabled network accepts no pods.
    let mut disabled = objects::network("off", &["10.98.0.0/24"], &json!({ "enabled": false }));
    cluster.apply(std::slice::from_ref(&disabled)).await?;
    wait_for_condition(&cluster, "off", "Ready", false).await?;
    disabled["spec"]["enabled"] = json!(true);
    cluster.apply(std::slice::from_ref(&disabled)).await?;
    wait_for_condition(&cluster, "off", "Ready", true).await?;

    // Policies: each node reports the policies it has applied, and an egress policy the number of nodes that have
    // applied it.
    cluster
        .apply(&[
            objects::policy("red-team", "one", &json!({ "policyTypes": ["Ingress"] })),
            json!({
                "apiVersion": "kni.dev/v1alpha1",
                "kind": "EgressPolicy",
                "metadata": { "name": "two", "namespace": "red-team" },
                "spec": { "podSelector": {}, "defaultAction": "Deny" },
            }),
        ])
        .await?;
    let nodes: Api<NodeNetwork> = Api::all(cluster.client.clone());
    for node in ["node1", "node2"] {
        wait::until(&format!("{node} has both policies in force"), patience(), async || {
            let policies = nodes.get(node).await?.status.context("no status yet")?.policies;
            Ok(policies.known == 2 && policies.programmed && policies.refused.is_empty())
        })
        .await?;
    }
    let policies: Api<EgressPolicy> = Api::namespaced(cluster.client.clone(), "red-team");
    wait::until("the egress policy is in force", patience(), async || {
        let status = policies.get("two").await?.status.context("no status yet")?;
        let found = status
            .conditions
            .into_iter()
            .find(|condition| condition.type_ == "Programmed");
        let found = found.context("no condition yet")?;
        Ok(found.status == ConditionStatus::True && found.message.contains("2 of 2"))
    })
    .await
    .map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn network_unavailable_is_cleared_where_the_agent_is_ready() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-node-condition", 2).await?;
    tenants(&cluster).await?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    // A cloud provider has made this one, and it has no agent yet.
    let bare = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "bare" } });
    nodes
        .create(&PostParams::default(), &serde_json::from_value(bare)?)
        .await?;
    set_condition(&nodes, "bare", "Ready").await?;
    for node in ["bare", "node1"] {
        set_condition(&nodes, node, "NetworkUnavailable").await?;
    }
    wait::until("the condition of node1 is cleared", patience(), async || {
        let found = condition(&nodes, "node1", "NetworkUnavailable").await?;
        let found = found.context("no condition")?;
        Ok(found.status == "False" && found.reason.as_deref() == Some("KniIsReady"))
    })
    .await?;
    let ready = condition(&nodes, "node1", "Ready").await?.context("no condition")?;
    ensure!(ready.status == "True", "the conditions of others stay: {ready:?}");
    let bare = condition(&nodes, "bare", "NetworkUnavailable").await?;
    let bare = bare.context("no condition")?;
    ensure!(bare.status == "True", "no agent, and {bare:?}");
    let none = condition(&nodes, "node2", "NetworkUnavailable").await?;
    ensure!(none.is_none(), "nothing to clear, and {none:?}");
    Ok(())
}

/// Sets a condition of a node to True, among its others.
async fn set_condition(nodes: &Api<Node>, node: &str, kind: &str) -> Result<()> {
    let condition = json!({
        "type": kind, "status": "True", "reason": "NoRouteCreated", "message": "Node created without a route",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
    nodes.patch_status(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

async fn condition(nodes: &Api<Node>, node: &str, kind: &str) -> Result<Option<NodeCondition>> {
    let status = nodes.get(node).await?.status.context("no status")?;
    let mut conditions = status.conditions.into_iter().flatten();
    Ok(conditions.find(|condition| condition.type_ == kind))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_network_in_use_is_not_deleted_and_says_by_whom() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-in-use", 1).await?;
    tenants(&cluster).await?;
    let pods = cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod("red-team", "b", "node1"),
        ])
        .await?;
    let _servers = [serve(&pods[0])?, serve(&pods[1])?];
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    wait::until("the network has a finalizer", patience(), async || {
        let finalizers = api.get("red").await?.metadata.finalizers.unwrap_or_default();
        Ok(finalizers
            .iter()
            .any(|finalizer| finalizer == kni_api::IN_USE_FINALIZER))
    })
    .await?;
    refused_at_once(&cluster, &api).await?;
    api.delete("red", &DeleteParams::default()).await?;
    wait::until("the condition names both pods", patience(), async || {
        let told = wait_for_condition(&cluster, "red", "InUse", true).await?;
        Ok(told.contains("red-team/a") && told.contains("red-team/b"))
    })
    .await?;
    ensure!(
        api.get("red").await?.metadata.deletion_timestamp.is_some(),
        "it is to be deleted"
    );
    assert_reached(&pods[0], &pods[1]);

    cluster.remove("red-team", &["a"]).await?;
    wait::until("the condition names the other pod alone", patience(), async || {
        let told = wait_for_condition(&cluster, "red", "InUse", true).await?;
        Ok(!told.contains("red-team/a") && told.contains("red-team/b"))
    })
    .await?;
    cluster.remove("red-team", &["b"]).await?;
    wait::until("the network is gone", patience(), async || {
        Ok(api.get_opt("red").await?.is_none())
    })
    .await?;

    // The name can be reused by another network.
    let other = objects::network(
        "red",
        &["10.77.0.0/16"],
        &json!({ "namespaceSelector": { "matchLabels": { "tenant": "red" } } }),
    );
    cluster.apply(&[other]).await?;
    let again = cluster.run(&[objects::pod("red-team", "c", "node1")]).await?;
    let ip = again[0].ip(true).context("no address")?.to_string();
    ensure!(ip.starts_with("10.77."), "{ip}");
    Ok(())
}

/// Uses the admission policy of the deployment, and removes it again: a request without it is handled by the finalizer.
async fn refused_at_once(cluster: &Cluster, api: &Api<PodNetwork>) -> Result<()> {
    let guard = deployed("base/in-use.yaml")?;
    ensure!(guard.len() == 2, "a policy and its binding: {guard:?}");
    cluster.apply(&guard).await?;
    let trial = DeleteParams {
        dry_run: true,
        ..DeleteParams::default()
    };
    wait::until("the API server refuses to delete the network", patience(), async || {
        let refused = api.delete("red", &trial).await.err().context("it is taken")?;
        let words = refused.to_string();
        ensure!(
            words.contains("network red cannot be deleted while 2 interfaces of pods are in it"),
            "{words}"
        );
        Ok(true)
    })
    .await?;
    api.delete("blue", &trial)
        .await
        .context("a network that nobody is in")?;
    for object in guard.iter().rev() {
        cluster.delete(object).await?;
    }
    wait::until("the API server takes it again", patience(), async || {
        Ok(api.delete("red", &trial).await.is_ok())
    })
    .await
    .map(drop)
}
