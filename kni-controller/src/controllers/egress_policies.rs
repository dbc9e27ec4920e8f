//! Writes the status of egress policies: whether each is accepted, and applied on every node.

use std::{collections::BTreeMap, sync::Arc};

use kni_api::{
    Condition, EgressPolicy, EgressPolicyStatus, EgressPolicySummary, node_network::PolicySummary, set_condition,
};
use kni_cluster::{Key, Networks, Tables};
use kni_crd::FromObject as _;
use kni_model::policy::{Policy, PolicyKind};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};

use super::{
    listed,
    reconcile::{Context, Reconciler, ignore_gone},
};
use crate::events::failed;

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
        tables.egress_objects.version() + tables.node_networks.version() + tables.nodes.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Self::Write)> {
        let objects = tables.egress_objects.rows();
        self.first.retain(|key, _| objects.contains_key(key));
        let mut writes = Vec::new();
        for (key, object) in objects {
            let version = self.first(key, object);
            let mut status = object.status.clone().unwrap_or_default();
            for condition in egress_conditions(tables, object, version) {
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
fn egress_conditions(tables: &Tables, object: &EgressPolicy, version: u64) -> Vec<Condition> {
    let generation = object.metadata.generation;
    if let Err(why) = Policy::from_object(object) {
        return vec![
            Condition::now("Accepted", false, "Refused", &why.to_string(), generation),
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

/// Whether a node enforces an egress policy of a resource version. Versions are compared within the kind only: watches of
/// different kinds are not ordered among each other.
fn is_enforced(node: &PolicySummary, object: &EgressPolicy, version: u64) -> bool {
    let kind = PolicyKind::EgressPolicy.as_str();
    // Agents of an earlier release report one version.
    let seen = node.resource_versions.get(kind).unwrap_or(&node.resource_version);
    let refused = node.refused.iter().any(|refused| {
        refused.kind == kind
            && Some(&refused.namespace) == object.metadata.namespace.as_ref()
            && Some(&refused.name) == object.metadata.name.as_ref()
    });
    // A namespace beyond its quota has no rules on the node.
    let namespace = object.metadata.namespace.as_deref();
    let closed = node.closed.iter().any(|closed| Some(&*closed.namespace) == namespace);
    node.programmed && !refused && !closed && seen.parse::<u64>().is_ok_and(|seen| seen >= version)
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
            resource_version: "200".to_owned(),
            ..PolicySummary::default()
        };
        assert!(is_enforced(&node, &object, 100), "an agent of an earlier release");
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
