//! Runs the controllers of one agent on a simulated node, in the order in which the agent starts them, and plays the
//! kubelet and the runtime of the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kni_cluster::{Addresses, ClusterCache, joining::networks_of};
use kni_controllers::{ClusterOptions, Reflectors, Tunnel};
use kni_model::{NetworkName, PodRef, Sandbox, policy::Labels};
use kni_reflectors::{RequestLimits, Sender, connect};
use kni_tasks::Tasks;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;

use crate::node::{NewPod, SimulatedNode};

/// Changes that arrive within this time are attached together.
const GATHER: Duration = Duration::from_millis(10);
/// Interval at which ends of rests are looked for.
const ROUND: Duration = Duration::from_secs(1);

/// A node to simulate.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Place {
    /// Its name in the cluster.
    pub(crate) name: String,
    /// Its addresses in the underlay.
    pub(crate) addresses: Vec<IpAddr>,
    /// The kubeconfig of its agent.
    pub(crate) kubeconfig: PathBuf,
    /// Seconds that addresses rest and empty blocks are kept, if not the usual time.
    pub(crate) rest: Option<u64>,
}

/// An agent that has started.
pub(crate) struct Started {
    /// The time until pods could be attached.
    pub(crate) after: Duration,
    /// The bytes that it has read until then and until it knows all blocks, by resource.
    pub(crate) read: BTreeMap<String, u64>,
}

/// Starts the agent of a node.
pub(crate) async fn start(place: Place, node: SimulatedNode, kubelet: Client) -> Result<Started> {
    let begun = Instant::now();
    let connection = connect(Some(&place.kubeconfig), RequestLimits::default(), Sender::Agent)
        .await
        .context("connect")?;
    let tasks = Tasks::default();
    let options = ClusterOptions {
        node: place.name.clone(),
        shared_services: BTreeSet::from(["default/kubernetes".to_owned()]),
        tunnel: Tunnel {
            port: 4789,
            prefers_ipv4: true,
        },
        longest_pause: None,
        block_grace: place.rest.map(Duration::from_secs),
    };
    let watches = Reflectors::start(connection, options, tasks.clone());
    let state = node.node_state(&watches.cache());
    let (apply_networks, apply_peers) = (Arc::clone(&state.apply_networks), Arc::clone(&state.apply_peers));
    let controllers = watches.object_controllers(state);
    watches.synced().await;
    controllers.join_networks();
    controllers.load_blocks().await;
    apply_peers(controllers.first_peers().await).await;
    let objects = watches.objects();
    {
        let mut engine = node.policies();
        engine.set_namespaces(objects.namespaces);
        engine.set_policies(objects.policies);
    }
    node.compile();
    drop(apply_networks(objects.networks).await);
    controllers.run(&tasks);
    tasks.spawn("sync-policies", sync_policies(node.clone(), watches.cache()));
    let after = begun.elapsed();
    tasks.spawn("runtime", attach_pods(node, watches.cache(), place.name, kubelet));
    let mut changes = watches.cache().changes();
    while !watches.cache().tables().other_blocks.is_synced() && changes.changed().await.is_ok() {}
    Ok(Started {
        after,
        read: watches.received(),
    })
}

/// Gives the policy engine changes of policies and namespaces.
async fn sync_policies(node: SimulatedNode, cache: ClusterCache) {
    let mut changes = cache.changes();
    let mut seen = None;
    loop {
        let due = {
            let tables = cache.tables();
            let versions = Some((tables.policy_version(), tables.namespaces.version()));
            (seen != versions).then(|| {
                seen = versions;
                let policies = tables.policies().map(|row| Arc::clone(&row.policy));
                let namespaces = tables.namespaces.rows().iter();
                let labels: BTreeMap<String, Labels> = namespaces
                    .map(|(key, labels)| (key.name.clone(), labels.clone()))
                    .collect();
                (policies.collect::<Vec<_>>(), labels)
            })
        };
        if let Some((policies, namespaces)) = due {
            let mut engine = node.policies();
            engine.set_namespaces(namespaces);
            engine.set_policies(policies);
            drop(engine);
            node.compile();
        }
        if kni_tasks::waiting(changes.changed()).await.is_err() {
            return;
        }
    }
}

