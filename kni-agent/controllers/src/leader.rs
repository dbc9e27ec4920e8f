//! Runs the work of the leader: the status of networks, attachments and egress policies, and the removal of leftovers.

mod attachment;
mod egress_policy;
mod network;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_api::{
    EgressPolicy, EgressPolicyStatus, IN_USE_FINALIZER, NodeNetwork, PodNetworkAttachment, PodNetworkAttachmentStatus,
    set_condition,
};
use kni_crd::PodNetwork;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

use self::{attachment::attachment_status, egress_policy::egress_conditions, network::network_status};
use super::{
    Cluster,
    lease::{Candidate, RENEW},
    resources::reflect_nodes,
};
use kni_cluster::{Key, Tables};

/// Changes that arrive within this time are written together.
const GATHER: Duration = Duration::from_millis(300);
/// A node that is gone this long, with all its pods, loses its blocks.
const NODE_GRACE: Duration = Duration::from_mins(1);
/// Maximum number of pods and nodes that a message names.
const MOST_NAMED: usize = 8;

/// The state of the leader between rounds.
#[derive(Default)]
struct Memory {
    /// Status of egress policies, as last written.
    egress: BTreeMap<Key, EgressPolicyStatus>,
    /// When nodes with leftovers were first seen to be gone.
    gone: BTreeMap<String, Instant>,
    /// The reflectors of all nodes.
    reflectors: Option<JoinSet<()>>,
}

