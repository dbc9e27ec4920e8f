//! Provides common parts of the cluster tests: two tenants with the same addresses, and their observable state.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kni_api::{ConditionStatus, NodeNetwork, PodNetwork, node_network::NodeNetworkEntry};
use kni_integration::{
    Cluster, NodeSnapshot, Pod,
    cluster::{Member, objects, patience},
    traffic::{Servers, tcp_get},
    wait,
};
use kni_proto::runtime::{GetStatusRequest, ListNetworksRequest};
use kube::{
    Api, ResourceExt as _,
    api::{WatchEvent, WatchParams},
};
use serde_json::{Value, json};

/// The port of servers in pods.
pub(crate) const PORT: u16 = 7000;
/// Timeout of an answer.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);
/// Time to wait before no answer counts as silence.
pub(crate) const SILENCE: Duration = Duration::from_millis(400);
/// Maximum time until wrong reports are corrected, on a machine that does nothing else.
pub(crate) const PROMPT: Duration = Duration::from_secs(2);
/// How many control writes, one after the other, an agent may take longer than [`PROMPT`] for what it does at once.
const WRITES: u32 = 10;

/// [`PROMPT`], and more on a machine that is busy now: [`WRITES`] times as long as a write of this test needs until a
/// watch of this test has shown it.
pub(crate) async fn prompt(cluster: &Cluster) -> Result<Duration> {
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "default");
    let params = WatchParams::default().fields("metadata.name=control");
    let mut watched = Box::pin(api.watch(&params, "0").await?);
    let start = Instant::now();
    let text = format!("{start:?}");
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "control", "namespace": "default" },
        "data": { "text": text },
    });
    cluster.apply(&[object]).await?;
    let shown = async {
        while let Some(event) = watched.next().await {
            if let WatchEvent::Added(object) | WatchEvent::Modified(object) = event?
                && object.data.unwrap_or_default().get("text") == Some(&text)
            {
                return Ok(());
            }
        }
        anyhow::bail!("the watch of the control write has ended")
    };
    tokio::time::timeout(patience(), shown)
        .await
        .context("the control write is not shown")??;
    Ok(PROMPT + WRITES * start.elapsed())
}

/// The default network, and red and blue with the same addresses for the namespaces `red-team` and `blue-team`. Pods of
/// all networks use an address of the node for egress.
pub(crate) async fn tenants(cluster: &Cluster) -> Result<()> {
    tenants_with(cluster, &json!({})).await
}

/// [`tenants`] with `tweaks` in the specs of red and blue.
pub(crate) async fn tenants_with(cluster: &Cluster, tweaks: &Value) -> Result<()> {
    apply_tenants(cluster, &tenant_objects(tweaks)).await
}

fn tenant_objects(tweaks: &Value) -> Vec<Value> {
    let way_out = json!({ "egress": { "mode": "Masquerade" } });
    let mut default = objects::default_network();
    objects::merge(&mut default["spec"], &way_out);
    let mut all = vec![default, objects::namespace("plain", &json!({}))];
    for name in ["red", "blue"] {
        let mut more = json!({ "namespaceSelector": { "matchLabels": { "tenant": name } } });
        objects::merge(&mut more, &way_out);
        objects::merge(&mut more, tweaks);
        all.push(objects::network(name, &["10.10.0.0/16", "fd10::/64"], &more));
        all.push(objects::namespace(&format!("{name}-team"), &json!({ "tenant": name })));
    }
    all
}

async fn apply_tenants(cluster: &Cluster, all: &[Value]) -> Result<()> {
    cluster.apply(all).await?;
    for name in ["default", "red", "blue"] {
        wait_for_condition(cluster, name, "Programmed", true).await?;
    }
    Ok(())
}

/// The policy by which only friends reach the server of `red-team`.
pub(crate) fn friends() -> Value {
    let spec = json!({
        "podSelector": { "matchLabels": { "app": "server" } },
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "friend": "yes" } } }] }],
    });
    objects::policy("red-team", "friends", &spec)
}

