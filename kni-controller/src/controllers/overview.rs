//! Sorts the rows of the tables by network, once for all networks.

use std::collections::{BTreeMap, BTreeSet};

use kni_api::{PodInterface, node_network::NodeNetworkEntry};
use kni_cluster::{Key, Networks, Tables};
use kni_crd::PodNetwork;
use kni_model::Home;

/// The rows that concern each network.
#[derive(Default)]
pub(super) struct Overview<'a> {
    /// Nodes that are in the cluster and have reported their networks.
    pub(super) nodes: Vec<&'a str>,
    entries: BTreeMap<&'a str, Vec<(&'a str, &'a NodeNetworkEntry)>>,
    interfaces: BTreeMap<&'a str, Vec<(&'a Key, &'a PodInterface)>>,
    namespaces: BTreeMap<String, Vec<String>>,
    /// Ranges by the UID of the network.
    blocks: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Overview<'a> {
    pub(super) fn of(tables: &'a Tables, networks: &Networks) -> Self {
        let mut overview = Self::default();
        for (key, row) in tables.node_networks.rows() {
            if tables.nodes.get("", &key.name).is_none() {
                continue;
            }
            overview.nodes.push(&key.name);
            for entry in row.status.iter().flat_map(|status| &status.networks) {
                let entries = overview.entries.entry(&entry.name).or_default();
                entries.push((&key.name, entry));
            }
        }
        for (key, row) in tables.interfaces.rows() {
            let interfaces = overview.interfaces.entry(&row.spec.pod_network_name).or_default();
            interfaces.push((key, row));
        }
        for block in tables.blocks.rows().values() {
            let blocks = overview.blocks.entry(&block.spec.network_uid).or_default();
            blocks.push(&block.spec.cidr);
        }
        for (key, labels) in tables.namespaces.rows() {
            if let Home::Network(network) = networks.home(&key.name, labels) {
                let namespaces = overview.namespaces.entry(network.to_string()).or_default();
                namespaces.push(key.name.clone());
            }
        }
        overview
    }

    /// The reports about a network, by node.
    pub(super) fn entries(&self, network: &str) -> &[(&'a str, &'a NodeNetworkEntry)] {
        self.entries.get(network).map_or(&[], Vec::as_slice)
    }

    /// The interfaces in a network.
    pub(super) fn interfaces(&self, network: &str) -> &[(&'a Key, &'a PodInterface)] {
        self.interfaces.get(network).map_or(&[], Vec::as_slice)
    }

    /// The ranges of the blocks that nodes have of a network.
    pub(super) fn blocks(&self, network: &PodNetwork) -> &[&'a str] {
        let blocks = network.metadata.uid.as_deref().and_then(|uid| self.blocks.get(uid));
        blocks.map_or(&[], Vec::as_slice)
    }

    /// The namespaces whose pods join the network by default.
    pub(super) fn namespaces(&self, network: &str) -> &[String] {
        self.namespaces.get(network).map_or(&[], Vec::as_slice)
    }
}

/// The nodes that have neither a node object nor an interface of a pod, of those that a `NodeNetwork` or a block names.
pub(super) fn missing_nodes(tables: &Tables) -> BTreeSet<String> {
    let with_interfaces: BTreeSet<&str> = tables
        .interfaces
        .rows()
        .values()
        .map(|row| row.spec.node_name.as_str())
        .collect();
    let is_missing = |node: &str| tables.nodes.get("", node).is_none() && !with_interfaces.contains(node);
    let reports = tables.node_networks.rows().keys().map(|key| key.name.as_str());
    let objects = tables.blocks.rows().values().map(|row| row.spec.node_name.as_str());
    let named: BTreeSet<&str> = reports.chain(objects).collect();
    named
        .into_iter()
        .filter(|node| is_missing(node))
        .map(str::to_owned)
        .collect()
}

/// Whether a network exists, or may exist: one whose object is not understood has an unknown UID.
pub(super) fn exists(tables: &Tables, network: &str, uid: &str) -> bool {
    let found = tables.networks.get("", network);
    found.is_some_and(|found| found.metadata.uid.as_deref() == Some(uid))
        || tables.networks.refused().contains_key(&Key::new("", network))
}
