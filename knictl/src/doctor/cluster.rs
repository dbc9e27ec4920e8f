//! Checks a cluster by its objects. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Namespace, Node, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kni_api::{
    AddressBlock, EgressAddressClaim, EgressAddressPool, EgressPolicy, NodeNetwork, PodInterface, PodNetwork,
    PodNetworkAttachment,
};
use kube::{
    ResourceExt,
    core::{PartialObjectMeta, Selector, SelectorExt as _},
};

use super::{
    Check, Finding, admission, blocks, controller, definitions, egress, egress_pools,
    foreign::{self, ForeignObjects},
    networks, reports,
};

/// The objects of a cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    /// When it was read.
    pub(crate) now: Timestamp,
    pub(crate) definitions: Vec<CustomResourceDefinition>,
    pub(crate) admission_policies: Vec<ValidatingAdmissionPolicy>,
    pub(crate) admission_bindings: Vec<ValidatingAdmissionPolicyBinding>,
    /// The Deployment of kni-controller, and the Lease of its replicas.
    pub(crate) controller: Option<Deployment>,
    pub(crate) lease: Option<Lease>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) namespaces: Vec<Namespace>,
    /// All pods; their metadata suffices, and is a tenth of the objects.
    pub(crate) pods: Vec<PartialObjectMeta<Pod>>,
    pub(crate) networks: Vec<PodNetwork>,
    pub(crate) blocks: Vec<AddressBlock>,
    pub(crate) attachments: Vec<PodNetworkAttachment>,
    pub(crate) egress_policies: Vec<EgressPolicy>,
    pub(crate) egress_pools: Vec<EgressAddressPool>,
    pub(crate) egress_claims: Vec<EgressAddressClaim>,
    pub(crate) interfaces: Vec<PodInterface>,
    pub(crate) node_networks: Vec<NodeNetwork>,
    /// Of kinds that KNI does not implement.
    pub(crate) foreign: Vec<ForeignObjects>,
}

/// The checks of a cluster.
pub(crate) fn checks(snapshot: &Snapshot) -> Vec<Check> {
    let mut checks = of_installation(snapshot);
    checks.extend(of_nodes(snapshot));
    checks.extend(of_networks(snapshot));
    checks.extend(of_pods(snapshot));
    checks
}

fn check(name: &str, title: &str, findings: Vec<Finding>) -> Check {
    Check::new("cluster", name, title, findings)
}

fn of_installation(snapshot: &Snapshot) -> Vec<Check> {
    let (deployment, lease) = (snapshot.controller.as_ref(), snapshot.lease.as_ref());
    let acts = match controller::holder(lease) {
        Some(holder) => format!("A replica of kni-controller acts: {holder}"),
        None => "A replica of kni-controller acts".to_owned(),
    };
    vec![
        check(
            "definitions",
            "The definitions of kni.dev are installed, with the fields of this version",
            definitions::compare(&kni_api::definitions(), &snapshot.definitions),
        ),
        check(
            "admission-policies",
            "The API server refuses what no tenant and no other node may write",
            admission::policies(&snapshot.admission_policies, &snapshot.admission_bindings),
        ),
        check("controller", &acts, controller::acts(deployment, lease, snapshot.now)),
    ]
}

fn of_nodes(snapshot: &Snapshot) -> Vec<Check> {
    let reports = &snapshot.node_networks;
    vec![
        check(
            "node-agents",
            "Every node has an agent that reports",
            reports::agents(&names(&snapshot.nodes), reports),
        ),
        check(
            "node-ready",
            "All agents attach pods, and nothing is degraded",
            reports::ready(reports),
        ),
        check(
            "agent-versions",
            "All agents have one version",
            reports::versions(reports),
        ),
        check(
            "node-state",
            "No agent has lost its state",
            reports::lost_state(reports),
        ),
        check(
            "node-addresses",
            "All networks have free addresses on every node",
            reports::used_up(reports),
        ),
        check(
            "address-conflicts",
            "No pod has an address of another node's block",
            reports::conflicts(reports),
        ),
        check(
            "number-conflicts",
            "Every node uses the numbers that networks have in the cluster",
            reports::number_conflicts(reports),
        ),
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
            "All AddressBlocks are in subnets of their networks",
            blocks::outside(&snapshot.blocks, all),
        ),
        check(
            "address-block-owners",
            "Networks and nodes of all AddressBlocks exist, and no two overlap",
            blocks::owners(&snapshot.blocks, all, &snapshot.nodes),
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
            "policy-quota",
            "The policies of every namespace are within its quota",
            reports::closed_namespaces(&snapshot.node_networks),
        ),
        check(
            "foreign-objects",
            "Every policy and gateway is of a kind that has an effect",
            foreign::without_effect(&snapshot.foreign),
        ),
        check(
            "egress-addresses",
            "Egress addresses are in pools that admit their policies",
            egress::addresses(&snapshot.egress_policies, &snapshot.egress_pools, &snapshot.namespaces),
        ),
        check(
            "egress-pools",
            "Pools of egress addresses are accepted, and namespaces may use them",
            egress_pools::pools(&snapshot.egress_pools, &snapshot.namespaces),
        ),
        check(
            "egress-claims",
            "The chosen nodes answer for all egress addresses in use",
            egress_pools::claims(&snapshot.egress_claims, snapshot.now),
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
                findings.push(Finding::failure(&object, problem, describe(&object)));
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
            Finding::failure(
                object,
                problem,
                "correct the field that the reason names; docs/design/policy.md lists what is supported",
            )
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
                findings.push(Finding::failure(&object, problem, describe(&object)));
            }
        }
    }
    findings
}

/// What to do about an object such as `egresspolicy shop/out` with a condition that does not hold.
fn describe(object: &str) -> String {
    let (kind, name) = object.split_once(' ').unwrap_or((object, ""));
    match name.split_once('/') {
        Some((namespace, name)) => {
            format!("remove the cause that the message names: kubectl -n {namespace} describe {kind} {name}")
        }
        None => format!("remove the cause that the message names: kubectl describe {kind} {name}"),
    }
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
mod tests;
