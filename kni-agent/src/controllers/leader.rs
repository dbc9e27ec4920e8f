//! What one agent writes for all: how networks, attachments and egress policies stand, and what deleted ones leave.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kni_api::{
    Condition, EgressPolicy, IN_USE_FINALIZER, NodeNetwork, PodNetworkAttachment, PodNetworkStatus,
    pod_network::{AddressCounts, NodeCounts},
    set_condition,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

use super::{
    Cluster,
    interfaces::condition,
    kinds::follow_nodes,
    known::{AttachmentRow, Tables},
    lease::{Candidate, RENEW},
    networks::Networks,
    node::saturate,
    table::Key,
};
use crate::{crd::PodNetwork, policy::matches};

/// Changes that come together are written together.
const GATHER: Duration = Duration::from_millis(300);
/// A node that is gone this long, with all its pods, has no blocks any more.
const NODE_GRACE: Duration = Duration::from_mins(1);
/// Most namespaces that a network's status lists.
const MOST_NAMESPACES: usize = 100;
/// Most pods and nodes that a message names.
const MOST_NAMED: usize = 8;

/// What the leader remembers between rounds.
#[derive(Default)]
struct Memory {
    /// Conditions of egress policies, as they were written.
    egress: BTreeMap<Key, Vec<Condition>>,
    /// Since when nodes are gone that still have something.
    gone: BTreeMap<String, Instant>,
    /// What follows all nodes.
    watches: Option<JoinSet<()>>,
}

