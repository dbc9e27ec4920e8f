//! Checks pools of egress addresses, and the nodes that answer for the addresses. Pure.

use ipnet::IpNet;
use k8s_openapi::{api::core::v1::Namespace, jiff::Timestamp};
use kni_api::{EgressAddressClaim, EgressAddressPool};
use kube::ResourceExt as _;

use super::{Finding, networks::lacking};

/// A node confirms a claim within seconds; one that takes longer than this is reported, in seconds.
const CONFIRMED: i64 = 120;

/// Pools that overlap an older one or each other, that are refused, or that admit no namespace.
pub(super) fn pools(pools: &[EgressAddressPool], namespaces: &[Namespace]) -> Vec<Finding> {
    let mut sorted: Vec<&EgressAddressPool> = pools.iter().collect();
    sorted.sort_by_key(|pool| (pool.metadata.creation_timestamp.clone(), pool.name_any()));
    let mut findings = Vec::new();
    for (index, pool) in sorted.iter().enumerate() {
        let object = format!("egressaddresspool {}", pool.name_any());
        let mut older = sorted.iter().take(index);
        let overlap = older.find_map(|older| Some((older.name_any(), overlap(pool, older)?)));
        let conditions = pool.status.as_ref().map_or(&[][..], |status| &status.conditions);
        if let Some((older, (range, other))) = overlap {
            findings.push(Finding::failure(
                &object,
                format!("its range {range} overlaps {other} of the older pool {older}: no address of it is used"),
                format!("remove the addresses of pool {older} from spec.ranges"),
            ));
        } else if let Some(problem) = lacking(conditions, "Accepted") {
            findings.push(Finding::failure(
                &object,
                problem,
                "correct the ranges that the message names: kubectl edit egressaddresspool",
            ));
        }
        let access = &pool.spec.access.namespaces;
        if !namespaces.iter().any(|namespace| access.admits(namespace.labels())) {
            let remedy = "let spec.access.namespaces admit the namespaces that it is meant for, or label them";
            findings.push(Finding::warning(&object, "no namespace may use it", remedy));
        }
    }
    findings
}

/// The first ranges of two pools with an address in common.
fn overlap(one: &EgressAddressPool, other: &EgressAddressPool) -> Option<(IpNet, IpNet)> {
    let ranges = |pool: &EgressAddressPool| -> Vec<IpNet> {
        pool.spec.ranges.iter().filter_map(|range| range.parse().ok()).collect()
    };
    let others = ranges(other);
    ranges(one).into_iter().find_map(|range| {
        let found = others
            .iter()
            .find(|other| range.contains(*other) || other.contains(&range));
        found.map(|other| (range, *other))
    })
}

