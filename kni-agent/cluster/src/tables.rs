//! Holds the cached objects by kind.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Taint;
use kni_api::{AddressBlock, EgressPolicySummary};
use kni_crd::{
    AttachmentFacts, EgressPolicy, InvalidObject, NodeNetwork, PodFacts, PodInterface, PodNetwork, PodNetworkAttachment,
};
use kni_model::{
    NetworkName,
    access::NAMESPACE_NAME_LABEL,
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
};

use super::table::Table;

/// A policy as last reported: its rules, or why it has none.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyRow {
    /// Its rules, or why it is not valid.
    pub policy: Result<Arc<Policy>, InvalidObject>,
    /// The object's resource version, as a number; 0 where it is none.
    pub version: u64,
    /// The object's generation.
    pub generation: i64,
    /// The summary of an egress policy; empty for other kinds.
    pub summary: EgressPolicySummary,
}

/// An attachment, with its object for the status writer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttachmentRow {
    /// The object.
    pub object: Arc<PodNetworkAttachment>,
    /// Its contents, or why they are not valid.
    pub facts: Result<AttachmentFacts, InvalidObject>,
}

/// A node of the cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeRow {
    /// Its uid.
    pub uid: String,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// Internal addresses.
    pub addresses: Vec<String>,
    /// KNI's extended resources.
    pub resources: BTreeMap<String, String>,
}

/// The cached objects by kind.
#[derive(Debug, Default)]
pub struct Tables {
    /// Networks.
    pub networks: Table<Arc<PodNetwork>>,
    /// Attachments.
    pub attachments: Table<AttachmentRow>,
    /// Interfaces of all nodes.
    pub interfaces: Table<Arc<PodInterface>>,
    /// Networks of all nodes.
    pub node_networks: Table<Arc<NodeNetwork>>,
    /// Egress policies.
    pub egress_policies: Table<PolicyRow>,
    /// Kubernetes policies.
    pub network_policies: Table<PolicyRow>,
    /// Policies of additional networks.
    pub multi_policies: Table<PolicyRow>,
    /// Labels of namespaces.
    pub namespaces: Table<Labels>,
    /// Services.
    pub services: Table<Result<Service, InvalidObject>>,
    /// Endpoint slices.
    pub slices: Table<Result<EndpointSlice, InvalidObject>>,
    /// Pods.
    pub pods: Table<Arc<PodFacts>>,
    /// The agent's own node.
    pub own_node: Table<NodeRow>,
    /// The object of the agent's own node.
    pub own_network: Table<Arc<NodeNetwork>>,
    /// Address blocks: of the agent's own node, and in kni-controller of all nodes. Attach does not wait for them: the
    /// kind may be missing.
    pub blocks: Table<Arc<AddressBlock>>,
    /// All nodes; only kni-controller follows them.
    pub nodes: Table<NodeRow>,
    /// Egress policies with their status; only kni-controller follows them in this form.
    pub egress_objects: Table<Arc<EgressPolicy>>,
    /// Network definitions of other tools.
    pub definitions: Table<NetworkName>,
}

impl Tables {
    /// The kinds that an agent needs whose first list is not complete yet.
    pub fn missing(&self) -> Vec<&'static str> {
        unsynced(&[
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
        ])
    }

    /// The kinds that kni-controller needs whose first list is not complete yet.
    pub fn missing_of_cluster(&self) -> Vec<&'static str> {
        unsynced(&[
            ("podnetworks", self.networks.is_synced()),
            ("podnetworkattachments", self.attachments.is_synced()),
            ("podinterfaces", self.interfaces.is_synced()),
            ("egresspolicies", self.egress_objects.is_synced()),
            ("namespaces", self.namespaces.is_synced()),
            ("pods", self.pods.is_synced()),
            ("nodes", self.nodes.is_synced()),
            ("nodenetworks", self.node_networks.is_synced()),
        ])
    }

    /// The networks that require the verb `join`, and whose status lists the service account.
    pub fn joinable(&self, namespace: &str, account: &str) -> Vec<NetworkName> {
        let asking = self.networks.rows().values().filter(|object| {
            let access = object.spec.access.as_ref();
            access.is_some_and(|access| access.require_join)
        });
        let full = format!("{namespace}/{account}");
        asking
            .filter(|object| {
                object
                    .status
                    .as_ref()
                    .is_some_and(|status| status.join_accounts.contains(&full))
            })
            .filter_map(|object| object.metadata.name.as_ref()?.parse().ok())
            .collect()
    }

    /// The labels of a namespace, with that of its name; `None` while it is not known.
    pub fn namespace_labels(&self, name: &str) -> Option<Labels> {
        let mut labels = self.namespaces.get("", name)?.clone();
        labels.insert(NAMESPACE_NAME_LABEL.to_owned(), name.to_owned());
        Some(labels)
    }

    /// Changes with every change.
    pub fn version(&self) -> u64 {
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
            self.blocks.version(),
            self.nodes.version(),
            self.egress_objects.version(),
            self.definitions.version(),
        ]
        .into_iter()
        .sum()
    }

    /// The policies of every kind.
    pub fn policies(&self) -> impl Iterator<Item = &PolicyRow> {
        [&self.egress_policies, &self.network_policies, &self.multi_policies]
            .into_iter()
            .flat_map(|table| table.rows().values())
    }

    /// Changes with every policy and every namespace.
    pub fn policy_version(&self) -> u64 {
        self.egress_policies.version() + self.network_policies.version() + self.multi_policies.version()
    }
}

/// The names of the kinds that are not complete.
fn unsynced(kinds: &[(&'static str, bool)]) -> Vec<&'static str> {
    let missing = kinds.iter().filter(|(_, synced)| !synced);
    missing.map(|(name, _)| *name).collect()
}
