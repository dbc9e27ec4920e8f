//! Checks a cluster by its objects. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::core::v1::{Namespace, Node, Pod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kni_api::{EgressAddressPool, EgressPolicy, NodeNetwork, PodInterface, PodNetwork, PodNetworkAttachment};
use kube::{
    ResourceExt,
    core::{PartialObjectMeta, Selector, SelectorExt as _},
};

use super::{Check, Finding, definitions, egress, networks};

/// The objects of a cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) definitions: Vec<CustomResourceDefinition>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) namespaces: Vec<Namespace>,
    /// All pods; their metadata suffices, and is a tenth of the objects.
    pub(crate) pods: Vec<PartialObjectMeta<Pod>>,
    pub(crate) networks: Vec<PodNetwork>,
    pub(crate) attachments: Vec<PodNetworkAttachment>,
    pub(crate) egress_policies: Vec<EgressPolicy>,
    pub(crate) egress_pools: Vec<EgressAddressPool>,
    pub(crate) interfaces: Vec<PodInterface>,
    pub(crate) node_networks: Vec<NodeNetwork>,
}

/// The checks of a cluster.
pub(crate) fn checks(snapshot: &Snapshot) -> Vec<Check> {
    let mut checks = of_nodes(snapshot);
    checks.extend(of_networks(snapshot));
    checks.extend(of_pods(snapshot));
    checks
}

fn check(name: &str, title: &str, findings: Vec<Finding>) -> Check {
    Check::new("cluster", name, title, findings)
}

fn of_nodes(snapshot: &Snapshot) -> Vec<Check> {
    let reports = &snapshot.node_networks;
    vec![
        check(
            "definitions",
            "The definitions of kni.dev are installed, with the fields of this version",
            definitions::compare(&kni_api::definitions(), &snapshot.definitions),
        ),
        check(
            "node-agents",
            "Every node has an agent that reports",
            agents(&names(&snapshot.nodes), reports),
        ),
        check(
            "node-ready",
            "All agents attach pods, and nothing is degraded",
            ready(reports),
        ),
        check("agent-versions", "All agents have one version", versions(reports)),
    ]
}

fn of_networks(snapshot: &Snapshot) -> Vec<Check> {
    let all = &snapshot.networks;
    vec![
        check(
            "default-network",
            "One network is the default",
            networks::default_network(all),
        ),
        check("network-conditions", "All networks work", networks::conditions(all)),
        check(
            "namespace-selectors",
            "Namespaces have the network that is meant for them",
            networks::selectors(all, &snapshot.namespaces),
        ),
        check(
            "address-blocks",
            "Every address block has one node",
            networks::blocks(all, &names(&snapshot.nodes)),
        ),
    ]
}

fn of_pods(snapshot: &Snapshot) -> Vec<Check> {
    let all = &snapshot.interfaces;
    vec![
        check(
            "attachments",
            "All PodNetworkAttachments select pods and a network",
            attachments(snapshot),
        ),
        check("policies", "All policies are enforced", policies(snapshot)),
        check(
            "egress-addresses",
            "Egress addresses are in pools that admit their policies",
            egress::addresses(&snapshot.egress_policies, &snapshot.egress_pools, &snapshot.namespaces),
        ),
        check(
            "interface-addresses",
            "No two interfaces of a network have one address",
            addresses(all),
        ),
        check(
            "interface-pods",
            "Every PodInterface belongs to a pod",
            left_behind(snapshot),
        ),
        check("interface-conditions", "All pod interfaces work", interfaces(all)),
    ]
}

fn names<K: ResourceExt>(objects: &[K]) -> Vec<String> {
    objects.iter().map(ResourceExt::name_any).collect()
}

