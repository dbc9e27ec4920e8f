//! Makes the simulated cluster: its nodes, networks and policies, and the pods that stay.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kni_api::{AddressBlock, NetworkMembers};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, interval, sleep};

use super::Options;
use crate::cluster::{Cluster, objects, token};

/// The label whose value differs between the states of one pod.
pub(super) const STAMP: &str = "simulation/stamp";
/// The network that every node follows, and its namespace.
const FLAT: &str = "default";
const FLAT_NAMESPACE: &str = "flat";
/// Concurrent requests of the load.
const AT_ONCE: usize = 24;
/// Pause between two looks at all members.
const LOOK: Duration = Duration::from_millis(300);
/// One pod of this many is in the default network.
pub(super) const FLAT_SHARE: usize = 10;

/// A pod that stays.
#[derive(Debug, Clone)]
pub(super) struct Standing {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: usize,
    pub(super) network: usize,
}

/// Where the pods are.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    pub(super) nodes: usize,
    pub(super) networks: usize,
    pub(super) standing: Vec<Standing>,
    /// The nodes with a pod that stays, by network; all of them for the default one, which has number 0.
    pub(super) followers: BTreeMap<usize, BTreeSet<usize>>,
}

impl Scene {
    /// The nodes that hold blocks, with the networks, while only the pods that stay run.
    pub(super) fn holders(&self) -> BTreeSet<(String, String)> {
        let name = |network: usize| match network {
            0 => FLAT.to_owned(),
            tenant => namespace(tenant),
        };
        let all = self.followers.iter();
        all.flat_map(|(network, nodes)| nodes.iter().map(move |node| (node_name(*node), name(*network))))
            .collect()
    }
}

/// The nodes that hold blocks now, with the networks.
pub(super) async fn holders(cluster: &Cluster) -> Result<BTreeSet<(String, String)>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let listed = api.list(&ListParams::default()).await?.items.into_iter();
    Ok(listed
        .map(|object| (object.spec.node_name, object.spec.network))
        .collect())
}

pub(super) fn node_name(number: usize) -> String {
    format!("sim-{number}")
}

pub(super) fn namespace(network: usize) -> String {
    if network == 0 {
        FLAT_NAMESPACE.to_owned()
    } else {
        format!("tenant-{network}")
    }
}

/// The network of the pod with this number, at random but for the share of the default one.
pub(super) fn network_of(number: usize, networks: usize) -> usize {
    if networks < 2 || number.is_multiple_of(FLAT_SHARE) {
        0
    } else {
        fastrand::usize(1..networks)
    }
}

/// A pod on a node.
pub(super) fn pod(network: usize, name: &str, node: usize, labels: &Value) -> Value {
    let mut all = json!({ "app": format!("app-{}", name.len() % 3) });
    objects::merge(&mut all, labels);
    objects::pod_with(&namespace(network), name, &node_name(node), &json!({ "labels": all }))
}

/// Registers the nodes; returns what the simulated nodes need to know of each.
pub(super) async fn register(cluster: &Cluster, nodes: usize, rest: Option<u64>) -> Result<Vec<Value>> {
    let all = stream::iter(0..nodes).map(|number| register_one(cluster, number, rest));
    all.buffered(AT_ONCE).try_collect().await
}

async fn register_one(cluster: &Cluster, number: usize, rest: Option<u64>) -> Result<Value> {
    let name = node_name(number);
    let addresses = [
        format!("198.18.{}.{}", number / 250, number % 250 + 1),
        format!("2001:db8:18::{:x}", number + 1),
    ];
    let nodes: Api<NodeObject> = Api::all(cluster.client.clone());
    let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    nodes
        .create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    let room = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
    let status = json!({ "status": {
        "addresses": addresses.clone().map(|address| json!({ "type": "InternalIP", "address": address })),
        "capacity": room, "allocatable": room,
        "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
    }});
    nodes
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    let kubeconfig = cluster
        .control
        .token_kubeconfig(&token(&cluster.client, "kni-agent", Some(&name)).await?);
    let inside = format!("/run/{name}.conf");
    cluster
        .control
        .node()
        .enter(|| fs::write(&inside, &kubeconfig))?
        .context("kubeconfig")?;
    Ok(json!({ "name": name, "addresses": addresses, "kubeconfig": inside, "rest": rest }))
}

