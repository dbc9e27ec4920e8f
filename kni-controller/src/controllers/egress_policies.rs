//! Writes the status of egress policies: whether each is accepted, and applied on every node.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kni_api::{
    Condition, ConditionStatus, EgressAddressClaim, EgressPolicy, EgressPolicyStatus, EgressPolicySummary,
    egress_address_claim::UNITS, node_network::PolicySummary, set_condition,
};
use kni_cluster::{EgressPolicyRow, Key, Networks, Tables, egress::claim_of};
use kni_model::{egress::EgressUser, policy::PolicyKind};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};

use super::{
    egress_claims::{egress_version, enforced_policies},
    egress_owners::{EgressOverview, Use},
    listed,
    reconcile::{Context, Reconciler, ignore_gone},
};
use crate::events::failed;

/// The condition of a policy with egress addresses: whether all its pods leave with them.
const ADDRESSES_READY: &str = "AddressesReady";

/// The controller.
#[derive(Debug, Default)]
pub(super) struct EgressStatus {
    /// The first version that was seen of each specification. Writes of the status change the version too, and a node
    /// that knows an earlier one knows the same rules.
    first: BTreeMap<Key, Version>,
}

/// The specification of a policy, and a resource version that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    uid: Option<String>,
    generation: Option<i64>,
    number: u64,
}

impl Reconciler for EgressStatus {
    const NAME: &'static str = "egress-policies";
    type Write = (Arc<EgressPolicy>, EgressPolicyStatus);

