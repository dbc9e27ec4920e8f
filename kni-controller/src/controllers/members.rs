//! Confirms the members of networks: adds the labels of the pods to what the nodes report, and refuses what other
//! objects contradict. Removes the reports of nodes that have left the cluster, of networks that do not exist, and
//! those above the number that a node can need.
//!
//! A report gives an address the identity of a pod on all nodes. So a member is confirmed only if its pod exists, with
//! this UID and on this node, and if its addresses lie in blocks of the node in this network.

mod confirmation;
mod surplus;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kni_api::{NetworkMembers, NetworkMembersStatus};
use kni_cluster::{Key, Networks, Tables};
use kni_crd::PodNetwork;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tokio::time::Instant;

use self::{
    confirmation::{has_blocks, status},
    surplus::Surplus,
};
use super::{
    gone_nodes::{GRACE, Missing},
    member_names::{beginning_with, prefix},
    overview::exists,
    reconcile::{Context, Reconciler, unless_changed},
};

/// Field manager of the status.
const FIELD_MANAGER: &str = "kni-controller/members";

/// The controller. Compares only the objects that a change of a pod, a block, a node or a network concerns.
#[derive(Debug, Default)]
pub(super) struct Members {
    missing: Missing,
    /// The objects that report a pod, by its namespace and name.
    of_pod: BTreeMap<Key, BTreeSet<Key>>,
    /// The reverse of it.
    pods_of: BTreeMap<Key, BTreeSet<Key>>,
    /// What remains to be written.
    outstanding: BTreeMap<Key, Write>,
    /// What members depend on of each network.
    networks: BTreeMap<String, Shape>,
    /// The beginning of the names of the objects whose addresses a block has: of its node, in its network.
    of_block: BTreeMap<Key, String>,
    /// The UIDs of the nodes.
    nodes: BTreeMap<String, String>,
    surplus: Surplus,
    /// Since when the networks of objects do not exist.
    strays: BTreeMap<Key, Instant>,
    seen: Option<Seen>,
}

/// The versions of the tables that were compared last.
#[derive(Debug, Clone, Copy)]
struct Seen {
    members: u64,
    pods: u64,
    blocks: u64,
    networks: u64,
    nodes: u64,
}

impl Seen {
    fn of(tables: &Tables) -> Self {
        Self {
            members: tables.members.version(),
            pods: tables.pods.version(),
            blocks: tables.blocks.version(),
            networks: tables.networks.version(),
            nodes: tables.nodes.version(),
        }
    }
}

/// The parts of a network that a confirmation depends on. Its status changes with every pod, and concerns no member.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    uid: Option<String>,
    subnets: Vec<String>,
    prefixes: (Option<u8>, Option<u8>),
    has_blocks: bool,
}

impl Shape {
    fn of(network: &PodNetwork) -> Self {
        let asked = network.spec.per_node_prefix.unwrap_or_default();
        Self {
            uid: network.metadata.uid.clone(),
            subnets: network.spec.subnets.clone(),
            prefixes: (asked.ipv4, asked.ipv6),
            has_blocks: has_blocks(network),
        }
    }
}

/// A change of one object, which must still have this UID.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Write {
    /// The node whose report it is.
    node: String,
    uid: String,
    change: Change,
}

#[derive(Debug, Clone, PartialEq)]
enum Change {
    Status(Arc<NetworkMembersStatus>),
    Delete,
    /// Deletes one of too many objects; the first one of them is reported.
    Refuse {
        network: String,
        is_first: bool,
    },
}