impl Cluster {
    /// Runs for as long as the agent does; does something while it leads.
    pub(super) async fn lead(self) {
        let mut candidate = Candidate::new(&self.client, &self.namespace, &self.node);
        let mut ticks = interval(RENEW);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = self.known.changes();
        let mut memory = Memory::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => candidate.round().await,
                told = changes.changed(), if candidate.leads() => {
                    if told.is_err() { return }
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
        if memory.watches.is_none() {
            memory.watches = Some(follow_nodes(&self.client, &self.known));
        }
        let known = {
            let tables = self.known.tables();
            tables.nodes.is_synced() && tables.node_networks.is_synced()
        };
        // What is not known yet must not count as gone.
        if !known {
            return;
        }
        for done in [
            self.write_networks(memory).await,
            self.write_attachments().await,
            self.write_egress_policies(memory).await,
            self.forget_nodes(memory).await,
        ] {
            if let Err(error) = done {
                // The next round tries again.
                tracing::debug!(%error, "cannot write how the cluster's networks stand");
            }
        }
    }

    async fn write_networks(&self, memory: &mut Memory) -> Result<(), kube::Error> {
        let api: Api<PodNetwork> = Api::all(self.client.clone());
        let objects: Vec<Arc<PodNetwork>> = self.known.tables().networks.rows().values().map(Arc::clone).collect();
        for object in objects {
            let name = object.name_any();
            let (status, in_use) = {
                let tables = self.known.tables();
                let networks = self.networks(&tables);
                (
                    network_status(&tables, &networks, &object, memory),
                    users(&tables, &name) > 0,
                )
            };
            if object.status.as_ref() != Some(&status) {
                let wanted = PodNetwork {
                    status: Some(status),
                    ..PodNetwork::clone(&object)
                };
                match api.replace_status(&name, &PostParams::default(), &wanted).await {
                    Ok(written) => self.known_network(written),
                    // A node has taken a block meanwhile; or it is gone.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                    Err(error) => return Err(error),
                }
            }
            self.write_finalizer(&api, &object, in_use).await?;
        }
        Ok(())
    }

    /// A network that is deleted stays until its last interface is gone.
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
        // What was written just now has another resource version than the object.
        let version = self
            .known
            .tables()
            .networks
            .get("", &name)
            .and_then(|known| known.resource_version());
        let patch = serde_json::json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
        match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(written) if wants => self.known_network(written),
            Ok(_) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn write_attachments(&self) -> Result<(), kube::Error> {
        let writes: Vec<(Key, kni_api::PodNetworkAttachmentStatus)> = {
            let tables = self.known.tables();
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
        let writes: Vec<(Key, Vec<Condition>)> = {
            let tables = self.known.tables();
            memory
                .egress
                .retain(|key, _| tables.egress_policies.rows().contains_key(key));
            let rows = tables.egress_policies.rows().keys();
            rows.filter_map(|key| {
                let mut conditions = memory.egress.get(key).cloned().unwrap_or_default();
                let mut changed = false;
                for condition in egress_conditions(&tables, key) {
                    changed |= set_condition(&mut conditions, condition);
                }
                changed.then(|| (key.clone(), conditions))
            })
            .collect()
        };
        for (key, conditions) in writes {
            let api: Api<EgressPolicy> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = serde_json::json!({"status": {"conditions": conditions}});
            ignore_gone(
                api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await,
            )?;
            memory.egress.insert(key, conditions);
        }
        Ok(())
    }

    /// What nodes leave that are no longer in the cluster. Their blocks go with the networks' status.
    async fn forget_nodes(&self, memory: &mut Memory) -> Result<(), kube::Error> {
        let gone: Vec<String> = {
            let tables = self.known.tables();
            let names = tables.node_networks.rows().keys().map(|key| key.name.clone());
            let blocks = tables
                .networks
                .rows()
                .values()
                .filter_map(|object| object.status.as_ref());
            let blocks = blocks.flat_map(|status| status.blocks.iter().map(|block| block.node.clone()));
            let missing: std::collections::BTreeSet<String> =
                names.chain(blocks).filter(|node| is_gone(&tables, node)).collect();
            memory.gone.retain(|node, _| missing.contains(node));
            for node in &missing {
                memory.gone.entry(node.clone()).or_insert_with(Instant::now);
            }
            missing.into_iter().filter(|node| memory.is_forgotten(node)).collect()
        };
        let api: Api<NodeNetwork> = Api::all(self.client.clone());
        for node in gone {
            if self.known.tables().node_networks.get("", &node).is_some() {
                ignore_gone(api.delete(&node, &DeleteParams::default()).await)?;
            }
        }
        Ok(())
    }
}

impl Memory {
    fn is_forgotten(&self, node: &str) -> bool {
        self.gone.get(node).is_some_and(|since| since.elapsed() >= NODE_GRACE)
    }
}

/// Neither the node nor an interface of a pod on it is there.
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

/// Interfaces of pods in a network.
fn users(tables: &Tables, network: &str) -> usize {
    let rows = tables.interfaces.rows().values();
    rows.filter(|row| row.spec.pod_network_name == network).count()
}

fn network_status(tables: &Tables, networks: &Networks, object: &PodNetwork, memory: &Memory) -> PodNetworkStatus {
    let name = object.name_any();
    let mut status = object.status.clone().unwrap_or_default();
    status.blocks.retain(|block| !memory.is_forgotten(&block.node));
    let entries: Vec<(&str, Option<&kni_api::node_network::NodeNetworkEntry>)> = tables
        .node_networks
        .rows()
        .iter()
        .filter(|(key, _)| tables.nodes.get("", &key.name).is_some())
        .map(|(key, row)| {
            let entries = row.status.iter().flat_map(|status| &status.networks);
            (key.name.as_str(), entries.into_iter().find(|entry| entry.name == name))
        })
        .collect();
    let generation = object.metadata.generation.unwrap_or(0);
    let programmed: Vec<&str> = entries
        .iter()
        .filter(|(_, entry)| entry.is_some_and(|entry| entry.generation == generation))
        .map(|(node, _)| *node)
        .collect();
    let ready = entries
        .iter()
        .filter(|(_, entry)| entry.is_some_and(|entry| entry.ready))
        .count();
    let full: Vec<&str> = entries
        .iter()
        .filter(|(_, entry)| entry.is_some_and(|entry| entry.exhausted))
        .map(|(node, _)| *node)
        .collect();
    status.nodes = NodeCounts {
        ready: count(ready),
        total: count(entries.len()),
    };
    status.interfaces = count(users(tables, &name));
    status.addresses = addresses(tables, object, &status);
    status.namespaces = namespaces(tables, networks, &name);
    let missing: Vec<&str> = entries
        .iter()
        .map(|(node, _)| *node)
        .filter(|node| !programmed.contains(node))
        .collect();
    let refused = networks.refused.get(&name).map(String::as_str);
    for condition in conditions(object, refused, &missing, &full, entries.len()) {
        set_condition(&mut status.conditions, condition);
    }
    set_condition(&mut status.conditions, in_use(tables, object, &name));
    status
}

fn conditions(
    object: &PodNetwork,
    refused: Option<&str>,
    missing: &[&str],
    full: &[&str],
    nodes: usize,
) -> Vec<Condition> {
    let generation = object.metadata.generation;
    let make = |kind: &str, holds, reason: &str, message: &str| condition(kind, holds, reason, message, generation);
    let accepted = match refused {
        None => make("Accepted", true, "Valid", "the network can be put into force"),
        Some(why) => make("Accepted", false, "Refused", why),
    };
    let ready = if refused.is_some() {
        make("Ready", false, "NotAccepted", "see condition Accepted")
    } else if object.metadata.deletion_timestamp.is_some() {
        make(
            "Ready",
            false,
            "Deleted",
            "the network is being deleted and takes no new pods",
        )
    } else if !object.spec.enabled {
        make(
            "Ready",
            false,
            "AdministrativelyDisabled",
            "spec.enabled is false: the network takes no new pods",
        )
    } else {
        make("Ready", true, "Accepting", "pods can join")
    };
    let in_force = nodes - missing.len();
    let counts = format!("in force on {in_force} of {nodes} nodes");
    let programmed = match (refused.is_some(), missing.is_empty() && nodes > 0) {
        (true, _) => make("Programmed", false, "NotAccepted", "see condition Accepted"),
        (false, true) => make("Programmed", true, "AllNodes", &counts),
        (false, false) => make(
            "Programmed",
            false,
            "NodesMissing",
            &format!("{counts}; not on {}", listed(missing)),
        ),
    };
    let available = if full.is_empty() {
        make(
            "AddressesAvailable",
            true,
            "Available",
            "every node has addresses, or can get some",
        )
    } else {
        let message = format!(
            "no address is left on {}, and no block to take: add a subnet to spec.subnets, or remove pods",
            listed(full)
        );
        make("AddressesAvailable", false, "Exhausted", &message)
    };
    vec![accepted, ready, programmed, available]
}

/// Says what keeps a network that is being deleted.
fn in_use(tables: &Tables, object: &PodNetwork, name: &str) -> Condition {
    let rows = tables.interfaces.rows().iter();
    let users: Vec<String> = rows
        .filter(|(_, row)| row.spec.pod_network_name == name)
        .map(|(key, row)| format!("{}/{}", key.namespace, row.spec.pod_name))
        .collect();
    let generation = object.metadata.generation;
    if users.is_empty() {
        return condition(
            "InUse",
            false,
            "NoInterfaces",
            "no pod has an interface in it",
            generation,
        );
    }
    let deleted = object.metadata.deletion_timestamp.is_some();
    let names: Vec<&str> = users.iter().map(String::as_str).collect();
    if deleted {
        let message = format!(
            "the network cannot be deleted while pods have interfaces in it, and works on for them: {}",
            listed(&names)
        );
        return condition("InUse", true, "DeletionRefused", &message, generation);
    }
    // Not their names: they change with every pod.
    condition("InUse", true, "HasInterfaces", "pods have interfaces in it", generation)
}

fn addresses(tables: &Tables, object: &PodNetwork, status: &PodNetworkStatus) -> AddressCounts {
    let size = |cidr: &str| -> u128 {
        let net: Result<ipnet::IpNet, _> = cidr.parse();
        net.map_or(0, |net| {
            let bits = u32::from(net.max_prefix_len() - net.prefix_len());
            1_u128.checked_shl(bits).unwrap_or(u128::MAX)
        })
    };
    let sum = |sizes: &mut dyn Iterator<Item = u128>| saturate(sizes.fold(0, u128::saturating_add));
    let name = object.name_any();
    let rows = tables.interfaces.rows().values();
    let used = rows
        .filter(|row| row.spec.pod_network_name == name)
        .filter_map(|row| row.status.as_ref())
        .map(|status| status.addresses.len())
        .sum();
    AddressCounts {
        total: sum(&mut object.spec.subnets.iter().map(|cidr| size(cidr))),
        used: count(used),
        allocated: sum(&mut status.blocks.iter().map(|block| size(&block.cidr))),
    }
}

fn namespaces(tables: &Tables, networks: &Networks, name: &str) -> Vec<String> {
    let rows = tables.namespaces.rows().iter();
    rows.filter(|(_, labels)| {
        networks
            .default_of(labels)
            .is_some_and(|network| network.as_str() == name)
    })
    .map(|(key, _)| key.name.clone())
    .take(MOST_NAMESPACES)
    .collect()
}

fn attachment_status(tables: &Tables, row: &AttachmentRow) -> kni_api::PodNetworkAttachmentStatus {
    let mut status = row.object.status.clone().unwrap_or_default();
    let generation = row.object.metadata.generation;
    let network = tables.networks.get("", &row.object.spec.pod_network_name);
    let (accepted, reason, message) = match (&row.facts, network) {
        (Err(why), _) => (false, "Refused", why.clone()),
        (Ok(_), None) => {
            let message = format!("network {} does not exist", row.object.spec.pod_network_name);
            (false, "NetworkNotFound", message)
        }
        (Ok(_), Some(network)) if !network.spec.enabled => {
            (false, "NetworkDisabled", "the network takes no new pods".to_owned())
        }
        (Ok(_), Some(_)) => (true, "Valid", "the network takes pods".to_owned()),
    };
    let (mut selected, mut attached) = (0, 0);
    if let Ok(facts) = &row.facts {
        for (key, pod) in tables.pods.rows() {
            let runs = !pod.node.is_empty() && !pod.finished && !pod.host_network;
            if key.namespace != facts.namespace || !runs || !matches(&facts.pods, &pod.labels) {
                continue;
            }
            selected += 1;
            let name = super::interfaces::object_name(&key.name, facts.ifname.as_str());
            let there = tables.interfaces.get(&key.namespace, &name);
            attached += i64::from(there.is_some_and(|there| {
                there.spec.pod_network_name == facts.network.as_str() && there.spec.pod_uid == pod.uid
            }));
        }
    }
    status.selected = selected;
    status.attached = attached;
    set_condition(
        &mut status.conditions,
        condition("Accepted", accepted, reason, &message, generation),
    );
    let ready = selected == attached && accepted;
    let counts = format!("{attached} of {selected} pods have the interface");
    let why = if ready { "AllPods" } else { "PodsMissing" };
    set_condition(
        &mut status.conditions,
        condition("Ready", ready, why, &counts, generation),
    );
    status
}

fn egress_conditions(tables: &Tables, key: &Key) -> Vec<Condition> {
    let Some(row) = tables.egress_policies.rows().get(key) else {
        return Vec::new();
    };
    let generation = Some(row.generation);
    if let Err(why) = &row.policy {
        return vec![
            condition("Accepted", false, "Refused", why, generation),
            condition("Programmed", false, "NotAccepted", "see condition Accepted", generation),
        ];
    }
    let nodes: Vec<_> = tables
        .node_networks
        .rows()
        .iter()
        .filter(|(key, _)| tables.nodes.get("", &key.name).is_some())
        .collect();
    let behind = nodes.iter().filter(|(_, node)| {
        let policies = node.status.as_ref().map(|status| &status.policies);
        !policies.is_some_and(|policies| {
            policies.programmed
                && policies
                    .resource_version
                    .parse::<u64>()
                    .is_ok_and(|seen| seen >= row.version)
        })
    });
    let behind: Vec<&str> = behind.map(|(key, _)| key.name.as_str()).collect();
    let counts = format!("in force on {} of {} nodes", nodes.len() - behind.len(), nodes.len());
    let programmed = if behind.is_empty() {
        condition("Programmed", true, "AllNodes", &counts, generation)
    } else {
        let message = format!("{counts}; not on {}", listed(&behind));
        condition("Programmed", false, "NodesMissing", &message, generation)
    };
    vec![
        condition(
            "Accepted",
            true,
            "Valid",
            "the policy can be put into force",
            generation,
        ),
        programmed,
    ]
}

/// Some names, and how many more there are.
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
