//! Checks what agents report about their nodes: readiness, conflicts, lost state, used up addresses, quotas. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kni_api::{Condition, ConditionStatus, NodeNetwork};
use kube::ResourceExt;

use super::{Finding, networks::lacking};

fn find<'a>(report: &'a NodeNetwork, type_: &str, status: ConditionStatus) -> Option<&'a Condition> {
    let mut conditions = report.status.iter().flat_map(|status| &status.conditions);
    conditions.find(|condition| condition.type_ == type_ && condition.status == status)
}

/// Nodes without an agent that reports, and reports about nodes that are gone.
pub(super) fn agents(nodes: &[String], reports: &[NodeNetwork]) -> Vec<Finding> {
    let reporting: BTreeSet<String> = reports.iter().map(ResourceExt::name_any).collect();
    let mut findings = Vec::new();
    for node in nodes.iter().filter(|node| !reporting.contains(*node)) {
        let remedy = "see the agent's pod: kubectl -n kni-system get pods -o wide -l app.kubernetes.io/name=kni-agent";
        findings.push(Finding::failure(
            format!("node {node}"),
            "no agent reports from it",
            remedy,
        ));
    }
    for gone in reporting.iter().filter(|name| !nodes.contains(*name)) {
        let remedy = "kni-controller removes it when the node stays away";
        findings.push(Finding::warning(
            format!("nodenetwork {gone}"),
            "there is no such node",
            remedy,
        ));
    }
    findings
}

/// Agents that do not attach pods, or report problems.
pub(super) fn ready(reports: &[NodeNetwork]) -> Vec<Finding> {
    let remedy = "ask the agent: kubectl kni --node NODE status";
    let mut findings = Vec::new();
    for report in reports {
        let object = format!("node {}", report.name_any());
        let conditions = report.status.as_ref().map_or(&[][..], |status| &status.conditions);
        if let Some(problem) = lacking(conditions, "Ready") {
            findings.push(Finding::failure(&object, problem, remedy));
        } else if !conditions.iter().any(|condition| condition.type_ == "Ready") {
            findings.push(Finding::failure(
                &object,
                "its agent has not reported its state",
                remedy,
            ));
        }
        let degraded = conditions.iter().filter(|condition| condition.type_ == "Degraded");
        let degraded = degraded.filter(|condition| condition.status == ConditionStatus::True);
        findings.extend(degraded.map(|condition| Finding::warning(&object, condition.message.clone(), remedy)));
    }
    findings
}

/// The versions of the agents, where they differ.
pub(super) fn versions(reports: &[NodeNetwork]) -> Vec<Finding> {
    let mut nodes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for report in reports {
        if let Some(status) = &report.status {
            nodes.entry(&status.agent_version).or_default().push(report.name_any());
        }
    }
    if nodes.len() < 2 {
        return Vec::new();
    }
    let counts = nodes
        .iter()
        .map(|(version, nodes)| format!("{version} on {}", nodes.len()));
    let problem = format!(
        "versions and numbers of nodes: {}",
        counts.collect::<Vec<_>>().join(", ")
    );
    let remedy = "finish the upgrade: kubectl -n kni-system rollout status daemonset kni-agent";
    vec![Finding::warning("agents", problem, remedy)]
}

/// Nodes with pods that have addresses of another node's block.
pub(super) fn conflicts(reports: &[NodeNetwork]) -> Vec<Finding> {
    let conflicts = reports.iter().filter_map(|report| {
        let condition = find(report, "AddressConflict", ConditionStatus::True)?;
        Some(Finding::failure(
            format!("node {}", report.name_any()),
            condition.message.clone(),
            "delete the pods that it names: new ones get addresses of the node's own blocks",
        ))
    });
    conflicts.collect()
}

/// Nodes that use another number for a network than the cluster has given it, or none because two networks have it.
pub(super) fn number_conflicts(reports: &[NodeNetwork]) -> Vec<Finding> {
    let conflicts = reports.iter().filter_map(|report| {
        let condition = find(report, "NumberConflict", ConditionStatus::True)?;
        Some(Finding::failure(
            format!("node {}", report.name_any()),
            condition.message.clone(),
            "delete the node's pods in the network whose number has changed: the new number applies without them",
        ))
    });
    conflicts.collect()
}

/// Nodes whose agent has lost its state.
pub(super) fn lost_state(reports: &[NodeNetwork]) -> Vec<Finding> {
    let lost = reports.iter().filter_map(|report| {
        let condition = find(report, "StateLost", ConditionStatus::True)?;
        Some(Finding::warning(
            format!("node {}", report.name_any()),
            condition.message.clone(),
            "find out who changed the state directory; docs/troubleshooting.md, \"Lost or damaged state\"",
        ))
    });
    lost.collect()
}

/// Nodes where a network has no address left.
pub(super) fn used_up(reports: &[NodeNetwork]) -> Vec<Finding> {
    let used_up = reports.iter().filter_map(|report| {
        let condition = find(report, "AddressesAvailable", ConditionStatus::False)?;
        Some(Finding::warning(
            format!("node {}", report.name_any()),
            format!("{}: new pods wait, or go to other nodes", condition.message),
            "add a subnet to the network, or remove pods",
        ))
    });
    used_up.collect()
}

/// Namespaces whose policies exceed their quota, each once.
pub(super) fn closed_namespaces(reports: &[NodeNetwork]) -> Vec<Finding> {
    let mut nodes: BTreeMap<&str, (&str, Vec<String>)> = BTreeMap::new();
    for report in reports {
        for closed in report.status.iter().flat_map(|status| &status.policies.closed) {
            let entry = nodes.entry(&closed.namespace);
            entry.or_insert((&closed.reason, Vec::new())).1.push(report.name_any());
        }
    }
    let closed = nodes.into_iter().map(|(namespace, (reason, nodes))| {
        Finding::failure(
            format!("namespace {namespace}"),
            format!(
                "its policies allow nothing to the pods that they select, on {}: {reason}",
                nodes.join(", ")
            ),
            "give its policies fewer peers or ports, or raise --max-policy-rows-per-namespace",
        )
    });
    closed.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(name: &str, type_: &str, status: &str) -> NodeNetwork {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": name}, "spec": {},
            "status": {
                "conditions": [{"type": type_, "status": status, "reason": "Because", "message": "of this",
                                "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "policies": {"closed": [{"namespace": "shop", "reason": "300 of 256 rows"}]},
            },
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn conditions_that_should_not_hold_are_reported() {
        type Check = fn(&[NodeNetwork]) -> Vec<Finding>;
        let checks: [(Check, &str, &str, &str); 3] = [
            (conflicts, "AddressConflict", "True", "False"),
            (lost_state, "StateLost", "True", "False"),
            (used_up, "AddressesAvailable", "False", "True"),
        ];
        for (check, type_, bad, good) in checks {
            let findings = check(&[report("n1", type_, bad), report("n2", type_, good)]);
            assert_eq!(findings.len(), 1, "{type_}");
            assert_eq!(findings[0].object, "node n1");
            assert!(findings[0].problem.starts_with("of this"));
            assert_eq!(check(&[report("n1", "Ready", "Unknown")]), []);
        }
    }

    #[test]
    fn a_closed_namespace_is_named_once_with_its_nodes() {
        let findings = closed_namespaces(&[report("n1", "Ready", "True"), report("n2", "Ready", "True")]);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].object, "namespace shop");
        assert!(
            findings[0].problem.ends_with("on n1, n2: 300 of 256 rows"),
            "{}",
            findings[0].problem
        );
    }
}
