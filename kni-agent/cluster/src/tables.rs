//! Holds the cached objects by kind.

mod of_cluster;

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use k8s_openapi::api::core::v1::Taint;
use kni_api::{AddressBlock, EgressAddressClaim, EgressAddressPool, NetworkMembers, NetworkNumber, NodeEndpoint};
use kni_crd::{
    AttachmentFacts, Definition, InvalidObject, NodeNetwork, PodFacts, PodInterface, PodNetwork, PodNetworkAttachment,
};
use kni_model::{
    NetworkName,
    joining::NAMESPACE_NAME_LABEL,
    policy::Labels,
    service::{EndpointSlice, Service},
};

use super::{
    policy_row::{EgressPolicyRow, PolicyRow},
    table::{Key, OfNetwork, Refused, Table},
};

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
    /// Whether its kubelet reports that it is ready.
    pub ready: bool,
    /// Whether condition `NetworkUnavailable` is True.
    pub network_unavailable: bool,
    /// Internal addresses.
    pub addresses: Vec<String>,
    /// External addresses.
    pub external_addresses: Vec<String>,
    /// Whether it is labelled as part of the control plane. Its kubelet cannot do that.
    pub control_plane: bool,
    /// KNI's extended resources.
    pub resources: BTreeMap<String, String>,
}

/// The cached objects by kind.
#[derive(Debug)]
pub struct Tables {
    /// Networks.
    pub networks: Table<Arc<PodNetwork>>,
    /// Attachments.
    pub attachments: Table<AttachmentRow>,
    /// Interfaces: of the agent's own node, and in kni-controller of all nodes.
    pub interfaces: Table<Arc<PodInterface>>,
    /// Networks of all nodes.
    pub node_networks: Table<Arc<NodeNetwork>>,
    /// Egress policies.
    pub egress_policies: Table<PolicyRow>,
    /// Pools of egress addresses.
    pub egress_pools: Table<Arc<EgressAddressPool>>,
    /// Claims of egress addresses.
    pub egress_claims: Table<Arc<EgressAddressClaim>>,
    /// Kubernetes policies. kni-controller does not wait for them.
    pub network_policies: Table<PolicyRow>,
    /// Policies of additional networks. kni-controller does not wait for them.
    pub multi_policies: Table<PolicyRow>,
    /// Labels of namespaces.
    pub namespaces: Table<Labels>,
    /// Services.
    pub services: Table<Result<Service, InvalidObject>>,
    /// Endpoint slices.
    pub slices: Table<Result<EndpointSlice, InvalidObject>>,
    /// Pods: of the agent's own node, and in kni-controller all.
    pub pods: Table<Arc<PodFacts>>,
    /// The agent's own node.
    pub own_node: Table<NodeRow>,
    /// The object of the agent's own node.
    pub own_network: Table<Arc<NodeNetwork>>,
    /// Address blocks: of the agent's own node, and in kni-controller of all nodes. Attach does not wait for them: the
    /// kind may be missing.
    pub blocks: Table<Arc<AddressBlock>>,
    /// Pods of other nodes: in the networks that have a pod of the agent's node, and in kni-controller of all networks.
    /// Attach does not wait for them: a peer that is not known has no identity.
    pub members: Table<Arc<NetworkMembers>>,
    /// The objects of the agent's own node, in all networks.
    pub own_members: Table<Arc<NetworkMembers>>,
    /// Where other nodes are: of all nodes. Attach does not wait for them: the kind may be missing.
    pub node_endpoints: Table<Arc<NodeEndpoint>>,
    /// Address blocks of all nodes in the networks that have a pod of the agent's node, and in those with an extended
    /// resource; only agents follow them. Attach does not wait for them. The networks are selected by label, which a
    /// node writes itself: the network of a block is that of its spec.
    pub other_blocks: Table<Arc<AddressBlock>>,
    /// Numbers of networks. Attach does not wait for them: the kind may be missing.
    pub numbers: Table<Arc<NetworkNumber>>,
    /// Virtual addresses of Services, also of those that KNI does not serve or understand; only kni-controller follows
    /// them.
    pub service_addresses: Table<Vec<IpAddr>>,
    /// All nodes; only kni-controller follows them.
    pub nodes: Table<NodeRow>,
    /// Egress policies with their status; only kni-controller follows them in this form.
    pub egress_objects: Table<EgressPolicyRow>,
    /// Network definitions of other tools.
    pub definitions: Table<Definition>,
    /// All network definitions of other tools; only kni-controller follows them, and does not wait for them.
    pub definition_names: Table<()>,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            networks: Table::default(),
            attachments: Table::default(),
            interfaces: Table::default(),
            node_networks: Table::default(),
            egress_policies: Table::default(),
            egress_pools: Table::default(),
            egress_claims: Table::default(),
            network_policies: Table::default(),
            multi_policies: Table::default(),
            namespaces: Table::default(),
            services: Table::default(),
            slices: Table::default(),
            pods: Table::default(),
            own_node: Table::default(),
            own_network: Table::default(),
            blocks: Table::by_network(),
            members: Table::by_network(),
            own_members: Table::default(),
            node_endpoints: Table::default(),
            other_blocks: Table::by_network(),
            numbers: Table::default(),
            service_addresses: Table::default(),
            nodes: Table::default(),
            egress_objects: Table::default(),
            definitions: Table::default(),
            definition_names: Table::default(),
        }
    }
}

impl OfNetwork for Arc<AddressBlock> {
    fn network(&self) -> &str {
        &self.spec.network
    }
}