impl Reconciler for Members {
    const NAME: &'static str = "network-members";
    const GATHER: Duration = Duration::from_millis(20);
    /// At most five writes a second.
    const REST: Duration = Duration::from_millis(200);
    const NEEDS_NETWORKS: bool = false;
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        let Seen {
            members,
            pods,
            blocks,
            networks,
            nodes,
        } = Seen::of(tables);
        members + pods + blocks + networks + nodes
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Write)> {
        // A report must not be refused because what it is compared with is not read yet.
        if !tables.members.is_synced() || !tables.blocks.is_synced() {
            return Vec::new();
        }
        let mut concerned = self.concerned(tables);
        let counted = self.surplus.update(tables, &concerned);
        concerned.extend(counted);
        for key in concerned {
            self.index(&key, tables);
            let object = tables.members.rows().get(&key);
            let write = object.and_then(|object| self.write_of(tables, &key, object));
            match write {
                Some(write) => self.outstanding.insert(key, write),
                None => self.outstanding.remove(&key),
            };
        }
        self.seen = Some(Seen::of(tables));
        let gone = self.missing.gone(tables);
        let mut writes = self.outstanding.clone();
        let strays = self.strays.iter().filter(|(_, since)| since.elapsed() >= GRACE);
        let strays = strays.filter_map(|(key, _)| Some((key, tables.members.rows().get(key)?)));
        for (key, object) in strays.filter(|(_, object)| is_stray(tables, object)) {
            writes.extend(write(object, Change::Delete).map(|write| (key.clone(), write)));
        }
        if !gone.is_empty() {
            for (key, object) in tables.members.rows() {
                if gone.contains(&object.spec.node_name) {
                    writes.extend(write(object, Change::Delete).map(|write| (key.clone(), write)));
                }
            }
        }
        writes.into_iter().collect()
    }

    /// A node that makes many objects delays only its own.
    fn share(write: &Write) -> &str {
        &write.node
    }

    async fn write(context: Context, key: Key, write: Write) -> kube::Result<()> {
        let api: Api<NetworkMembers> = Api::all(context.client.clone());
        let Write { node, uid, change } = write;
        let refused = match &change {
            Change::Refuse {
                network,
                is_first: true,
            } => Some(network.clone()),
            Change::Refuse { .. } | Change::Status(_) | Change::Delete => None,
        };
        match change {
            Change::Status(status) => {
                let body = json!({
                    "apiVersion": "kni.dev/v1alpha1",
                    "kind": "NetworkMembers",
                    "metadata": { "name": key.name, "uid": uid },
                    "status": *status,
                });
                let apply = PatchParams::apply(FIELD_MANAGER).force();
                unless_changed(api.patch_status(&key.name, &apply, &Patch::Apply(&body)).await).map(drop)
            }
            Change::Delete | Change::Refuse { .. } => {
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: Some(uid),
                        resource_version: None,
                    }),
                    ..DeleteParams::default()
                };
                let deleted = unless_changed(api.delete(&key.name, &params).await)?;
                if let Some(network) = refused.filter(|_| deleted.is_some()) {
                    report_surplus(&context, &node, &network).await;
                }
                Ok(())
            }
        }
    }
}

/// Publishes that a node has made more objects than it can need.
async fn report_surplus(context: &Context, node: &str, network: &str) {
    let message = format!(
        "node {node} has more NetworkMembers in network {network} than its pods can need: the surplus is removed"
    );
    tracing::warn!(node, network, "{message}");
    let about = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        ..ObjectReference::default()
    };
    let events = &context.events;
    events
        .warning_about(&about, "TooManyReports", "RemoveReports", &message)
        .await;
}

impl Members {
    /// The objects that the changes since the last comparison concern.
    fn concerned(&mut self, tables: &Tables) -> BTreeSet<Key> {
        let changed = self.seen.and_then(|seen| self.changed_networks(tables, seen.networks));
        let changed = changed.unwrap_or_else(|| {
            let all = tables.networks.rows().iter();
            self.networks = all
                .map(|(key, network)| (key.name.clone(), Shape::of(network)))
                .collect();
            self.networks.keys().cloned().collect()
        });
        let partly = self.seen.and_then(|seen| {
            let mut concerned: BTreeSet<Key> = tables.members.changed_since(seen.members)?.cloned().collect();
            for node in tables.nodes.changed_since(seen.nodes)? {
                concerned.extend(self.of_node(node, tables));
            }
            for pod in tables.pods.changed_since(seen.pods)? {
                concerned.extend(self.of_pod.get(pod).into_iter().flatten().cloned());
            }
            for block in tables.blocks.changed_since(seen.blocks)? {
                let now = tables.blocks.rows().get(block);
                let now = now.map(|row| prefix(&row.spec.network, &row.spec.node_name));
                // Between two comparisons a block may get another node.
                let before = match now.clone() {
                    Some(now) => self.of_block.insert(block.clone(), now),
                    None => self.of_block.remove(block),
                };
                for prefix in [before, now].iter().flatten() {
                    concerned.extend(beginning_with(&tables.members, prefix));
                }
            }
            for network in &changed {
                concerned.extend(beginning_with(&tables.members, &format!("{network}.")));
            }
            Some(concerned)
        });
        partly.unwrap_or_else(|| {
            let blocks = tables.blocks.rows().iter();
            self.of_block = blocks
                .map(|(key, row)| (key.clone(), prefix(&row.spec.network, &row.spec.node_name)))
                .collect();
            let nodes = tables.nodes.rows().iter();
            self.nodes = nodes.map(|(key, row)| (key.name.clone(), row.uid.clone())).collect();
            let known = self.pods_of.keys().chain(self.outstanding.keys());
            known.chain(tables.members.rows().keys()).cloned().collect()
        })
    }

