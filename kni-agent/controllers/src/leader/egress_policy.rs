//! Computes the status of an egress policy: whether it is accepted, and applied on every node.

use kni_api::Condition;

use super::listed;
use kni_cluster::{Key, Tables};

use crate::interfaces::condition;

/// The desired conditions of an egress policy; none if it is gone.
pub(super) fn egress_conditions(tables: &Tables, key: &Key) -> Vec<Condition> {
    let Some(row) = tables.egress_policies.rows().get(key) else {
        return Vec::new();
    };
    let generation = Some(row.generation);
    if let Err(why) = &row.policy {
        return vec![
            condition("Accepted", false, "Refused", &why.to_string(), generation),
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
    let counts = format!("applied on {} of {} nodes", nodes.len() - behind.len(), nodes.len());
    let programmed = if behind.is_empty() {
        condition("Programmed", true, "AllNodes", &counts, generation)
    } else {
        let message = format!("{counts}; not on {}", listed(&behind));
        condition("Programmed", false, "NodesMissing", &message, generation)
    };
    vec![
        condition("Accepted", true, "Valid", "the policy is valid", generation),
        programmed,
    ]
}
