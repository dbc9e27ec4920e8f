//! Compares `AddressBlock`s with networks, nodes and the list of blocks in the status of networks. Pure.

use std::collections::BTreeMap;

use ipnet::IpNet;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kni_api::{AddressBlock, PodNetwork};
use kube::{Resource, ResourceExt};

use super::Finding;

/// Blocks whose network or node is gone, or has been made again, and blocks that overlap.
pub(super) fn owners(blocks: &[AddressBlock], networks: &[PodNetwork], nodes: &[Node]) -> Vec<Finding> {
    let (networks, nodes) = (uids(networks), uids(nodes));
    let mut findings = Vec::new();
    for block in blocks {
        let spec = &block.spec;
        let object = format!("addressblock {}", block.name_any());
        let known = |problem: Option<String>, remedy: &str| problem.map(|text| Finding::warning(&object, text, remedy));
        findings.extend(known(
            gone("network", &spec.network, &spec.network_uid, &networks),
            "the agent of its node releases it with the last pod that has an address of it; if the node is gone, \
             kni-controller does",
        ));
        findings.extend(known(
            gone("node", &spec.node_name, &spec.node_uid, &nodes),
            "kni-controller deletes blocks of a node that is gone a minute after its last pod; an agent with the node's \
             name releases it with the last address in use",
        ));
    }
    findings.extend(overlaps(blocks));
    findings
}

fn uids<K: Resource<DynamicType = ()>>(objects: &[K]) -> BTreeMap<String, String> {
    let uid = |meta: &ObjectMeta| meta.uid.clone().unwrap_or_default();
    objects
        .iter()
        .map(|object| (object.name_any(), uid(object.meta())))
        .collect()
}

fn gone(what: &str, name: &str, uid: &str, known: &BTreeMap<String, String>) -> Option<String> {
    match known.get(name) {
        None => Some(format!("{what} {name} does not exist")),
        Some(other) if other != uid => Some(format!("it belongs to an earlier {what} {name}, with uid {uid}")),
        Some(_) => None,
    }
}

/// Blocks of one network that share addresses. Ranges in CIDR notation are disjoint, or one contains the other.
fn overlaps(blocks: &[AddressBlock]) -> Vec<Finding> {
    let mut rows: Vec<(&str, IpNet, &AddressBlock)> = blocks
        .iter()
        .filter_map(|block| Some((block.spec.network.as_str(), block.spec.cidr.parse().ok()?, block)))
        .collect();
    rows.sort_by(|one, other| (one.0, one.1).cmp(&(other.0, other.1)));
    let mut findings = Vec::new();
    let mut outer: Option<(&str, IpNet, &AddressBlock)> = None;
    for row in rows {
        match outer {
            Some((network, range, block)) if network == row.0 && range.contains(&row.1) => {
                let problem = format!(
                    "it overlaps block {}: {range} of node {}, {} of node {}",
                    row.2.name_any(),
                    block.spec.node_name,
                    row.1,
                    row.2.spec.node_name
                );
                let remedy =
                    "delete the pods of the network on one of the two nodes: its agent then releases the block";
                findings.push(Finding::failure(
                    format!("addressblock {}", block.name_any()),
                    problem,
                    remedy,
                ));
            }
            Some(_) | None => outer = Some(row),
        }
    }
    findings
}

/// Blocks that are in none of the subnets of their network.
pub(super) fn outside(blocks: &[AddressBlock], networks: &[PodNetwork]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for block in blocks {
        let spec = &block.spec;
        let network = networks
            .iter()
            .find(|network| network.uid().as_ref() == Some(&spec.network_uid));
        let (Some(network), Ok(range)) = (network, spec.cidr.parse::<IpNet>()) else {
            continue;
        };
        let mut subnets = network
            .spec
            .subnets
            .iter()
            .filter_map(|subnet| subnet.parse::<IpNet>().ok());
        if !subnets.any(|subnet| subnet.contains(&range)) {
            findings.push(Finding::failure(
                format!("addressblock {}", block.name_any()),
                format!(
                    "{range} of node {} is in no subnet of network {}",
                    spec.node_name, spec.network
                ),
                "add the subnet again, or remove the node's pods of this network",
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::doctor::Severity;

    fn block(cidr: &str, node: (&str, &str), network_uid: &str) -> AddressBlock {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock",
            "metadata": {"name": format!("blue.{cidr}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"network": "blue", "networkUID": network_uid, "cidr": cidr, "nodeName": node.0, "nodeUID": node.1},
        });
        serde_json::from_value(object).unwrap()
    }

    fn network() -> PodNetwork {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": "blue", "uid": "b1"},
            "spec": {},
        });
        serde_json::from_value(object).unwrap()
    }

    fn node(name: &str, uid: &str) -> Node {
        serde_json::from_value(json!({"metadata": {"name": name, "uid": uid}})).unwrap()
    }

    #[test]
    fn blocks_outlive_their_owners_and_overlap() {
        let (networks, nodes) = ([network()], [node("n1", "u1"), node("n2", "u2")]);
        let found = |blocks: &[AddressBlock]| -> Vec<(Severity, String)> {
            let findings = owners(blocks, &networks, &nodes).into_iter();
            findings.map(|finding| (finding.severity, finding.problem)).collect()
        };
        let fine = block("10.0.0.0/26", ("n1", "u1"), "b1");
        assert_eq!(found(&[fine.clone(), block("10.0.0.64/26", ("n2", "u2"), "b1")]), []);
        let texts = |blocks: &[AddressBlock]| found(blocks).into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(
            texts(&[block("10.0.0.0/26", ("n3", "u3"), "b1")]),
            ["node n3 does not exist"]
        );
        assert_eq!(
            texts(&[block("10.0.0.0/26", ("n1", "u9"), "b0")]),
            [
                "it belongs to an earlier network blue, with uid b0",
                "it belongs to an earlier node n1, with uid u9"
            ]
        );
        let wide = block("10.0.0.0/24", ("n2", "u2"), "b1");
        let third = block("10.0.0.128/26", ("n1", "u1"), "b1");
        let found = found(&[third, fine, wide]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(
            found[0],
            (
                Severity::Failure,
                "it overlaps block blue.10.0.0.0/26: 10.0.0.0/24 of node n2, 10.0.0.0/26 of node n1".to_owned()
            )
        );
    }

    #[test]
    fn blocks_are_in_subnets_of_their_networks() {
        let mut blue = network();
        blue.spec.subnets = vec!["10.0.0.0/24".to_owned()];
        let found = |cidr: &str, uid: &str| outside(&[block(cidr, ("n1", "u1"), uid)], std::slice::from_ref(&blue));
        assert_eq!(found("10.0.0.64/26", "b1"), []);
        assert_eq!(found("10.0.9.0/26", "b0"), [], "it is a block of an earlier network");
        assert_eq!(
            found("10.0.9.0/26", "b1")[0].problem,
            "10.0.9.0/26 of node n1 is in no subnet of network blue"
        );
    }
}
