//! Checks the networks of a cluster. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Namespace;
use kni_api::{Condition, ConditionStatus, Fabric, PodNetwork};
use kube::{
    ResourceExt,
    core::{Selector, SelectorExt as _},
};

use super::Finding;

/// Conditions that hold for a network that works, with what an operator can do where one does not.
const CONDITIONS: [(&str, &str); 4] = [
    ("Accepted", "correct the field that the message names"),
    (
        "Ready",
        "remove the cause that the message names (kubectl describe podnetwork); pods that wait are attached then",
    ),
    ("Programmed", "see which nodes are missing: kubectl get nodenetworks"),
    ("AddressesAvailable", "add a subnet to the network, or remove pods"),
];

/// A cluster has exactly one default network.
pub(super) fn default_network(networks: &[PodNetwork]) -> Vec<Finding> {
    let defaults = networks.iter().filter(|network| network.spec.default);
    let names: Vec<String> = defaults.map(ResourceExt::name_any).collect();
    match names.as_slice() {
        [_] => Vec::new(),
        [] => vec![Finding::failure(
            "default network",
            "no network has spec.default: true, so pods without a network of their own cannot start",
            "kubectl apply -f deploy/examples/cluster/default.yaml",
        )],
        several => vec![Finding::failure(
            "default network",
            format!("{} all have spec.default: true", several.join(", ")),
            "keep one of them; the others must be made again without the field",
        )],
    }
}

/// Conditions of the networks that do not hold.
pub(super) fn conditions(networks: &[PodNetwork]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for network in networks {
        let object = format!("network {}", network.name_any());
        let Some(status) = &network.status else {
            let remedy = "see whether kni-controller runs: kubectl -n kni-system get deployment kni-controller";
            findings.push(Finding::failure(object, "nothing has reported its status yet", remedy));
            continue;
        };
        for (type_, remedy) in CONDITIONS {
            if let Some(problem) = lacking(&status.conditions, type_) {
                findings.push(Finding::failure(&object, problem, remedy));
            }
        }
        if let Some(problem) = lacking(&status.conditions, "AddressSpaceFree") {
            let native = [network.spec.fabric, status.fabric].contains(&Some(Fabric::Native));
            let remedy = "make another network whose subnets nothing else uses, and move the pods there";
            findings.push(if native || network.spec.default {
                Finding::failure(&object, problem, remedy)
            } else {
                Finding::warning(&object, problem, remedy)
            });
        }
        let exceeded = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == "BlocksExceeded");
        if let Some(found) = exceeded.filter(|found| found.status == ConditionStatus::True) {
            let problem = format!("BlocksExceeded is True ({}): {}", found.reason, found.message);
            let remedy =
                "see the log of the node's agent, and who else has its token; kubectl delete node releases the blocks";
            findings.push(Finding::failure(&object, problem, remedy));
        }
    }
    findings
}

/// The problem of a condition that should hold and does not.
pub(super) fn lacking(conditions: &[Condition], type_: &str) -> Option<String> {
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    if found.status == ConditionStatus::True {
        return None;
    }
    let status = if found.status == ConditionStatus::False {
        "False"
    } else {
        "Unknown"
    };
    Some(format!("{type_} is {status} ({}): {}", found.reason, found.message))
}

/// Selectors that select nothing, and namespaces that several networks select.
pub(super) fn selectors(networks: &[PodNetwork], namespaces: &[Namespace]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut selected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for network in networks {
        let Some(selector) = &network.spec.namespace_selector else {
            continue;
        };
        let object = format!("network {}", network.name_any());
        let Ok(selector) = Selector::try_from(selector.clone()) else {
            let remedy = "operators are In, NotIn, Exists and DoesNotExist";
            findings.push(Finding::failure(object, "spec.namespaceSelector is not valid", remedy));
            continue;
        };
        let matching = namespaces
            .iter()
            .filter(|namespace| selector.matches(namespace.labels()));
        let names: Vec<String> = matching.map(ResourceExt::name_any).collect();
        if names.is_empty() {
            let remedy = "label the namespaces that it is meant for, or correct the selector";
            findings.push(Finding::warning(
                object,
                "spec.namespaceSelector selects no namespace",
                remedy,
            ));
        }
        for name in names {
            selected.entry(name).or_default().push(network.name_any());
        }
    }
    for (namespace, networks) in selected.iter().filter(|(_, networks)| networks.len() > 1) {
        findings.push(Finding::warning(
            format!("namespace {namespace}"),
            format!(
                "networks {} all select it; the oldest of them has it",
                networks.join(", ")
            ),
            "make the selectors exclude each other",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::doctor::Severity;

    #[expect(clippy::needless_pass_by_value, reason = "the callers write the values in place")]
    fn network(name: &str, spec: Value, status: Value) -> PodNetwork {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": name},
            "spec": spec, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    #[expect(clippy::needless_pass_by_value, reason = "the callers write the values in place")]
    fn namespace(name: &str, labels: Value) -> Namespace {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    #[test]
    fn one_network_is_the_default() {
        let default = |name| network(name, json!({"default": true}), json!({}));
        assert_eq!(default_network(&[default("a"), network("b", json!({}), json!({}))]), []);
        assert!(default_network(&[])[0].problem.contains("no network"));
        assert!(
            default_network(&[default("a"), default("b")])[0]
                .problem
                .starts_with("a, b all")
        );
    }

    #[test]
    fn conditions_that_do_not_hold_are_told_with_reason_and_message() {
        let condition = |type_: &str, status: &str| {
            json!({"type": type_, "status": status, "reason": "Because", "message": "of this",
                   "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let good = json!({"conditions": [condition("Accepted", "True"), condition("InUse", "False")]});
        assert_eq!(conditions(&[network("a", json!({}), good)]), []);
        let within = json!({"conditions": [condition("BlocksExceeded", "False")]});
        assert_eq!(conditions(&[network("a", json!({}), within)]), []);
        let exceeded = json!({"conditions": [condition("BlocksExceeded", "True")]});
        let findings = conditions(&[network("a", json!({}), exceeded)]);
        assert_eq!(findings[0].problem, "BlocksExceeded is True (Because): of this");
        let met = json!({"conditions": [condition("AddressSpaceFree", "False")]});
        for (spec, severity) in [
            (json!({"default": true}), Severity::Failure),
            (json!({"fabric": "Native"}), Severity::Failure),
            (json!({}), Severity::Warning),
        ] {
            assert_eq!(conditions(&[network("a", spec, met.clone())])[0].severity, severity);
        }
        let bad = json!({"conditions": [condition("Accepted", "True"), condition("Ready", "Unknown")]});
        let findings = conditions(&[network("a", json!({}), bad)]);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].problem, "Ready is Unknown (Because): of this");
        assert!(
            conditions(&[network("a", json!({}), Value::Null)])[0]
                .problem
                .contains("status")
        );
    }

    #[test]
    fn selectors_select_something_and_nothing_twice() {
        let blue = json!({"namespaceSelector": {"matchLabels": {"tenant": "blue"}}});
        let any = json!({"namespaceSelector": {"matchExpressions": [{"key": "tenant", "operator": "Exists"}]}});
        let namespaces = [namespace("shop", json!({"tenant": "blue"}))];
        assert_eq!(selectors(&[network("a", blue.clone(), json!({}))], &namespaces), []);
        let findings = selectors(
            &[network("a", blue.clone(), json!({})), network("b", any, json!({}))],
            &namespaces,
        );
        assert_eq!(findings[0].object, "namespace shop");
        assert!(
            selectors(&[network("a", blue, json!({}))], &[])[0]
                .problem
                .contains("no namespace")
        );
    }
}