/// A server that [`friends`] guards, a friend and a stranger, once the policy holds.
pub(crate) async fn guarded(cluster: &Cluster) -> Result<(Vec<Pod>, Servers)> {
    cluster.apply(&[friends()]).await?;
    let labels = |key: &str, value: &str| json!({ "labels": { key: value } });
    let pods = cluster
        .run(&[
            objects::pod_with("red-team", "server", "node1", &labels("app", "server")),
            objects::pod_with("red-team", "friend", "node1", &labels("friend", "yes")),
            objects::pod("red-team", "stranger", "node1"),
        ])
        .await?;
    let server = serve(&pods[0])?;
    wait_for_silence(&pods[2], &pods[0]).await?;
    assert_reached(&pods[1], &pods[0]);
    Ok((pods, server))
}

/// Waits until a condition of a network has this status; returns its message.
pub(crate) async fn wait_for_condition(cluster: &Cluster, network: &str, kind: &str, holds: bool) -> Result<String> {
    let what = format!("{kind} of network {network} is {holds}");
    wait::until_some(&what, patience(), async || {
        let (status, message) = condition(cluster, network, kind)
            .await?
            .context("no such condition yet")?;
        anyhow::ensure!(status == ConditionStatus::from(holds), "it is {status:?}: {message}");
        Ok(Some(message))
    })
    .await
}

/// Status and message of a condition of a network.
pub(crate) async fn condition(
    cluster: &Cluster,
    network: &str,
    kind: &str,
) -> Result<Option<(ConditionStatus, String)>> {
    let object = network_object(cluster, network).await?;
    let mut conditions = object.status.into_iter().flat_map(|status| status.conditions);
    let found = conditions.find(|condition| condition.type_ == kind);
    Ok(found.map(|condition| (condition.status, condition.message)))
}

/// A network in the API server.
pub(crate) async fn network_object(cluster: &Cluster, network: &str) -> Result<PodNetwork> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    Ok(api.get(network).await?)
}

/// A node's report of a network.
pub(crate) async fn entry(cluster: &Cluster, node: &str, network: &str) -> Result<Option<NodeNetworkEntry>> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let status = api.get_opt(node).await?.and_then(|object| object.status);
    let mut entries = status.into_iter().flat_map(|status| status.networks);
    Ok(entries.find(|entry| entry.name == network))
}

/// Addresses of a network that the node has assigned, according to the agent.
pub(crate) async fn leased(member: &Member, network: &str) -> Result<u64> {
    let listed = member
        .kubelet
        .kni()
        .runtime()
        .list_networks(ListNetworksRequest {})
        .await?;
    let mut listed = listed.into_inner().networks.into_iter();
    let found = listed.find(|found| found.name == network);
    Ok(found.map_or(Ok(0), |found| found.used_addresses.parse())?)
}

/// A server in a pod that answers with the pod's namespace and name.
pub(crate) fn serve(pod: &Pod) -> Result<Servers> {
    Servers::start(&pod.inside, &identity(pod), PORT)
}