fn agents(nodes: &[String], reports: &[NodeNetwork]) -> Vec<Finding> {
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

fn ready(reports: &[NodeNetwork]) -> Vec<Finding> {
    let remedy = "ask the agent: kubectl kni --node NODE status";
    let mut findings = Vec::new();
    for report in reports {
        let object = format!("node {}", report.name_any());
        let conditions = report.status.as_ref().map_or(&[][..], |status| &status.conditions);
        if let Some(problem) = networks::lacking(conditions, "Ready") {
            findings.push(Finding::failure(&object, problem, remedy));
        } else if !conditions.iter().any(|condition| condition.type_ == "Ready") {
            findings.push(Finding::failure(
                &object,
                "its agent has not reported its state",
                remedy,
            ));
        }
        let degraded = conditions.iter().filter(|condition| condition.type_ == "Degraded");
        let degraded = degraded.filter(|condition| condition.status == kni_api::ConditionStatus::True);
        findings.extend(degraded.map(|condition| Finding::warning(&object, condition.message.clone(), remedy)));
    }
    findings
}

fn versions(reports: &[NodeNetwork]) -> Vec<Finding> {
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

fn attachments(snapshot: &Snapshot) -> Vec<Finding> {
    let networks: BTreeSet<String> = snapshot.networks.iter().map(ResourceExt::name_any).collect();
    let mut findings = Vec::new();
    for attachment in &snapshot.attachments {
        let namespace = attachment.namespace().unwrap_or_default();
        let object = format!("podnetworkattachment {namespace}/{}", attachment.name_any());
        if !networks.contains(&attachment.spec.pod_network_name) {
            let problem = format!("network {} does not exist", attachment.spec.pod_network_name);
            findings.push(Finding::failure(
                &object,
                problem,
                "correct spec.podNetworkName, or make the network",
            ));
        }
        let conditions = attachment.status.as_ref().map_or(&[][..], |status| &status.conditions);
        for type_ in ["Accepted", "Ready"] {
            if let Some(problem) = networks::lacking(conditions, type_) {
                findings.push(Finding::failure(
                    &object,
                    problem,
                    "remove the cause that the message names",
                ));
            }
        }
        let Ok(selector) = Selector::try_from(attachment.spec.pod_selector.clone()) else {
            continue;
        };
        let mut pods = snapshot
            .pods
            .iter()
            .filter(|pod| pod.namespace().as_deref() == Some(&*namespace));
        if !pods.any(|pod| selector.matches(pod.labels())) {
            let remedy = "label the pods that it is meant for, or correct spec.podSelector";
            findings.push(Finding::warning(&object, "spec.podSelector selects no pod", remedy));
        }
    }
    findings
}

/// Policies that nodes refuse, each once, and egress policies whose conditions do not hold.
fn policies(snapshot: &Snapshot) -> Vec<Finding> {
    let mut nodes: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for report in &snapshot.node_networks {
        let refused = report.status.iter().flat_map(|status| &status.policies.refused);
        for policy in refused {
            let object = format!("{} {}/{}", policy.kind.to_lowercase(), policy.namespace, policy.name);
            nodes
                .entry((object, policy.reason.clone()))
                .or_default()
                .push(report.name_any());
        }
    }
    let mut findings: Vec<Finding> = nodes
        .into_iter()
        .map(|((object, reason), nodes)| {
            let problem = format!("not enforced on {}: {reason}", nodes.join(", "));
            Finding::failure(object, problem, "correct the policy")
        })
        .collect();
    for policy in &snapshot.egress_policies {
        let object = format!(
            "egresspolicy {}/{}",
            policy.namespace().unwrap_or_default(),
            policy.name_any()
        );
        let conditions = policy.status.as_ref().map_or(&[][..], |status| &status.conditions);
        for type_ in ["Accepted", "Programmed"] {
            if let Some(problem) = networks::lacking(conditions, type_) {
                findings.push(Finding::failure(
                    &object,
                    problem,
                    "remove the cause that the message names",
                ));
            }
        }
    }
    findings
}

fn addresses(interfaces: &[PodInterface]) -> Vec<Finding> {
    let mut owners: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for interface in interfaces {
        let owner = format!("{}/{}", interface.namespace().unwrap_or_default(), interface.name_any());
        for address in interface.status.iter().flat_map(|status| &status.addresses) {
            let key = (interface.spec.pod_network_name.as_str(), address.ip.as_str());
            owners.entry(key).or_default().push(owner.clone());
        }
    }
    let twice = owners.iter().filter(|(_, owners)| owners.len() > 1);
    twice
        .map(|((network, address), owners)| {
            let problem = format!("{address} belongs to podinterfaces {}", owners.join(", "));
            let remedy = "delete the pod whose node does not have the address's block";
            Finding::failure(format!("network {network}"), problem, remedy)
        })
        .collect()
}

/// Interfaces whose pod is gone, or was replaced by a pod of the same name.
fn left_behind(snapshot: &Snapshot) -> Vec<Finding> {
    let uids: BTreeSet<String> = snapshot.pods.iter().filter_map(ResourceExt::uid).collect();
    let strays = snapshot
        .interfaces
        .iter()
        .filter(|interface| !uids.contains(&interface.spec.pod_uid));
    strays
        .map(|interface| {
            let object = format!(
                "podinterface {}/{}",
                interface.namespace().unwrap_or_default(),
                interface.name_any()
            );
            let problem = format!(
                "pod {} with uid {} does not exist",
                interface.spec.pod_name, interface.spec.pod_uid
            );
            let remedy = format!(
                "see whether the agent of node {} runs: it removes the object",
                interface.spec.node_name
            );
            Finding::warning(object, problem, remedy)
        })
        .collect()
}

fn interfaces(interfaces: &[PodInterface]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for interface in interfaces {
        let object = format!(
            "podinterface {}/{}",
            interface.namespace().unwrap_or_default(),
            interface.name_any()
        );
        let conditions = interface.status.as_ref().map_or(&[][..], |status| &status.conditions);
        for condition in conditions {
            if let Some(problem) = networks::lacking(conditions, &condition.type_) {
                let remedy = format!(
                    "ask its node: kubectl kni --node {} interfaces",
                    interface.spec.node_name
                );
                findings.push(Finding::failure(&object, problem, remedy));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "the callers write the values in place")]
    fn object<K: DeserializeOwned>(kind: &str, metadata: Value, spec: Value, status: Value) -> K {
        serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    fn condition(type_: &str, status: &str) -> Value {
        json!({"type": type_, "status": status, "reason": "Because", "message": "of this",
               "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    fn interface(name: &str, uid: &str, address: &str) -> PodInterface {
        object(
            "PodInterface",
            json!({"name": name, "namespace": "shop"}),
            json!({"podName": "web", "podUid": uid, "nodeName": "n1", "podNetworkName": "blue",
                   "interfaceName": "eth0", "sandboxId": "s"}),
            json!({"addresses": [{"ip": address, "family": "IPv4"}], "conditions": [condition("Ready", "True")]}),
        )
    }

    fn report(name: &str) -> NodeNetwork {
        let status =
            json!({"agentVersion": "1", "conditions": [condition("Ready", "True"), condition("Degraded", "False")]});
        object("NodeNetwork", json!({"name": name}), json!({}), status)
    }

    fn healthy() -> Snapshot {
        let mut definitions = kni_api::definitions().to_vec();
        for definition in &mut definitions {
            let status = json!({"conditions": [{"type": "Established", "status": "True"}],
                                "acceptedNames": {"kind": "x", "plural": "x"}, "storedVersions": ["v1alpha1"]});
            definition.status = Some(serde_json::from_value(status).unwrap());
        }
        let pod = json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "web"}}});
        let fine = json!({"conditions": [condition("Accepted", "True"), condition("Ready", "True")]});
        Snapshot {
            definitions,
            nodes: vec![serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap()],
            namespaces: vec![serde_json::from_value(json!({"metadata": {"name": "shop"}})).unwrap()],
            pods: vec![serde_json::from_value(pod).unwrap()],
            networks: vec![object(
                "PodNetwork",
                json!({"name": "blue"}),
                json!({"default": true}),
                fine.clone(),
            )],
            attachments: vec![object(
                "PodNetworkAttachment",
                json!({"name": "extra", "namespace": "shop"}),
                json!({"podNetworkName": "blue", "podSelector": {"matchLabels": {"app": "web"}}, "interfaceName": "net1"}),
                fine.clone(),
            )],
            egress_policies: vec![object(
                "EgressPolicy",
                json!({"name": "out", "namespace": "shop"}),
                json!({"podSelector": {}}),
                fine,
            )],
            egress_pools: Vec::new(),
            interfaces: vec![interface("web.eth0", "u1", "10.0.0.1")],
            node_networks: vec![report("n1")],
        }
    }

    /// Names of the checks that found something.
    fn found(snapshot: &Snapshot) -> Vec<String> {
        let checks = checks(snapshot).into_iter();
        checks
            .filter(|check| !check.findings.is_empty())
            .map(|check| check.name)
            .collect()
    }

    #[test]
    fn a_healthy_cluster_passes_everything() {
        assert_eq!(found(&healthy()), Vec::<String>::new());
    }

    #[test]
    fn each_check_finds_its_problem_and_no_other() {
        type Damage = fn(&mut Snapshot);
        let cases: [(&str, Damage); 14] = [
            ("definitions", |s| s.definitions.truncate(1)),
            ("node-agents", |s| s.node_networks.clear()),
            ("node-agents", |s| s.node_networks.push(report("gone"))),
            ("node-ready", |s| {
                s.node_networks[0].status.as_mut().unwrap().conditions.clear();
            }),
            ("node-ready", |s| {
                s.node_networks[0].status.as_mut().unwrap().conditions[1].status = kni_api::ConditionStatus::True;
            }),
            ("agent-versions", |s| {
                s.nodes
                    .push(serde_json::from_value(json!({"metadata": {"name": "n2"}})).unwrap());
                let mut other = report("n2");
                other.status.as_mut().unwrap().agent_version = "2".to_owned();
                s.node_networks.push(other);
            }),
            ("default-network", |s| s.networks[0].spec.default = false),
            ("network-conditions", |s| s.networks[0].status = None),
            ("namespace-selectors", |s| {
                s.networks[0].spec.namespace_selector =
                    serde_json::from_value(json!({"matchLabels": {"a": "b"}})).unwrap();
            }),
            ("attachments", |s| {
                s.attachments[0].spec.pod_network_name = "none".to_owned();
            }),
            ("attachments", |s| {
                let status = json!({"conditions": [condition("Accepted", "False")]});
                s.attachments[0].status = serde_json::from_value(status).unwrap();
            }),
            ("policies", |s| {
                let refused = json!([{"kind": "NetworkPolicy", "namespace": "shop", "name": "p", "reason": "r"}]);
                let status = s.node_networks[0].status.as_mut().unwrap();
                status.policies.refused = serde_json::from_value(refused).unwrap();
            }),
            ("interface-addresses", |s| {
                s.interfaces.push(interface("web2.eth0", "u1", "10.0.0.1"));
            }),
            ("interface-pods", |s| s.interfaces[0].spec.pod_uid = "u2".to_owned()),
        ];
        for (name, damage) in cases {
            let mut snapshot = healthy();
            damage(&mut snapshot);
            assert_eq!(found(&snapshot), [name]);
        }
        let mut snapshot = healthy();
        snapshot.interfaces[0].status.as_mut().unwrap().conditions[0].status = kni_api::ConditionStatus::False;
        assert_eq!(found(&snapshot), ["interface-conditions"]);
    }
}
