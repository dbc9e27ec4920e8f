//! Tests that a policy which is refused opens no pod, and that its object gets an event.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::events::v1::Event;
use kni_api::NodeNetwork;
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    require,
    traffic::Servers,
    wait,
};
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use super::scene::{ask, assert_reached, assert_silent, identity, serve, tenants, wait_for_silence};

const NAMESPACE: &str = "red-team";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_refused_policy_opens_no_pod_and_has_an_event() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-refused", 1).await?;
    tenants(&cluster).await?;
    let pods = four_pods(&cluster).await?;
    let [server, late, friend, stranger] = &pods[..] else {
        anyhow::bail!("four pods")
    };
    let services = [serve(server)?, serve(late)?];
    assert_reached(stranger, server);

    // An edit of an active policy: what it allowed stays allowed, and nothing else.
    cluster
        .apply(&[policy("guard", "server", "red", "192.0.2.0/24")])
        .await?;
    wait_for_silence(stranger, server).await?;
    assert_reached(friend, server);
    cluster.apply(&[policy("guard", "server", "red", "192.0.2.1")]).await?;
    wait_for_refusal(
        &cluster,
        "guard",
        "the last valid version is active",
        (stranger, server, &services[0]),
    )
    .await?;
    assert_reached(friend, server);
    let note = wait_for_event(&cluster, "guard", "PolicyRefused").await?;
    ensure!(note.contains("spec.ingress[0].from[0].ipBlock.cidr"), "{note}");

    // At first sight.
    assert_reached(stranger, late);
    cluster.apply(&[policy("first", "late", "red", "192.0.2.1")]).await?;
    wait_for_silence(stranger, late).await?;
    wait_for_refusal(&cluster, "first", "nothing is allowed", (friend, late, &services[1])).await?;
    wait_for_event(&cluster, "first", "PolicyRefused").await?;

    // An agent that starts knows no valid version.
    cluster.nodes[0].agent.kill9()?;
    assert_silent(stranger, server);
    cluster.nodes[0].agent.restart()?;
    wait_for_refusal(
        &cluster,
        "guard",
        "nothing is allowed",
        (stranger, server, &services[0]),
    )
    .await?;
    wait_for_silence(friend, server).await?;
    assert_silent(stranger, late);
    ensure!(
        events(&cluster, "guard", "PolicyRefused").await?.len() == 1,
        "one event for one edit"
    );

    correct(&cluster, [friend, stranger, server]).await
}

/// Two pods that policies select, a friend and a stranger.
async fn four_pods(cluster: &Cluster) -> Result<Vec<Pod>> {
    let labels = |key: &str, value: &str| json!({ "labels": { key: value } });
    cluster
        .run(&[
            objects::pod_with(NAMESPACE, "server", "node1", &labels("app", "server")),
            objects::pod_with(NAMESPACE, "late", "node1", &labels("app", "late")),
            objects::pod_with(NAMESPACE, "friend", "node1", &labels("friend", "yes")),
            objects::pod(NAMESPACE, "stranger", "node1"),
        ])
        .await
}

/// Corrects the policy, and waits until it is applied.
async fn correct(cluster: &Cluster, [friend, stranger, server]: [&Pod; 3]) -> Result<()> {
    cluster
        .apply(&[policy("guard", "server", "red", "192.0.2.1/32")])
        .await?;
    wait::until("the friend reaches the server", patience(), async || {
        let reached = Ok(identity(server));
        Ok(ask(friend, server).iter().all(|answer| *answer == reached))
    })
    .await?;
    assert_silent(stranger, server);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_policy_for_a_network_that_does_not_exist_has_an_event() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-ghost", 0).await?;
    let definition = objects::attachment_definition("plain", "storage", "blue");
    cluster
        .apply(&[objects::namespace("plain", &json!({})), definition])
        .await?;
    let mut defined = policy("defined", "a", "storage", "192.0.2.0/24");
    let mut nothing = policy("nothing", "a", "ghost", "192.0.2.0/24");
    for object in [&mut defined, &mut nothing] {
        object["metadata"]["namespace"] = json!("plain");
    }
    cluster.apply(&[defined, nothing]).await?;
    let about = |name: &'static str| events_in(&cluster, "plain", name, "NetworkNotFound");
    let note = wait::until_some("an event names the network", patience(), async || {
        Ok(about("nothing").await?.pop())
    });
    let note = note.await?;
    ensure!(note.contains("policy-for") && note.contains("named ghost,"), "{note}");
    ensure!(about("defined").await?.is_empty(), "a definition has the name");
    Ok(())
}

/// A policy for the pods with label `app` on a network: friends and a range reach them.
fn policy(name: &str, app: &str, network: &str, cidr: &str) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1",
        "kind": "MultiNetworkPolicy",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "annotations": { "k8s.v1.cni.cncf.io/policy-for": network },
        },
        "spec": {
            "podSelector": { "matchLabels": { "app": app } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [
                { "ipBlock": { "cidr": cidr } },
                { "podSelector": { "matchLabels": { "friend": "yes" } } },
            ]}],
        },
    })
}

/// Waits until the node reports a refused policy, and what it enforces instead. Until then and afterwards, no packet of
/// `from` reaches `to`.
async fn wait_for_refusal(
    cluster: &Cluster,
    name: &str,
    instead: &str,
    (from, to, server): (&Pod, &Pod, &Servers),
) -> Result<()> {
    let before = server.seen();
    let nodes: Api<NodeNetwork> = Api::all(cluster.client.clone());
    wait::until(&format!("the node refuses policy {name}"), patience(), async || {
        assert_silent(from, to);
        let status = nodes.get("node1").await?.status.context("no status")?;
        let mut refused = status.policies.refused.into_iter();
        let found = refused.find(|refused| refused.kind == "MultiNetworkPolicy" && refused.name == name);
        let reason = found.context("not refused yet")?.reason;
        ensure!(reason.contains("cidr") && reason.ends_with(instead), "{reason}");
        Ok(true)
    })
    .await?;
    assert_silent(from, to);
    ensure!(server.seen() == before, "{} has got a packet", identity(to));
    Ok(())
}

/// Waits for an event about a policy; returns its note.
async fn wait_for_event(cluster: &Cluster, policy: &str, reason: &str) -> Result<String> {
    let what = format!("event {reason} of policy {policy}");
    wait::until_some(&what, patience(), async || {
        Ok(events(cluster, policy, reason).await?.pop())
    })
    .await
}

async fn events(cluster: &Cluster, policy: &str, reason: &str) -> Result<Vec<String>> {
    events_in(cluster, NAMESPACE, policy, reason).await
}

/// The notes of the warnings about a policy.
async fn events_in(cluster: &Cluster, namespace: &str, policy: &str, reason: &str) -> Result<Vec<String>> {
    let api: Api<Event> = Api::namespaced(cluster.client.clone(), namespace);
    let all = api.list(&ListParams::default()).await?.items.into_iter();
    let found = all.filter(|event| {
        let about = event.regarding.as_ref();
        event.reason.as_deref() == Some(reason)
            && event.type_.as_deref() == Some("Warning")
            && about.and_then(|about| about.name.as_deref()) == Some(policy)
            && about.and_then(|about| about.kind.as_deref()) == Some("MultiNetworkPolicy")
            && about.is_some_and(|about| about.uid.is_some())
    });
    Ok(found.filter_map(|event| event.note).collect())
}
