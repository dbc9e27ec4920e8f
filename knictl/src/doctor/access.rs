//! Checks who may join networks, and what an upgrade to `spec.access` would refuse. Pure.

use std::collections::BTreeMap;

use kni_api::{
    PodNetwork,
    access_in_use::{InUse, Interface},
};
use kube::ResourceExt as _;

use super::{Check, Finding, cluster::Snapshot};

/// The check of an upgrade: what networks without `spec.access` would refuse to pods that run, were they started again.
pub(crate) fn upgrade(snapshot: &Snapshot) -> Check {
    let namespaces: BTreeMap<_, _> = snapshot
        .namespaces
        .iter()
        .map(|namespace| (namespace.name_any(), namespace.labels().clone()))
        .collect();
    let mut findings = Vec::new();
    for network in snapshot.networks.iter().filter(|network| network.spec.access.is_none()) {
        let found = in_use(snapshot, &network.name_any());
        let Some(access) = found.access(network, &namespaces) else {
            continue;
        };
        let text = serde_json::to_string(&access).unwrap_or_default();
        let remedy = format!(
            "kni-controller writes spec.access: {text} when it starts; write what is meant before, or correct it then"
        );
        let object = format!("network {}", network.name_any());
        for problem in problems(&found, network, &namespaces) {
            findings.push(Finding::warning(&object, problem, &remedy));
        }
    }
    Check::new(
        "cluster",
        "access-upgrade",
        "Networks without spec.access refuse nothing that is in use",
        findings,
    )
}

fn problems(
    found: &InUse,
    network: &PodNetwork,
    namespaces: &BTreeMap<String, BTreeMap<String, String>>,
) -> Vec<String> {
    let mut problems = Vec::new();
    for namespace in found.locked_out(network, namespaces) {
        problems.push(format!(
            "pods of namespace {namespace} have interfaces in it, and could not join again"
        ));
    }
    if !found.addresses.is_empty() {
        let addresses: Vec<&str> = found.addresses.iter().map(String::as_str).collect();
        problems.push(format!(
            "pods have chosen the addresses {}, and could not again",
            addresses.join(", ")
        ));
    }
    if found.mac {
        problems.push("pods have chosen MAC addresses, and could not again".to_owned());
    }
    if found.default_route {
        problems.push("interfaces beside the primary one have default routes, and could not again".to_owned());
    }
    problems
}

fn in_use(snapshot: &Snapshot, network: &str) -> InUse {
    let none = BTreeMap::new();
    let annotations: BTreeMap<_, _> = snapshot
        .pods
        .iter()
        .filter_map(|pod| Some((pod.metadata.uid.clone()?, pod.metadata.annotations.as_ref()?)))
        .collect();
    let namespaces: Vec<_> = snapshot
        .interfaces
        .iter()
        .filter(|row| row.spec.pod_network_name == network)
        .map(|row| (row, row.namespace().unwrap_or_default()))
        .collect();
    let interfaces = namespaces.iter().map(|(row, namespace)| Interface {
        namespace,
        name: &row.spec.interface_name,
        annotations: annotations.get(&row.spec.pod_uid).copied().unwrap_or(&none),
    });
    InUse::of(network, interfaces, &snapshot.attachments)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_upgrade_refuses_is_listed() {
        let network = |name: &str, spec: serde_json::Value| {
            serde_json::from_value(json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": name}, "spec": spec,
            }))
            .unwrap()
        };
        let interface = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
            "metadata": {"name": "web.eth0", "namespace": "shop"},
            "spec": {
                "podName": "web", "podUid": "u", "nodeName": "n1", "podNetworkName": "red", "interfaceName": "eth0",
                "sandboxId": "s",
            },
        }))
        .unwrap();
        let pod = serde_json::from_value(json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u", "annotations": {"kni.dev/ips": "10.0.0.7"}},
        }))
        .unwrap();
        let mut snapshot = Snapshot {
            namespaces: vec![serde_json::from_value(json!({"metadata": {"name": "shop"}})).unwrap()],
            pods: vec![pod],
            networks: vec![network("red", json!({})), network("blue", json!({}))],
            interfaces: vec![interface],
            ..Snapshot::default()
        };
        let found = upgrade(&snapshot);
        let problems: Vec<_> = found.findings.iter().map(|finding| finding.problem.as_str()).collect();
        assert_eq!(
            problems,
            [
                "pods of namespace shop have interfaces in it, and could not join again",
                "pods have chosen the addresses 10.0.0.7, and could not again",
            ]
        );
        assert!(found.findings[0].remedy.contains(r#""addressRanges":["10.0.0.7/32"]"#));
        snapshot.networks = vec![network("red", json!({"access": {"namespaces": {"from": "None"}}}))];
        assert_eq!(upgrade(&snapshot).findings, [], "who wrote access has decided");
    }
}