/// The identity of the server of [`serve`].
pub(crate) fn identity(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

/// The address of `eth0` of a family.
#[track_caller]
pub(crate) fn address(pod: &Pod, v4: bool) -> IpAddr {
    kni_integration::stage::address(pod, v4)
}

/// The answers from both addresses of `to`.
pub(crate) fn ask(from: &Pod, to: &Pod) -> Vec<Result<String, kni_integration::traffic::NoAnswer>> {
    let ask = |v4| tcp_get(&from.inside, address(to, v4), PORT, ANSWER).map(|answer| answer.identity);
    vec![ask(true), ask(false)]
}

/// Panics unless `to` answers `from` in both families.
#[track_caller]
pub(crate) fn assert_reached(from: &Pod, to: &Pod) {
    let expected = vec![Ok(identity(to)), Ok(identity(to))];
    assert_eq!(ask(from, to), expected, "{} asks {}", identity(from), identity(to));
}

/// Panics if `from` gets an answer from an address of `to`.
#[track_caller]
pub(crate) fn assert_silent(from: &Pod, to: &Pod) {
    for v4 in [true, false] {
        let answer = tcp_get(&from.inside, address(to, v4), PORT, SILENCE);
        assert!(answer.is_err(), "{} hears {answer:?}", identity(from));
    }
}

/// Waits until `from` gets no answer from `to`.
pub(crate) async fn wait_for_silence(from: &Pod, to: &Pod) -> Result<()> {
    let what = format!("{} is silent for {}", identity(to), identity(from));
    wait::until(&what, patience(), async || {
        let answers = [true, false].map(|v4| tcp_get(&from.inside, address(to, v4), PORT, SILENCE));
        Ok(answers.iter().all(Result::is_err))
    })
    .await
    .map(drop)
}

/// The names of a pod's interfaces in the kernel.
pub(crate) fn interface_names(pod: &Pod) -> Result<Vec<String>> {
    let shown: Vec<Value> = serde_json::from_str(&pod.inside.run("ip", &["-j", "link", "show"])?)?;
    let names = shown
        .iter()
        .filter_map(|link| link["ifname"].as_str().map(str::to_owned));
    Ok(names.filter(|name| name != "lo").collect())
}

/// The addresses of a pod's interface in the kernel, IPv4 first; empty if it does not exist.
pub(crate) fn kernel_addresses(pod: &Pod, interface: &str) -> Result<Vec<IpAddr>> {
    let shown: Vec<Value> = serde_json::from_str(&pod.inside.run("ip", &["-j", "address", "show"])?)?;
    let link = shown.iter().find(|link| link["ifname"] == interface);
    let all = link.and_then(|link| link["addr_info"].as_array()).into_iter().flatten();
    let global = all.filter(|address| address["scope"] == "global");
    let mut found = Vec::new();
    for address in global {
        found.push(address["local"].as_str().context("no address")?.parse()?);
    }
    found.sort_by_key(IpAddr::is_ipv6);
    Ok(found)
}

/// Waits until objects and annotations match the kernel; panics after [`patience()`].
pub(crate) async fn wait_for_truth(cluster: &Cluster) -> Result<Duration> {
    wait::until_right("objects equal the kernel", patience(), async || cluster.untrue().await).await
}

/// The snapshot of a node after the removals in the background.
pub(crate) async fn at_rest(member: &Member) -> Result<NodeSnapshot> {
    wait::until("nothing goes on in the background", patience(), async || {
        let status = member
            .kubelet
            .kni()
            .runtime()
            .get_status(GetStatusRequest {})
            .await?
            .into_inner();
        Ok(status.pending_removals == 0 && status.pending_links == 0)
    })
    .await?;
    NodeSnapshot::take(&member.node)
}

/// The names of all objects of a kind.
pub(crate) async fn names<K>(cluster: &Cluster) -> Result<Vec<String>>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    K::DynamicType: Default,
{
    let api: Api<K> = Api::all(cluster.client.clone());
    let listed = api.list(&kube::api::ListParams::default()).await?;
    Ok(listed.items.iter().map(kube::ResourceExt::name_any).collect())
}

/// Changes labels or annotations of a pod; null removes one.
pub(crate) async fn patch_metadata(cluster: &Cluster, pod: &Pod, metadata: &Value) -> Result<()> {
    use kube::api::{Patch, PatchParams};
    let api: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let patch = Patch::Merge(json!({ "metadata": metadata }));
    let patched = api.patch(&pod.name, &PatchParams::default(), &patch).await?;
    anyhow::ensure!(patched.uid().as_deref() == Some(&*pod.uid), "another pod of the name");
    Ok(())
}