/// Claims without a holder, claims that another node than the chosen one holds, and holders that cannot use the
/// address.
pub(super) fn claims(claims: &[EgressAddressClaim], now: Timestamp) -> Vec<Finding> {
    let mut findings = Vec::new();
    for claim in claims {
        let meta = &claim.metadata;
        let since = meta.deletion_timestamp.as_ref().or(meta.creation_timestamp.as_ref());
        if since.is_some_and(|since| now.as_second() - since.0.as_second() < CONFIRMED) {
            continue;
        }
        let (object, node) = (
            format!("egressaddressclaim {}", claim.name_any()),
            &claim.spec.node_name,
        );
        let status = claim.status.as_ref();
        let holder = status.and_then(|status| status.holder.as_ref());
        let conditions = status.map_or(&[][..], |status| &status.conditions);
        match holder {
            Some(holder) if meta.deletion_timestamp.is_some() || holder.node_name != *node => {
                let holder = &holder.node_name;
                let waits = if meta.deletion_timestamp.is_some() {
                    "it is deleted".to_owned()
                } else {
                    format!("node {node} is to answer for it")
                };
                findings.push(Finding::failure(
                    object,
                    format!("{waits}, and node {holder} has not released it"),
                    format!(
                        "see the agent of node {holder}; once the node is certainly off: kubectl taint node {holder} \
                         node.kubernetes.io/out-of-service=:NoExecute"
                    ),
                ));
            }
            Some(_) => {
                if let Some(problem) = lacking(conditions, "Ready") {
                    let remedy = format!(
                        "remove the cause that the message names, on node {node}: kubectl kni --node {node} status; pods do not \
                         leave with the address until then"
                    );
                    findings.push(Finding::failure(object, problem, remedy));
                }
            }
            None => findings.push(Finding::failure(
                object,
                format!("no node holds it: the agent of node {node} has not confirmed it"),
                format!("see the agent of node {node}: kubectl kni --node {node} status"),
            )),
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::doctor::Severity;

    fn pool(name: &str, minute: u8, ranges: &[&str], from: &str) -> EgressAddressPool {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressPool",
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:{minute:02}:00Z")},
            "spec": {"ranges": ranges, "access": {"namespaces": {"from": from}}},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn pools_are_apart_and_admit_namespaces() {
        let namespaces = [serde_json::from_value(json!({"metadata": {"name": "shop"}})).unwrap()];
        let old = pool("z-old", 1, &["192.0.2.0/28"], "All");
        assert_eq!(
            pools(&[pool("other", 2, &["192.0.2.16/28"], "All"), old.clone()], &namespaces),
            []
        );
        let findings = pools(
            &[pool("new", 2, &["2001:db8::/64", "192.0.2.8/32"], "All"), old.clone()],
            &namespaces,
        );
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].object, "egressaddresspool new");
        assert!(
            findings[0]
                .problem
                .contains("192.0.2.8/32 overlaps 192.0.2.0/28 of the older pool z-old")
        );
        let findings = pools(&[pool("none", 2, &["192.0.2.16/28"], "None")], &namespaces);
        assert_eq!((findings.len(), findings[0].severity), (1, Severity::Warning));
        let mut refused = old;
        let condition = json!({"type": "Accepted", "status": "False", "reason": "Refused", "message": "bad",
                               "lastTransitionTime": "2026-01-01T00:00:00Z"});
        refused.status = serde_json::from_value(json!({"conditions": [condition]})).unwrap();
        assert_eq!(
            pools(&[refused], &namespaces)[0].problem,
            "Accepted is False (Refused): bad"
        );
    }

    #[test]
    fn claims_are_held_by_the_chosen_node() {
        let later: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        let claim = |status: Value| -> EgressAddressClaim {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressClaim",
                "metadata": {"name": "192.0.2.1", "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"address": "192.0.2.1", "nodeName": "n1", "nodeUid": "u1", "epoch": 1},
                "status": status,
            });
            serde_json::from_value(object).unwrap()
        };
        let holder = |node: &str| json!({"nodeName": node, "nodeUid": "u", "epoch": 1});
        let ready = |status: &str| {
            json!({"type": "Ready", "status": status, "reason": "R", "message": "m",
                   "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let problems = |claim: EgressAddressClaim| -> Vec<String> {
            claims(&[claim], later)
                .into_iter()
                .map(|finding| finding.problem)
                .collect()
        };
        let fine = json!({"holder": holder("n1"), "conditions": [ready("True")]});
        assert!(problems(claim(fine.clone())).is_empty());
        assert_eq!(
            problems(claim(json!({}))),
            ["no node holds it: the agent of node n1 has not confirmed it"]
        );
        assert_eq!(
            problems(claim(json!({"holder": holder("n2")}))),
            ["node n1 is to answer for it, and node n2 has not released it"]
        );
        let broken = json!({"holder": holder("n1"), "conditions": [ready("False")]});
        assert_eq!(problems(claim(broken)), ["Ready is False (R): m"]);
        let mut deleted = claim(fine);
        deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
        assert_eq!(problems(deleted), ["it is deleted, and node n1 has not released it"]);
        let soon: Timestamp = "2026-01-01T00:00:30Z".parse().unwrap();
        assert_eq!(claims(&[claim(json!({}))], soon), []);
    }
}