/// Attaches the pods that are assigned to the node and detaches those that are gone.
async fn attach_pods(node: SimulatedNode, cache: ClusterCache, name: String, kubelet: Client) {
    let mut known = cache.changes();
    let mut changed = node.changes();
    loop {
        let seen = pods_versions(&cache);
        let (due, present) = pods(&node, &cache, &name);
        for uid in node.attached() {
            if !present.contains(&uid) {
                node.detach(&uid);
            }
        }
        node.end_rests();
        let mut missing = Addresses::new();
        for (pod, labels, network) in due {
            let attached = node.attach(&NewPod {
                pod,
                labels: &labels,
                network: &network,
            });
            match attached {
                Ok(sandbox) => report_running(&kubelet, &sandbox),
                Err(error) => {
                    tracing::debug!(node = name, %error, "waiting for an address block");
                    *missing.entry(network).or_default() += 1;
                }
            }
        }
        let waiting = (!missing.is_empty()).then(|| cache.blocks().wait(missing));
        let next = async {
            tokio::select! {
                sent = other_pods(&mut known, &cache, seen) => sent,
                sent = changed.changed() => sent.is_ok(),
                () = tokio::time::sleep(ROUND) => true,
            }
        };
        if !kni_tasks::waiting(next).await {
            return;
        }
        drop(waiting);
        tokio::time::sleep(GATHER).await;
    }
}

/// The versions of the objects that decide which pods are attached, and to which networks.
fn pods_versions(cache: &ClusterCache) -> [u64; 4] {
    let tables = cache.tables();
    [
        tables.pods.version(),
        tables.namespaces.version(),
        tables.networks.version(),
        tables.attachments.version(),
    ]
}

/// Waits until one of them has changed; returns `false` when the cache is gone.
async fn other_pods(changes: &mut watch::Receiver<()>, cache: &ClusterCache, seen: [u64; 4]) -> bool {
    while changes.changed().await.is_ok() {
        if pods_versions(cache) != seen {
            return true;
        }
    }
    false
}

/// The pods to attach, each with its network, and the UIDs of all pods of the node.
fn pods(
    node: &SimulatedNode,
    cache: &ClusterCache,
    name: &str,
) -> (Vec<(PodRef, Labels, NetworkName)>, BTreeSet<String>) {
    let attached: BTreeSet<String> = node.attached().into_iter().collect();
    let tables = cache.tables();
    let mut due = Vec::new();
    let mut present = BTreeSet::new();
    let mut networks = None;
    for (key, pod) in tables.pods.rows() {
        if pod.node != name || pod.host_network || pod.finished {
            continue;
        }
        present.insert(pod.uid.clone());
        if attached.contains(&pod.uid) {
            continue;
        }
        let networks = networks.get_or_insert_with(|| cache.networks(&tables));
        let Some(network) = networks_of(&tables, networks, &key.namespace, pod).into_iter().next() else {
            continue;
        };
        let pod_ref = PodRef {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            uid: pod.uid.clone(),
        };
        due.push((pod_ref, pod.labels.clone(), network));
    }
    (due, present)
}

/// Writes the status of a pod that runs, as a kubelet does. One write, where kubelets need several.
fn report_running(kubelet: &Client, sandbox: &Sandbox) {
    let addresses: Vec<String> = sandbox
        .attachments
        .iter()
        .flat_map(kni_model::Attachment::addresses)
        .map(|address| address.to_string())
        .collect();
    let ips: Vec<_> = addresses.iter().map(|address| json!({ "ip": address })).collect();
    let status = json!({ "status": {
        "phase": "Running", "podIP": addresses.first(), "podIPs": ips,
        "conditions": [{ "type": "Ready", "status": "True" }, { "type": "ContainersReady", "status": "True" }],
    }});
    let api: Api<Pod> = Api::namespaced(kubelet.clone(), &sandbox.pod.namespace);
    let name = sandbox.pod.name.clone();
    tokio::spawn(async move {
        let written = api
            .patch_status(&name, &PatchParams::default(), &Patch::Strategic(&status))
            .await;
        if let Err(error) = written {
            tracing::debug!(name, %error, "cannot write the status of a pod");
        }
    });
}