    /// The objects of a node that has come, gone or been made again; none after any other change of a node.
    fn of_node(&mut self, node: &Key, tables: &Tables) -> BTreeSet<Key> {
        let uid = tables.nodes.rows().get(node).map(|row| row.uid.clone());
        let before = match uid.clone() {
            Some(uid) => self.nodes.insert(node.name.clone(), uid),
            None => self.nodes.remove(&node.name),
        };
        if before == uid {
            return BTreeSet::new();
        }
        let networks = self.networks.keys();
        networks
            .flat_map(|network| beginning_with(&tables.members, &prefix(network, &node.name)))
            .collect()
    }

    /// The networks whose [`Shape`] changed after a version of their table; `None` if it is not known which.
    fn changed_networks(&mut self, tables: &Tables, since: u64) -> Option<BTreeSet<String>> {
        let touched: BTreeSet<&str> = tables
            .networks
            .changed_since(since)?
            .map(|key| key.name.as_str())
            .collect();
        let mut changed = BTreeSet::new();
        for name in touched {
            let now = tables.networks.get("", name).map(|network| Shape::of(network));
            if now.as_ref() != self.networks.get(name) {
                changed.insert(name.to_owned());
                match now {
                    Some(now) => self.networks.insert(name.to_owned(), now),
                    None => self.networks.remove(name),
                };
            }
        }
        Some(changed)
    }

    /// The write that makes the status right; `None` if it is. An object with a name of another node's objects is
    /// deleted: that node could not report its pods.
    fn write_of(&self, tables: &Tables, key: &Key, object: &NetworkMembers) -> Option<Write> {
        let spec = &object.spec;
        if !key.name.starts_with(&prefix(&spec.network, &spec.node_name)) {
            return write(object, Change::Delete);
        }
        if let Some(is_first) = self.surplus.find(key) {
            let network = spec.network.clone();
            return write(object, Change::Refuse { network, is_first });
        }
        let status = status(tables, spec);
        let differs = object.status.as_ref() != Some(&status);
        differs
            .then(|| write(object, Change::Status(Arc::new(status))))
            .flatten()
    }

    fn index(&mut self, key: &Key, tables: &Tables) {
        for pod in self.pods_of.remove(key).into_iter().flatten() {
            if let Some(objects) = self.of_pod.get_mut(&pod) {
                objects.remove(key);
                if objects.is_empty() {
                    self.of_pod.remove(&pod);
                }
            }
        }
        let Some(object) = tables.members.rows().get(key) else {
            self.strays.remove(key);
            return;
        };
        if is_stray(tables, object) {
            self.strays.entry(key.clone()).or_insert_with(Instant::now);
        } else {
            self.strays.remove(key);
        }
        let members = object.spec.members.iter();
        let pods: BTreeSet<Key> = members
            .map(|member| Key::new(&member.namespace, &member.pod_name))
            .collect();
        for pod in &pods {
            self.of_pod.entry(pod.clone()).or_default().insert(key.clone());
        }
        self.pods_of.insert(key.clone(), pods);
    }
}

/// Whether the network of a report does not exist.
fn is_stray(tables: &Tables, object: &NetworkMembers) -> bool {
    !exists(tables, &object.spec.network, &object.spec.network_uid)
}

fn write(object: &NetworkMembers, change: Change) -> Option<Write> {
    Some(Write {
        node: object.spec.node_name.clone(),
        uid: object.uid()?,
        change,
    })
}
