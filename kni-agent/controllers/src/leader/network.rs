//! Computes the status of a network over all nodes: its conditions and counts.

use kni_api::{
    Condition, PodNetworkStatus, PodNetworkSummary,
    pod_network::{AddressCounts, NodeCounts},
    set_condition,
};
use kni_crd::PodNetwork;
use kube::ResourceExt as _;

use super::{count, listed, users};
use kni_cluster::{Networks, Tables};

use crate::{interfaces::condition, node::saturate};

/// Maximum number of namespaces in the status of a network.
const MOST_NAMESPACES: usize = 100;

/// The desired status of a network: its blocks without those of removed nodes, its conditions and its counts.
pub(super) fn network_status(
    tables: &Tables,
    networks: &Networks,
    object: &PodNetwork,
    is_expired: impl Fn(&str) -> bool,
) -> PodNetworkStatus {
    let name = object.name_any();
    let mut status = object.status.clone().unwrap_or_default();
    status.blocks.retain(|block| !is_expired(&block.node));
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
    status.summary = PodNetworkSummary::new(&object.spec, &status);
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
        None => make("Accepted", true, "Valid", "the network is valid"),
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
    let applied = nodes - missing.len();
    let counts = format!("applied on {applied} of {nodes} nodes");
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

/// The condition for interfaces that prevent the deletion of a network.
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
    // Without pod names: they would change with every pod.
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
