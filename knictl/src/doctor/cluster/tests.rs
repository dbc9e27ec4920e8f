//! Tests that each check finds its problem, and no other.

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

fn block(node_uid: &str) -> AddressBlock {
    let spec =
        json!({"network": "blue", "networkUID": "b1", "cidr": "10.0.0.0/26", "nodeName": "n1", "nodeUID": node_uid});
    object(
        "AddressBlock",
        json!({"name": "blue.v4-10-0-0-0-26"}),
        spec,
        Value::Null,
    )
}

fn pool(from: &str) -> EgressAddressPool {
    let spec = json!({"ranges": ["192.0.2.0/28"], "access": {"namespaces": {"from": from}}});
    object("EgressAddressPool", json!({"name": "mail"}), spec, Value::Null)
}

fn claim(holder: Option<&str>) -> EgressAddressClaim {
    let holder = holder.map(|node| json!({"nodeName": node, "nodeUid": "u1", "epoch": 1}));
    let spec = json!({"address": "192.0.2.1", "nodeName": "n1", "nodeUid": "u1", "epoch": 1});
    object(
        "EgressAddressClaim",
        json!({"name": "192.0.2.1"}),
        spec,
        json!({"holder": holder}),
    )
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
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
    Snapshot {
        now,
        definitions,
        admission_policies: admission::shipped("ValidatingAdmissionPolicy"),
        admission_bindings: admission::shipped("ValidatingAdmissionPolicyBinding"),
        controller: Some(
            serde_json::from_value(json!({
                "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"availableReplicas": 2},
            }))
            .unwrap(),
        ),
        lease: Some(
            serde_json::from_value(json!({
                "spec": {"holderIdentity": "a_1", "renewTime": "2026-01-01T00:09:58.000000Z"},
            }))
            .unwrap(),
        ),
        nodes: vec![serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "u1"}})).unwrap()],
        namespaces: vec![serde_json::from_value(json!({"metadata": {"name": "shop"}})).unwrap()],
        pods: vec![serde_json::from_value(pod).unwrap()],
        blocks: vec![block("u1")],
        networks: vec![object(
            "PodNetwork",
            json!({"name": "blue", "uid": "b1"}),
            json!({"default": true, "subnets": ["10.0.0.0/24"]}),
            json!({"conditions": fine["conditions"]}),
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
        egress_pools: vec![pool("All")],
        egress_claims: vec![claim(Some("n1"))],
        interfaces: vec![interface("web.eth0", "u1", "10.0.0.1")],
        node_networks: vec![report("n1")],
        foreign: vec![],
    }
}

fn foreign_object() -> ForeignObjects {
    let policy = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "a"}});
    ForeignObjects {
        resource: serde_json::from_value(json!({
            "group": "cilium.io", "version": "v2", "api_version": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "plural": "ciliumnetworkpolicies",
        }))
        .unwrap(),
        objects: vec![serde_json::from_value(policy).unwrap()],
        more: 0,
        problem: None,
    }
}

fn put(snapshot: &mut Snapshot, condition: Value) {
    let status = snapshot.node_networks[0].status.as_mut().unwrap();
    status.conditions.push(serde_json::from_value(condition).unwrap());
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

type Damage = fn(&mut Snapshot);

/// Each damage is found by its check, and by no other; returns what the checks found.
fn assert_found(cases: &[(&str, Damage)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, damage) in cases {
        let mut snapshot = healthy();
        damage(&mut snapshot);
        assert_eq!(found(&snapshot), [*name]);
        findings.extend(checks(&snapshot).into_iter().flat_map(|check| check.findings));
    }
    findings
}

#[test]
fn each_check_finds_its_problem_and_no_other() {
    assert_found(OF_OBJECTS);
    assert_found(OF_CONTROL_PLANE);
}

#[test]
fn each_check_has_a_damage_and_a_remedy() {
    let damaged: BTreeSet<&str> = OF_OBJECTS
        .iter()
        .chain(OF_CONTROL_PLANE)
        .map(|(name, _)| *name)
        .collect();
    let all = checks(&healthy());
    assert_eq!(damaged, all.iter().map(|check| check.name.as_str()).collect());
    for finding in [assert_found(OF_OBJECTS), assert_found(OF_CONTROL_PLANE)].concat() {
        assert!(crate::doctor::has_advice(&finding), "{finding:?}");
    }
}

const OF_OBJECTS: &[(&str, Damage)] = &[
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
    ("network-conditions", |s| {
        s.networks[0].status = None;
        s.blocks.clear();
    }),
    ("namespace-selectors", |s| {
        s.networks[0].spec.namespace_selector = serde_json::from_value(json!({"matchLabels": {"a": "b"}})).unwrap();
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
    ("interface-conditions", |s| {
        s.interfaces[0].status.as_mut().unwrap().conditions[0].status = kni_api::ConditionStatus::False;
    }),
    ("policies", |s| {
        let status = json!({"conditions": [condition("Accepted", "False")]});
        s.egress_policies[0].status = serde_json::from_value(status).unwrap();
    }),
    ("egress-addresses", |s| {
        s.egress_policies[0].spec.egress_addresses = vec!["198.51.100.1".to_owned()];
    }),
    ("foreign-objects", |s| s.foreign = vec![foreign_object()]),
];

const OF_CONTROL_PLANE: &[(&str, Damage)] = &[
    ("admission-policies", |s| s.admission_policies.truncate(3)),
    ("controller", |s| s.lease = None),
    ("controller", |s| {
        s.controller
            .as_mut()
            .unwrap()
            .status
            .as_mut()
            .unwrap()
            .available_replicas = Some(1);
    }),
    ("node-state", |s| put(s, condition("StateLost", "True"))),
    ("node-addresses", |s| put(s, condition("AddressesAvailable", "False"))),
    ("address-conflicts", |s| put(s, condition("AddressConflict", "True"))),
    ("number-conflicts", |s| put(s, condition("NumberConflict", "True"))),
    ("address-block-owners", |s| s.blocks[0] = block("u0")),
    ("address-blocks", |s| {
        s.networks[0].spec.subnets = vec!["10.9.0.0/24".to_owned()];
    }),
    ("policy-quota", |s| {
        let closed = json!([{"namespace": "shop", "reason": "r"}]);
        let status = s.node_networks[0].status.as_mut().unwrap();
        status.policies.closed = serde_json::from_value(closed).unwrap();
    }),
    ("egress-pools", |s| s.egress_pools[0] = pool("None")),
    ("egress-claims", |s| s.egress_claims[0] = claim(None)),
    ("egress-pools", |s| {
        let status = json!({"conditions": [condition("Accepted", "False")]});
        s.egress_pools[0].status = serde_json::from_value(status).unwrap();
    }),
    ("egress-claims", |s| {
        let status = json!({"holder": s.egress_claims[0].status.as_ref().unwrap().holder,
                                "conditions": [condition("Ready", "False")]});
        s.egress_claims[0].status = serde_json::from_value(status).unwrap();
    }),
];

#[test]
fn the_page_lists_every_check() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/cli.md");
    let page = std::fs::read_to_string(page).unwrap();
    let of_node = crate::doctor::node::checks("node n1", &crate::doctor::node::NodeFacts::default());
    for check in checks(&healthy()).iter().chain(&of_node) {
        let start = format!("| `{}` |", check.name);
        assert!(
            page.lines().any(|line| line.starts_with(&start)),
            "no row for {}",
            check.name
        );
    }
}
