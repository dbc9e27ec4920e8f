//! Everything that is known of the cluster, for all who ask: attach, and the controllers.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::core::v1::Taint;
use kni_crd::{AttachmentFacts, NodeNetwork, PodFacts, PodInterface, PodNetwork, PodNetworkAttachment};
use kni_model::{
    NetworkName,
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
};
use tokio::sync::watch;

use super::table::Table;

/// A policy as it was last told: what it means, or why it means nothing.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PolicyRow {
    pub(super) policy: Result<Arc<Policy>, String>,
    /// The object's resource version, as a number; 0 where it is none.
    pub(super) version: u64,
    pub(super) generation: i64,
}

/// An attachment, with its object for whoever writes the status.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AttachmentRow {
    pub(super) object: Arc<PodNetworkAttachment>,
    pub(super) facts: Result<AttachmentFacts, String>,
}

/// A node of the cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct NodeRow {
    pub(super) taints: Vec<Taint>,
    /// Internal addresses.
    pub(super) addresses: Vec<String>,
    /// Extended resources of ours.
    pub(super) resources: BTreeMap<String, String>,
}

/// The tables.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) networks: Table<Arc<PodNetwork>>,
    pub(super) attachments: Table<AttachmentRow>,
    pub(super) interfaces: Table<Arc<PodInterface>>,
    pub(super) node_networks: Table<Arc<NodeNetwork>>,
    pub(super) egress_policies: Table<PolicyRow>,
    pub(super) network_policies: Table<PolicyRow>,
    pub(super) multi_policies: Table<PolicyRow>,
    pub(super) namespaces: Table<Labels>,
    pub(super) services: Table<Result<Service, String>>,
    pub(super) slices: Table<Result<EndpointSlice, String>>,
    pub(super) pods: Table<Arc<PodFacts>>,
    /// The agent's own node, and its object.
    pub(super) own_node: Table<NodeRow>,
    pub(super) own_network: Table<Arc<NodeNetwork>>,
    /// All of them: the leader alone follows these.
    pub(super) nodes: Table<NodeRow>,
    pub(super) definitions: Table<NetworkName>,
}

impl Tables {
    /// What has not been read to its end yet, by name.
    pub(super) fn missing(&self) -> Vec<&'static str> {
        let all = [
            ("podnetworks", self.networks.is_synced()),
            ("podnetworkattachments", self.attachments.is_synced()),
            ("podinterfaces", self.interfaces.is_synced()),
            ("egresspolicies", self.egress_policies.is_synced()),
            ("networkpolicies", self.network_policies.is_synced()),
            ("multi-networkpolicies", self.multi_policies.is_synced()),
            ("namespaces", self.namespaces.is_synced()),
            ("services", self.services.is_synced()),
            ("endpointslices", self.slices.is_synced()),
            ("pods", self.pods.is_synced()),
            ("nodes", self.own_node.is_synced()),
            ("nodenetworks", self.own_network.is_synced()),
            ("network-attachment-definitions", self.definitions.is_synced()),
        ];
        all.iter()
            .filter(|(_, synced)| !synced)
            .map(|(name, _)| *name)
            .collect()
    }

    /// Changes with every change.
    fn version(&self) -> u64 {
        [
            self.networks.version(),
            self.attachments.version(),
            self.interfaces.version(),
            self.node_networks.version(),
            self.policy_version(),
            self.namespaces.version(),
            self.services.version(),
            self.slices.version(),
            self.pods.version(),
            self.own_node.version(),
            self.own_network.version(),
            self.nodes.version(),
            self.definitions.version(),
        ]
        .into_iter()
        .sum()
    }

    /// The policies of every kind.
    pub(super) fn policies(&self) -> impl Iterator<Item = &PolicyRow> {
        [&self.egress_policies, &self.network_policies, &self.multi_policies]
            .into_iter()
            .flat_map(|table| table.rows().values())
    }

    /// Changes with every policy and every namespace.
    pub(super) fn policy_version(&self) -> u64 {
        self.egress_policies.version() + self.network_policies.version() + self.multi_policies.version()
    }
}

/// The tables, shared. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Known {
    tables: Arc<Mutex<Tables>>,
    changes: watch::Sender<()>,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            tables: Arc::default(),
            changes: watch::Sender::new(()),
        }
    }
}

impl Known {
    /// The tables as they are. Held for microseconds, never across an await.
    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
        // A panic while it was held is a bug; each row is whole.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the tables and tells everybody who waits.
    pub(super) fn change(&self, change: impl FnOnce(&mut Tables)) {
        let changed = {
            let mut tables = self.tables();
            let before = tables.version();
            change(&mut tables);
            tables.version() != before
        };
        if changed {
            self.changes.send_replace(());
        }
    }

    /// Tells of every change from now on; the receiver looks at versions to see what it was.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}