impl Cluster {
    /// Runs for as long as the agent does; acts only while this agent is the leader.
    pub(super) async fn lead(self) {
        let mut candidate = Candidate::new(&self.client, &self.namespace, &self.node);
        let mut ticks = interval(RENEW);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = self.cache.changes();
        let mut memory = Memory::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => candidate.round().await,
                sent = changes.changed(), if candidate.leads() => {
                    if sent.is_err() { return }
                    tokio::time::sleep(GATHER).await;
                }
            }
            changes.mark_unchanged();
            if candidate.leads() {
                self.write_all(&mut memory).await;
            } else {
                memory = Memory::default();
            }
        }
    }

    async fn write_all(&self, memory: &mut Memory) {
        if memory.reflectors.is_none() {
            memory.reflectors = Some(reflect_nodes(&self.client, &self.cache));
        }
        let known = {
            let tables = self.cache.tables();
            tables.nodes.is_synced() && tables.node_networks.is_synced()
        };
        // Incomplete tables must not make a node look gone.
        if !known {
            return;
        }
        for done in [
            self.write_networks(memory).await,
            self.write_attachments().await,
            self.write_egress_policies(memory).await,
            self.remove_nodes(memory).await,
        ] {
            if let Err(error) = done {
                // The next round retries.
                tracing::debug!(%error, "cannot write how the cluster's networks stand");
            }
        }
    }

    async fn write_networks(&self, memory: &mut Memory) -> Result<(), kube::Error> {
        let api: Api<PodNetwork> = Api::all(self.client.clone());
        let objects: Vec<Arc<PodNetwork>> = self.cache.tables().networks.rows().values().map(Arc::clone).collect();
        for object in objects {
            let name = object.name_any();
            let (status, in_use) = {
                let tables = self.cache.tables();
                let networks = self.networks(&tables);
                let is_expired = |node: &str| memory.is_expired(node);
                (
                    network_status(&tables, &networks, &object, is_expired),
                    users(&tables, &name) > 0,
                )
            };
            if object.status.as_ref() != Some(&status) {
                let desired = PodNetwork {
                    status: Some(status),
                    ..PodNetwork::clone(&object)
                };
                match api.replace_status(&name, &PostParams::default(), &desired).await {
                    Ok(written) => self.cache_network(written),
                    // A node has allocated a block meanwhile, or the network is gone.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                    Err(error) => return Err(error),
                }
            }
            self.write_finalizer(&api, &object, in_use).await?;
        }
        Ok(())
    }

    /// Keeps a network that is being deleted until its last interface is gone.
    async fn write_finalizer(
        &self,
        api: &Api<PodNetwork>,
        object: &PodNetwork,
        in_use: bool,
    ) -> Result<(), kube::Error> {
        let name = object.name_any();
        let deleted = object.metadata.deletion_timestamp.is_some();
        let has = object
            .finalizers()
            .iter()
            .any(|finalizer| finalizer == IN_USE_FINALIZER);
        let wants = !deleted || in_use;
        if has == wants || (deleted && !has) {
            return Ok(());
        }
        let mut finalizers: Vec<String> = object.finalizers().to_vec();
        finalizers.retain(|finalizer| finalizer != IN_USE_FINALIZER);
        if wants {
            finalizers.push(IN_USE_FINALIZER.to_owned());
        } else {
            tracing::info!(network = name, "the deleted network has no interfaces any more");
        }
        // The status that was just written has changed the resource version of the object.
        let version = self
            .cache
            .tables()
            .networks
            .get("", &name)
            .and_then(|known| known.resource_version());
        let patch = serde_json::json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
        match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(written) if wants => self.cache_network(written),
            Ok(_) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn write_attachments(&self) -> Result<(), kube::Error> {
        let writes: Vec<(Key, PodNetworkAttachmentStatus)> = {
            let tables = self.cache.tables();
            let rows = tables.attachments.rows().iter();
            rows.map(|(key, row)| (key.clone(), attachment_status(&tables, row)))
                .filter(|(key, status)| {
                    let known = tables.attachments.rows().get(key);
                    known.and_then(|row| row.object.status.as_ref()) != Some(status)
                })
                .collect()
        };
        for (key, status) in writes {
            let api: Api<PodNetworkAttachment> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = serde_json::json!({"status": status});
            ignore_gone(
                api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await,
            )?;
        }
        Ok(())
    }

    async fn write_egress_policies(&self, memory: &mut Memory) -> Result<(), kube::Error> {
        let writes: Vec<(Key, EgressPolicyStatus)> = {
            let tables = self.cache.tables();
            memory
                .egress
                .retain(|key, _| tables.egress_policies.rows().contains_key(key));
            let rows = tables.egress_policies.rows().iter();
            rows.filter_map(|(key, row)| {
                let before = memory.egress.get(key);
                let mut status = before.cloned().unwrap_or_default();
                for condition in egress_conditions(&tables, key) {
                    set_condition(&mut status.conditions, condition);
                }
                status.summary.clone_from(&row.summary);
                (before != Some(&status)).then(|| (key.clone(), status))
            })
            .collect()
        };
        for (key, status) in writes {
            let api: Api<EgressPolicy> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = serde_json::json!({"status": status});
            ignore_gone(
                api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await,
            )?;
            memory.egress.insert(key, status);
        }
        Ok(())
    }

    /// Removes the leftovers of nodes that are no longer in the cluster. Their blocks go with the status of the
    /// networks.
    async fn remove_nodes(&self, memory: &mut Memory) -> Result<(), kube::Error> {
        let gone: Vec<String> = {
            let tables = self.cache.tables();
            let names = tables.node_networks.rows().keys().map(|key| key.name.clone());
            let blocks = tables
                .networks
                .rows()
                .values()
                .filter_map(|object| object.status.as_ref());
            let blocks = blocks.flat_map(|status| status.blocks.iter().map(|block| block.node.clone()));
            let missing: BTreeSet<String> = names.chain(blocks).filter(|node| is_gone(&tables, node)).collect();
            memory.gone.retain(|node, _| missing.contains(node));
            for node in &missing {
                memory.gone.entry(node.clone()).or_insert_with(Instant::now);
            }
            missing.into_iter().filter(|node| memory.is_expired(node)).collect()
        };
        let api: Api<NodeNetwork> = Api::all(self.client.clone());
        for node in gone {
            if self.cache.tables().node_networks.get("", &node).is_some() {
                ignore_gone(api.delete(&node, &DeleteParams::default()).await)?;
            }
        }
        Ok(())
    }
}

impl Memory {
    fn is_expired(&self, node: &str) -> bool {
        self.gone.get(node).is_some_and(|since| since.elapsed() >= NODE_GRACE)
    }
}

/// Whether neither the node nor an interface of a pod on it exists.
fn is_gone(tables: &Tables, node: &str) -> bool {
    tables.nodes.get("", node).is_none() && tables.interfaces.rows().values().all(|row| row.spec.node_name != node)
}

fn ignore_gone<T>(done: Result<T, kube::Error>) -> Result<(), kube::Error> {
    match done {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

/// Number of interfaces of pods in a network.
fn users(tables: &Tables, network: &str) -> usize {
    let rows = tables.interfaces.rows().values();
    rows.filter(|row| row.spec.pod_network_name == network).count()
}

/// The first names, and the number of the others.
fn listed(names: &[&str]) -> String {
    let shown: Vec<&str> = names.iter().copied().take(MOST_NAMED).collect();
    match names.len().saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
