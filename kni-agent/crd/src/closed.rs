//! Derives a policy from an object that cannot be decoded: the selected pods are isolated, and nothing is allowed.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kni_model::{
    NetworkName,
    policy::{ExternalRules, Policy, PolicyKind, PolicyRef, PolicyScope, Selector},
};
use serde_json::Value;

use super::{labels::read_selector, multi_network_policy::read_networks};

/// The policy that stands for an object of a newer version of the API: it selects the pods that the object selects, or
/// all of the namespace where that is not clear, and allows nothing. `None` for an object without a name.
pub fn closed_policy(kind: PolicyKind, metadata: &ObjectMeta, spec: Option<&Value>) -> Option<Policy> {
    let namespace = metadata.namespace.clone()?;
    let names = || {
        let names = spec?.get("podNetworkNames")?.as_array()?.iter();
        let names: Option<BTreeSet<NetworkName>> = names.map(|name| name.as_str()?.parse().ok()).collect();
        names.filter(|names| !names.is_empty()).map(PolicyScope::Networks)
    };
    let scope = match kind {
        PolicyKind::NetworkPolicy => PolicyScope::Primary,
        PolicyKind::MultiNetworkPolicy => {
            read_networks(metadata, &namespace).map_or(PolicyScope::All, PolicyScope::Named)
        }
        PolicyKind::EgressPolicy => names().unwrap_or(PolicyScope::All),
    };
    let selector = || {
        let selector: LabelSelector = serde_json::from_value(spec?.get("podSelector")?.clone()).ok()?;
        read_selector("spec.podSelector", &selector).ok()
    };
    let external = matches!(kind, PolicyKind::EgressPolicy);
    Some(Policy {
        reference: PolicyRef {
            kind,
            namespace,
            name: metadata.name.clone()?,
        },
        scope,
        pods: selector().unwrap_or_else(Selector::default),
        ingress: (!external).then(Vec::new),
        egress: (!external).then(Vec::new),
        external: external.then(|| ExternalRules {
            rules: Vec::new(),
            otherwise_allow: false,
            egress_addresses: Vec::new(),
        }),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata() -> ObjectMeta {
        ObjectMeta {
            namespace: Some("x".to_owned()),
            name: Some("p".to_owned()),
            ..ObjectMeta::default()
        }
    }

    #[test]
    fn the_selected_pods_are_closed() {
        let spec = json!({"podSelector": {"matchLabels": {"app": "a"}}, "podNetworkNames": ["red"], "zzz": 1});
        let policy = closed_policy(PolicyKind::EgressPolicy, &metadata(), Some(&spec)).unwrap();
        let external = policy.external.unwrap();
        assert!(external.rules.is_empty() && !external.otherwise_allow);
        assert_eq!(policy.pods.requirements.len(), 1);
        assert_eq!(policy.scope, PolicyScope::Networks(["red".parse().unwrap()].into()));
        let policy = closed_policy(PolicyKind::NetworkPolicy, &metadata(), Some(&spec)).unwrap();
        assert_eq!((policy.ingress, policy.egress), (Some(vec![]), Some(vec![])));
    }

    #[test]
    fn where_the_selection_is_not_clear_all_pods_are_closed() {
        let spec = json!({"podSelector": {"matchFields": [{"operator": "Sometimes"}], "matchExpressions": 7}});
        let policy = closed_policy(PolicyKind::MultiNetworkPolicy, &metadata(), Some(&spec)).unwrap();
        assert_eq!((policy.pods, policy.scope), (Selector::default(), PolicyScope::All));
        assert!(closed_policy(PolicyKind::NetworkPolicy, &ObjectMeta::default(), None).is_none());
    }
}
