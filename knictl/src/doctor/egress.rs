//! Checks egress addresses against the pools, also before the agents that demand pools are installed. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Namespace;
use kni_api::{EgressAddressPool, EgressPolicy};
use kube::ResourceExt;

use super::Finding;

/// Addresses of policies that are in no pool, or in one that does not admit their namespace.
pub(super) fn addresses(
    policies: &[EgressPolicy],
    pools: &[EgressAddressPool],
    namespaces: &[Namespace],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for policy in policies {
        let namespace = policy.namespace().unwrap_or_default();
        let object = format!("egresspolicy {namespace}/{}", policy.name_any());
        let addresses = policy.spec.egress_addresses.iter();
        for address in addresses.filter_map(|text| text.parse::<IpAddr>().ok()) {
            let length = if address.is_ipv4() { 32 } else { 128 };
            let Some(pool) = pools.iter().find(|pool| has(pool, address)) else {
                let problem = format!("{address} is in no EgressAddressPool: its pods do not leave");
                let remedy = format!(
                    "write a pool with {address}/{length} that admits namespace {namespace}, before the agents are updated"
                );
                findings.push(Finding::failure(&object, problem, remedy));
                continue;
            };
            let labels = namespaces
                .iter()
                .find(|other| other.name_any() == namespace)
                .map(ResourceExt::labels);
            if !labels.is_some_and(|labels| pool.spec.access.namespaces.admits(labels)) {
                let pool = pool.name_any();
                let problem = format!("{address} is in EgressAddressPool {pool}, which does not admit the namespace");
                let remedy = format!("let spec.access.namespaces of pool {pool} admit namespace {namespace}");
                findings.push(Finding::failure(&object, problem, remedy));
            }
        }
    }
    findings
}

fn has(pool: &EgressAddressPool, address: IpAddr) -> bool {
    let mut ranges = pool.spec.ranges.iter().filter_map(|range| range.parse::<IpNet>().ok());
    ranges.any(|range| range.contains(&address))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_need_a_pool_that_admits_their_namespace() {
        let policy = |namespace: &str, address: &str| -> EgressPolicy {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
                "metadata": { "name": "p", "namespace": namespace },
                "spec": { "podSelector": {}, "egressAddresses": [address] },
            });
            serde_json::from_value(object).unwrap()
        };
        let pool: EgressAddressPool = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressPool", "metadata": { "name": "mail" },
            "spec": { "ranges": ["192.0.2.0/28"], "access": { "namespaces": {
                "from": "Selected", "selector": { "matchLabels": { "kubernetes.io/metadata.name": "red" } },
            } } },
        }))
        .unwrap();
        let namespaces = ["red", "blue"].map(|name| -> Namespace {
            let labels = json!({ "kubernetes.io/metadata.name": name });
            serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } })).unwrap()
        });
        let problems = |policies: &[EgressPolicy]| -> Vec<String> {
            let findings = addresses(policies, std::slice::from_ref(&pool), &namespaces);
            findings.into_iter().map(|finding| finding.problem).collect()
        };
        assert!(problems(&[policy("red", "192.0.2.2")]).is_empty());
        assert_eq!(
            problems(&[policy("blue", "192.0.2.2"), policy("red", "2001:db8::1")]),
            [
                "192.0.2.2 is in EgressAddressPool mail, which does not admit the namespace",
                "2001:db8::1 is in no EgressAddressPool: its pods do not leave"
            ]
        );
    }
}