impl OfNetwork for Arc<NetworkMembers> {
    fn network(&self) -> &str {
        &self.spec.network
    }
}

/// What the tables of all kinds have in common.
trait Kept {
    fn is_synced(&self) -> bool;
    fn version(&self) -> u64;
    fn newest(&self) -> u64;
    fn set_restored(&mut self);
    fn len(&self) -> usize;
    fn refused(&self) -> &BTreeMap<Key, Refused>;
    fn problem(&self) -> Option<&str>;
    fn is_absent(&self) -> bool;
}

impl<V: PartialEq> Kept for Table<V> {
    fn is_synced(&self) -> bool {
        Self::is_synced(self)
    }

    fn version(&self) -> u64 {
        Self::version(self)
    }

    fn newest(&self) -> u64 {
        Self::newest(self)
    }

    fn set_restored(&mut self) {
        Self::set_restored(self);
    }

    fn len(&self) -> usize {
        self.rows().len()
    }

    fn refused(&self) -> &BTreeMap<Key, Refused> {
        Self::refused(self)
    }

    fn problem(&self) -> Option<&str> {
        Self::problem(self)
    }

    fn is_absent(&self) -> bool {
        Self::is_absent(self)
    }
}

/// How many refused objects of a kind are listed by name.
const MOST_LISTED: usize = 8;

impl Tables {
    /// The highest resource version that the watches of our kinds have reported; 0 if there was no event. The API
    /// server keeps all kinds that are definitions in one etcd, whose revision is the version of each of them.
    pub fn newest(&mut self) -> u64 {
        let newest = self.ours().into_iter().map(|table| table.newest());
        newest.max().unwrap_or_default()
    }

    /// Notes that the API server's storage was restored: [`Self::newest`] is that of lists from now on, so that a
    /// restore is noticed once.
    pub(crate) fn set_restored(&mut self) {
        for table in self.ours() {
            table.set_restored();
        }
    }

    /// Our own kinds.
    fn ours(&mut self) -> [&mut dyn Kept; 14] {
        [
            &mut self.networks,
            &mut self.attachments,
            &mut self.interfaces,
            &mut self.node_networks,
            &mut self.own_network,
            &mut self.egress_policies,
            &mut self.egress_pools,
            &mut self.egress_claims,
            &mut self.blocks,
            &mut self.other_blocks,
            &mut self.members,
            &mut self.own_members,
            &mut self.node_endpoints,
            &mut self.numbers,
        ]
    }

    /// The kinds without which no pod is attached.
    fn needed(&self) -> [(&'static str, &dyn Kept); 14] {
        [
            ("podnetworks", &self.networks),
            ("podnetworkattachments", &self.attachments),
            ("podinterfaces", &self.interfaces),
            ("egresspolicies", &self.egress_policies),
            ("egressaddresspools", &self.egress_pools),
            ("egressaddressclaims", &self.egress_claims),
            ("networkpolicies", &self.network_policies),
            ("multi-networkpolicies", &self.multi_policies),
            ("namespaces", &self.namespaces),
            ("services", &self.services),
            ("endpointslices", &self.slices),
            ("pods", &self.pods),
            // Without its UID the node would give up its egress addresses and claim no blocks.
            ("nodes", &self.own_node),
            // After a reboot only these list the addresses that other nodes still take for those of former pods.
            ("networkmembers of this node", &self.own_members),
        ]
    }

    /// The kinds that attach can do without: reports, and the definitions of other tools, for which only pods that name
    /// one wait.
    fn others(&self) -> [(&'static str, &dyn Kept); 7] {
        [
            ("networkmembers", &self.members),
            ("nodenetworks", &self.own_network),
            ("network-attachment-definitions", &self.definitions),
            ("addressblocks", &self.blocks),
            ("addressblocks of joined networks", &self.other_blocks),
            ("networknumbers", &self.numbers),
            ("nodeendpoints", &self.node_endpoints),
        ]
    }

    /// The kinds whose first list is not complete yet, and without which no pod is attached.
    pub fn missing(&self) -> Vec<&'static str> {
        let behind = self.needed().into_iter().filter(|(_, table)| !table.is_synced());
        behind.map(|(name, _)| name).collect()
    }

    /// What the agent cannot watch or decode, and what is used instead; empty if the cache is what the cluster has.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, table) in self.needed().into_iter().chain(self.others()) {
            problems.extend(table.problem().map(|problem| format!("{name}: {problem}")));
            for (key, Refused { reason, .. }) in table.refused().iter().take(MOST_LISTED) {
                problems.push(format!("{name} {key} is not understood: {reason}"));
            }
            let more = table.refused().len().saturating_sub(MOST_LISTED);
            if more > 0 {
                problems.push(format!("{name}: {more} more objects are not understood"));
            }
        }
        let behind = self.others().into_iter().filter(|(_, table)| !table.is_synced());
        problems.extend(behind.map(|(name, _)| format!("{name} were not read yet")));
        problems
    }

    /// The number of cached objects by kind that an agent follows.
    pub fn counts(&self) -> Vec<(&'static str, usize)> {
        let all = self.needed().into_iter().chain(self.others());
        all.map(|(name, table)| (name, table.len())).collect()
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
        let all = self.needed().into_iter().chain(self.others());
        let all: u64 = all.map(|(_, table)| table.version()).sum();
        let of_cluster = [
            self.node_networks.version(),
            self.nodes.version(),
            self.egress_objects.version(),
            self.service_addresses.version(),
            self.definition_names.version(),
        ];
        all + of_cluster.iter().sum::<u64>()
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