/// Makes the networks of the tenants, each with a namespace and a policy. All have equal subnets.
pub(super) async fn tenants(cluster: &Cluster, networks: usize) -> Result<()> {
    cluster.apply(&[objects::namespace(FLAT_NAMESPACE, &json!({}))]).await?;
    let all = stream::iter(1..networks).map(|number| tenant(cluster, number));
    all.buffer_unordered(AT_ONCE).try_collect().await
}

async fn tenant(cluster: &Cluster, number: usize) -> Result<()> {
    let name = namespace(number);
    let network = objects::network_without_access(
        &name,
        &["10.0.0.0/16"],
        &json!({ "namespaceSelector": { "matchLabels": { "tenant": name } } }),
    );
    let rule = json!({
        "podSelector": { "matchLabels": { "app": "app-0" } }, "policyTypes": ["Ingress"],
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "app": "app-1" } } }] }],
    });
    let labels = json!({ "tenant": name });
    cluster
        .apply(&[
            objects::namespace(&name, &labels),
            network,
            objects::policy(&name, "web", &rule),
        ])
        .await
}

/// Makes the default network, of which every node then claims a block; returns the time of the request.
pub(super) async fn flat(cluster: &Cluster) -> Result<f64> {
    let network = objects::network(FLAT, &["10.128.0.0/9", "fd00:244::/64"], &json!({ "default": true }));
    cluster.apply(&[network]).await?;
    Ok(super::now())
}

/// Creates the pods that stay, at a rate, and counts them.
pub(super) async fn fill(cluster: &Cluster, options: &Options, created: &AtomicUsize) -> Result<Scene> {
    let placed: Vec<(usize, usize, usize)> = (0..options.pods)
        .map(|number| {
            (
                number,
                number % options.nodes,
                network_of(number / options.nodes + number, options.networks),
            )
        })
        .collect();
    let ticks = interval(Duration::from_secs_f64(1.0 / options.fill));
    let standing: Vec<Standing> = stream::iter(placed)
        .zip(stream::unfold(ticks, |mut ticks| async move {
            ticks.tick().await;
            Some(((), ticks))
        }))
        .map(|(placed, ())| placed)
        .map(|(number, node, network)| async move {
            let name = format!("standing-{number}{}", "x".repeat(number % 3));
            let standing = create(cluster, &pod(network, &name, node, &json!({})), (node, network)).await;
            created.fetch_add(1, Ordering::Relaxed);
            standing
        })
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    let mut followers: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    followers.insert(0, (0..options.nodes).collect());
    for one in &standing {
        followers.entry(one.network).or_default().insert(one.node);
    }
    Ok(Scene {
        nodes: options.nodes,
        networks: options.networks,
        standing,
        followers,
    })
}

/// Creates a pod on a node, in a network.
pub(super) async fn create(cluster: &Cluster, object: &Value, (node, network): (usize, usize)) -> Result<Standing> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace(network));
    let made = api
        .create(&PostParams::default(), &serde_json::from_value(object.clone())?)
        .await;
    let made = made.with_context(|| format!("create {object}"))?;
    Ok(Standing {
        namespace: namespace(network),
        name: made.name_any(),
        node,
        network,
    })
}

/// Waits until this number of members is confirmed, but not longer than `patience`; returns how many are.
pub(super) async fn confirmed(cluster: &Cluster, count: usize, patience: Duration) -> Result<usize> {
    let deadline = Instant::now() + patience;
    loop {
        let confirmed = confirmed_now(cluster).await?;
        if confirmed >= count || Instant::now() > deadline {
            return Ok(confirmed);
        }
        sleep(LOOK).await;
    }
}

/// How many members are confirmed.
pub(super) async fn confirmed_now(cluster: &Cluster) -> Result<usize> {
    let api: Api<NetworkMembers> = Api::all(cluster.client.clone());
    let listed = api.list(&ListParams::default().match_any()).await?;
    let statuses = listed.items.iter().filter_map(|object| object.status.as_ref());
    Ok(statuses.map(|status| status.members.len()).sum())
}
