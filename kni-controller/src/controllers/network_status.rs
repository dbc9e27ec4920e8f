//! Computes the status of a network over all nodes: its conditions and counts.

use std::collections::BTreeSet;

use kni_api::{
    Condition, PodNetworkStatus, PodNetworkSummary,
    pod_network::{AddressCounts, NodeCounts},
    set_condition,
};
use kni_crd::{FromObject as _, PodNetwork};
use kni_model::NetworkSpec;
use kube::ResourceExt as _;

use super::{block_excess::Nodes, count, fabric::fabric, listed, overview::Overview};

/// Maximum number of namespaces in the status of a network.
const MOST_NAMESPACES: usize = 100;
/// The condition whose message counts nodes.
pub(super) const PROGRAMMED: &str = "Programmed";

/// The condition that names nodes with too many blocks.
pub(super) const BLOCKS_EXCEEDED: &str = "BlocksExceeded";

/// The part of a status that changes with pods, claims and nodes, and of which no one needs every value: counts, and
/// what condition `Programmed` states about them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figures {
    addresses: AddressCounts,
    interfaces: i64,
    nodes: NodeCounts,
    total: String,
    programmed: Option<Condition>,
}

impl Figures {
    pub(super) fn of(status: &PodNetworkStatus) -> Self {
        let mut conditions = status.conditions.iter();
        Self {
            addresses: status.addresses,
            interfaces: status.interfaces,
            nodes: status.nodes,
            total: status.summary.total.clone(),
            programmed: conditions.find(|condition| condition.type_ == PROGRAMMED).cloned(),
        }
    }

    /// A status with these figures, but for a change between no interfaces and some, on which the deletion of the
    /// network depends, and for what is not only a message.
    pub(super) fn apart_from(&self, status: &PodNetworkStatus) -> PodNetworkStatus {
        let mut status = status.clone();
        status.addresses = self.addresses;
        status.nodes = self.nodes;
        status.summary.total.clone_from(&self.total);
        if (status.interfaces == 0) == (self.interfaces == 0) {
            status.interfaces = self.interfaces;
        }
        let mut conditions = status.conditions.iter_mut();
        let now = conditions.find(|condition| condition.type_ == PROGRAMMED);
        if let Some((now, before)) = now.zip(self.programmed.as_ref())
            && (now.status, &now.reason) == (before.status, &before.reason)
        {
            now.message.clone_from(&before.message);
        }
        status
    }
}

/// The desired status of a network: its conditions, its counts, its number, its fabric and its features. `open`: the
/// nodes that its deletion waits for.
pub(super) fn network_status(
    overview: &Overview<'_>,
    refused: Option<&str>,
    number: Option<u32>,
    object: &PodNetwork,
    open: &[&str],
) -> PodNetworkStatus {
    let name = object.name_any();
    let mut status = object.status.clone().unwrap_or_default();
    let entries = overview.entries(&name);
    let generation = object.metadata.generation.unwrap_or(0);
    let programmed = entries.iter().filter(|(_, entry)| entry.generation == generation);
    let programmed: BTreeSet<&str> = programmed.map(|(node, _)| *node).collect();
    let ready = entries.iter().filter(|(_, entry)| entry.ready).count();
    let full = entries.iter().filter(|(_, entry)| entry.exhausted);
    let full: Vec<&str> = full.map(|(node, _)| *node).collect();
    let nodes = &overview.nodes;
    status.nodes = NodeCounts {
        ready: count(ready),
        total: count(nodes.len()),
    };
    status.number = number;
    status.fabric = Some(fabric(object));
    status.features = if refused.is_none() {
        features(object)
    } else {
        Vec::new()
    };
    status.interfaces = count(overview.interfaces(&name).len());
    status.addresses = addresses(overview, object);
    let namespaces = overview.namespaces(&name).iter().take(MOST_NAMESPACES);
    status.namespaces = namespaces.cloned().collect();
    let missing = nodes.iter().filter(|node| !programmed.contains(*node));
    let missing: Vec<&str> = missing.copied().collect();
    for condition in conditions(object, refused, &missing, &full, nodes.len()) {
        set_condition(&mut status.conditions, condition);
    }
    set_condition(&mut status.conditions, in_use(overview, object, &name, open));
    status.summary = PodNetworkSummary::new(&object.spec, &status);
    status
}

/// Adds the condition for nodes that hold more empty blocks than their pods can need. A network has none before the
/// first such node. Its message changes with the nodes only.
pub(super) fn note_excess(status: &mut PodNetworkStatus, object: &PodNetwork, nodes: Option<&Nodes>) {
    let mut conditions = status.conditions.iter();
    let generation = object.metadata.generation;
    let condition = match nodes {
        Some(nodes) => Condition::now(BLOCKS_EXCEEDED, true, "EmptyBlocks", &excess(nodes), generation),
        None if conditions.any(|condition| condition.type_ == BLOCKS_EXCEEDED) => {
            let message = "no node holds more address blocks than its pods can need";
            Condition::now(BLOCKS_EXCEEDED, false, "AsNeeded", message, generation)
        }
        None => return,
    };
    set_condition(&mut status.conditions, condition);
}

