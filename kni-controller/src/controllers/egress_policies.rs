//! Writes the status of egress policies: whether each is accepted, and applied on every node.

use std::collections::BTreeMap;

use kni_api::{Condition, EgressPolicy, EgressPolicyStatus, EgressPolicySummary, set_condition};
use kni_cluster::{Key, Networks, Tables};
use kni_crd::FromObject as _;
use kni_model::policy::Policy;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};

use super::{
    listed,
    reconcile::{Context, Reconciler, ignore_gone},
};

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
    type Write = EgressPolicyStatus;

    fn version(tables: &Tables) -> u64 {
        tables.egress_objects.version() + tables.node_networks.version() + tables.nodes.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, EgressPolicyStatus)> {
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
                writes.push((key.clone(), status));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, status: EgressPolicyStatus) -> kube::Result<()> {
        let api: Api<EgressPolicy> = Api::namespaced(context.client.clone(), &key.namespace);
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
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
        !policies.is_some_and(|policies| {
            // A namespace beyond its quota has no rules on the node.
            let namespace = object.metadata.namespace.as_deref();
            let is_closed = policies
                .closed
                .iter()
                .any(|closed| Some(&*closed.namespace) == namespace);
            !is_closed
                && policies.programmed
                && policies
                    .resource_version
                    .parse::<u64>()
                    .is_ok_and(|seen| seen >= version)
        })
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