    fn version(tables: &Tables) -> u64 {
        egress_version(tables) + tables.node_networks.version()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Self::Write)> {
        let overview = EgressOverview::of(tables, networks, &enforced_policies(tables));
        let objects = tables.egress_objects.rows();
        self.first.retain(|key, _| objects.contains_key(key));
        let mut writes = Vec::new();
        for (key, policy) in objects {
            let object = &policy.object;
            let version = self.first(key, object);
            let mut status = object.status.clone().unwrap_or_default();
            // Those of the last valid version are not the ones that a refused object asks for.
            let addresses = match policy.row.refusal() {
                None => address_conditions(tables, &overview, key, object.metadata.generation),
                Some(_) => Vec::new(),
            };
            if addresses.is_empty() {
                status.conditions.retain(|condition| condition.type_ != ADDRESSES_READY);
            }
            let mut desired = egress_conditions(tables, policy, version);
            desired.retain(|condition| addresses.iter().all(|other| other.type_ != condition.type_));
            for condition in desired.into_iter().chain(addresses) {
                set_condition(&mut status.conditions, condition);
            }
            status.summary = EgressPolicySummary::new(&object.spec);
            if object.status.as_ref() != Some(&status) {
                writes.push((key.clone(), (Arc::clone(object), status)));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, (object, status): Self::Write) -> kube::Result<()> {
        let api: Api<EgressPolicy> = Api::namespaced(context.client.clone(), &key.namespace);
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)?;
        let before = object.status.as_ref().map_or(&[][..], |status| &status.conditions);
        if let Some(refused) = failed(before, &status.conditions, "Accepted") {
            let events = &context.events;
            events
                .warning(&*object, "PolicyRefused", "Validate", &refused.message)
                .await;
        }
        Ok(())
    }
}

/// The conditions of a policy with egress addresses, beside those of every policy: a refused address makes it not
/// accepted.
fn address_conditions(
    tables: &Tables,
    overview: &EgressOverview,
    key: &Key,
    generation: Option<i64>,
) -> Vec<Condition> {
    let mut refusals: Vec<(&'static str, String)> = Vec::new();
    let mut waiting: Vec<(String, String)> = Vec::new();
    let mut owned: Vec<String> = Vec::new();
    for ((user, address), right) in &overview.rights {
        let EgressUser::Policy(policy) = user else { continue };
        if policy.namespace != key.namespace || policy.name != key.name {
            continue;
        }
        if let Err(refusal) = right {
            refusals.push((refusal.reason(), refusal.message(*address)));
            continue;
        }
        let Some(found) = overview.uses.get(address) else {
            owned.push(format!("no pod leaves with {address}"));
            continue;
        };
        match claim_of(tables, *address) {
            Some(claim) => standing(claim, found, *address, &mut owned, &mut waiting),
            None => waiting.push(("AddressNotAssigned".to_owned(), format!("no node owns {address} yet"))),
        }
    }
    let ready =
        |holds, reason: &str, message: &str| Condition::now(ADDRESSES_READY, holds, reason, message, generation);
    if let Some((reason, _)) = refusals.first() {
        let all: Vec<&str> = refusals.iter().map(|(_, message)| message.as_str()).collect();
        let message = format!("{}; the pods do not leave the node", all.join("; "));
        return vec![
            Condition::now("Accepted", false, reason, &message, generation),
            ready(false, reason, "see condition Accepted"),
        ];
    }
    let all: Vec<&str> = waiting
        .iter()
        .map(|(_, message)| message.as_str())
        .chain(owned.iter().map(String::as_str))
        .collect();
    match waiting.first() {
        Some((reason, _)) => vec![ready(false, reason, &all.join("; "))],
        None if owned.is_empty() => Vec::new(),
        None => vec![ready(true, "Owned", &all.join("; "))],
    }
}

/// Sorts out whether all pods leave with an address.
fn standing(
    claim: &EgressAddressClaim,
    found: &Use,
    address: IpAddr,
    owned: &mut Vec<String>,
    waiting: &mut Vec<(String, String)>,
) {
    let node = &claim.spec.node_name;
    let status = claim.status.clone().unwrap_or_default();
    let report = status
        .conditions
        .into_iter()
        .find(|condition| condition.type_ == "Ready");
    match (status.holder, report) {
        (Some(holder), Some(report)) if holder.node_name == *node && report.status == ConditionStatus::True => {
            let shares = &claim.spec.shares;
            let has_ports = |name: &String| shares.iter().any(|share| share.node_name == *name);
            let others: Vec<&str> = found
                .nodes
                .keys()
                .filter(|other| !has_ports(other))
                .map(String::as_str)
                .collect();
            let (reason, problem) = if shares.len() >= UNITS.count() {
                ("PortsExhausted", "all its ports belong to other nodes")
            } else {
                ("PortsNotAssigned", "it has no ports for others yet")
            };
            if others.is_empty() {
                owned.push(format!("{address} is on node {node}"));
            } else {
                let message = format!(
                    "{address} is on node {node}, and {problem}; pods on {} do not leave",
                    listed(&others)
                );
                waiting.push((reason.to_owned(), message));
            }
        }
        (Some(holder), Some(report)) if holder.node_name == *node => waiting.push((report.reason, report.message)),
        (Some(holder), _) => {
            let message = format!(
                "{address} moves to node {node}, and node {} has not released it",
                holder.node_name
            );
            waiting.push(("AddressNotReleased".to_owned(), message));
        }
        (None, _) => {
            let message = format!("{address} belongs to node {node}, which has not taken it yet");
            waiting.push(("AddressNotTaken".to_owned(), message));
        }
    }
}

impl EgressStatus {
    fn first(&mut self, key: &Key, object: &EgressPolicy) -> u64 {
        let number = object.resource_version().and_then(|version| version.parse().ok());
        let current = Version {
            uid: object.uid(),
            generation: object.metadata.generation,
            number: number.unwrap_or(0),
        };
        let known = self.first.entry(key.clone()).or_insert_with(|| current.clone());
        if (&known.uid, known.generation) != (&current.uid, current.generation) {
            *known = current;
        }
        known.number
    }
}

/// The desired conditions of an egress policy. Nodes that know `version` know its rules.
fn egress_conditions(tables: &Tables, policy: &EgressPolicyRow, version: u64) -> Vec<Condition> {
    let object = &policy.object;
    let generation = object.metadata.generation;
    if let Some(why) = policy.row.refusal() {
        return vec![
            Condition::now("Accepted", false, "Refused", why, generation),
            Condition::now("Programmed", false, "NotAccepted", "see condition Accepted", generation),
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
        !policies.is_some_and(|policies| is_enforced(policies, object, version))
    });
    let behind: Vec<&str> = behind.map(|(key, _)| key.name.as_str()).collect();
    let counts = format!("applied on {} of {} nodes", nodes.len() - behind.len(), nodes.len());
    let programmed = if behind.is_empty() {
        Condition::now("Programmed", true, "AllNodes", &counts, generation)
    } else {
        let message = format!("{counts}; not on {}", listed(&behind));
        Condition::now("Programmed", false, "NodesMissing", &message, generation)
    };
    vec![
        Condition::now("Accepted", true, "Valid", "the policy is valid", generation),
        programmed,
    ]
}

/// Whether a node enforces an egress policy of a resource version. Versions are compared within the kind only: watches
/// of different kinds are not ordered among each other.
fn is_enforced(node: &PolicySummary, object: &EgressPolicy, version: u64) -> bool {
    let kind = PolicyKind::EgressPolicy.as_str();
    let seen = node.resource_versions.get(kind);
    let refused = node.refused.iter().any(|refused| {
        refused.kind == kind
            && Some(&refused.namespace) == object.metadata.namespace.as_ref()
            && Some(&refused.name) == object.metadata.name.as_ref()
    });
    // A namespace over its quota has no rules on the node.
    let namespace = object.metadata.namespace.as_deref();
    let closed = node.closed.iter().any(|closed| Some(&*closed.namespace) == namespace);
    node.programmed
        && !refused
        && !closed
        && seen
            .and_then(|seen| seen.parse::<u64>().ok())
            .is_some_and(|seen| seen >= version)
}

#[cfg(test)]
mod tests {
    use kni_api::node_network::RefusedPolicy;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_version_of_another_kind_proves_nothing() {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
            "metadata": {"namespace": "x", "name": "p"}, "spec": {"podSelector": {}},
        });
        let object: EgressPolicy = serde_json::from_value(object).unwrap();
        let mut node = PolicySummary {
            programmed: true,
            ..PolicySummary::default()
        };
        assert!(!is_enforced(&node, &object, 0), "the node has reported nothing");
        let versions = [("NetworkPolicy", "200"), ("EgressPolicy", "99")];
        node.resource_versions = versions
            .map(|(kind, version)| (kind.to_owned(), version.to_owned()))
            .into();
        assert!(!is_enforced(&node, &object, 100));
        assert!(is_enforced(&node, &object, 99));
        node.refused.push(RefusedPolicy {
            kind: "EgressPolicy".to_owned(),
            namespace: "x".to_owned(),
            name: "p".to_owned(),
            reason: "spec.zzz: unknown field".to_owned(),
        });
        assert!(!is_enforced(&node, &object, 99), "the node does not understand it");
    }
}