/// Names the nodes. Where a node was registered again, its agent has the blocks of before once it runs.
fn excess(nodes: &Nodes) -> String {
    let names = |again: bool| -> Vec<&str> {
        let names = nodes.iter().filter(|(_, is_again)| **is_again == again);
        names.map(|(name, _)| name.as_str()).collect()
    };
    let (present, again) = (names(false), names(true));
    let mut parts = Vec::new();
    if !present.is_empty() {
        parts.push(format!(
            "nodes hold more empty address blocks than their pods can need: {}; if no agent is at fault, a token is \
             misused; deleting the Node object releases its blocks",
            listed(&present)
        ));
    }
    if !again.is_empty() {
        parts.push(format!(
            "nodes that were registered again hold empty address blocks of before: {}; their agents release them once they \
             run",
            listed(&again)
        ));
    }
    parts.join("; ")
}

/// The names of the features of a valid network, as agents report them.
fn features(object: &PodNetwork) -> Vec<String> {
    let spec = NetworkSpec::from_object(object);
    let features = spec.map(|spec| spec.provider.features()).unwrap_or_default();
    features.iter().map(|feature| feature.as_str().to_owned()).collect()
}

fn conditions(
    object: &PodNetwork,
    refused: Option<&str>,
    missing: &[&str],
    full: &[&str],
    nodes: usize,
) -> Vec<Condition> {
    let generation = object.metadata.generation;
    let make =
        |kind: &str, holds, reason: &str, message: &str| Condition::now(kind, holds, reason, message, generation);
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
        (true, _) => make(PROGRAMMED, false, "NotAccepted", "see condition Accepted"),
        (false, true) => make(PROGRAMMED, true, "AllNodes", &counts),
        (false, false) => make(
            PROGRAMMED,
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
fn in_use(overview: &Overview<'_>, object: &PodNetwork, name: &str, open: &[&str]) -> Condition {
    let rows = overview.interfaces(name).iter();
    let users: Vec<String> = rows
        .map(|(key, row)| format!("{}/{}", key.namespace, row.spec.pod_name))
        .collect();
    let generation = object.metadata.generation;
    if users.is_empty() && !open.is_empty() {
        let message = format!(
            "the network is deleted once these nodes have closed it, or after a minute: {}",
            listed(open)
        );
        return Condition::now("InUse", true, "OpenOnNodes", &message, generation);
    }
    if users.is_empty() {
        return Condition::now(
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
        return Condition::now("InUse", true, "DeletionRefused", &message, generation);
    }
    // Without pod names: they would change with every pod.
    Condition::now("InUse", true, "HasInterfaces", "pods have interfaces in it", generation)
}

fn addresses(overview: &Overview<'_>, object: &PodNetwork) -> AddressCounts {
    let size = |cidr: &str| -> u128 {
        let net: Result<ipnet::IpNet, _> = cidr.parse();
        net.map_or(0, |net| {
            let bits = u32::from(net.max_prefix_len() - net.prefix_len());
            1_u128.checked_shl(bits).unwrap_or(u128::MAX)
        })
    };
    let sum = |sizes: &mut dyn Iterator<Item = u128>| saturate(sizes.fold(0, u128::saturating_add));
    let name = object.name_any();
    let rows = overview.interfaces(&name).iter();
    let used = rows
        .filter_map(|(_, row)| row.status.as_ref())
        .map(|status| status.addresses.len())
        .sum();
    AddressCounts {
        total: sum(&mut object.spec.subnets.iter().map(|cidr| size(cidr))),
        used: count(used),
        allocated: sum(&mut overview.blocks(object).iter().map(|cidr| size(cidr))),
    }
}

fn saturate(number: u128) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use kni_model::Feature;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_that_was_registered_again_is_not_accused() {
        let nodes = |nodes: &[(&str, bool)]| {
            let nodes = nodes.iter().map(|(name, again)| ((*name).to_owned(), *again));
            excess(&nodes.collect())
        };
        let again = nodes(&[("n1", true)]);
        assert!(again.contains(": n1;") && !again.contains("misused"), "{again}");
        let both = nodes(&[("n1", true), ("n2", false)]);
        assert!(
            both.contains("can need: n2;") && both.contains("of before: n1;"),
            "{both}"
        );
    }

    #[test]
    fn features_are_those_of_the_provider() {
        let network = |spec: serde_json::Value| -> PodNetwork {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red" }, "spec": spec,
            });
            serde_json::from_value(object).unwrap()
        };
        let own = features(&network(json!({ "subnets": ["10.0.0.0/16"] })));
        assert_eq!(own.len(), Feature::CORE.len() + Feature::EXTENDED.len());
        assert!(
            own.starts_with(&["addresses".to_owned()]) && own.contains(&"policy".to_owned()),
            "{own:?}"
        );
        let tap = network(json!({ "provider": { "type": "Tap" }, "subnets": ["10.0.0.0/16"], "fabric": "None" }));
        assert_eq!(features(&tap).len(), Feature::CORE.len());
    }
}
