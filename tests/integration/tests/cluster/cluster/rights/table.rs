//! The table: which requests of which accounts are accepted.

use serde_json::{Value, json};

use super::super::request::{Request, Verb};

/// What the API server must answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    Accepted,
    Refused,
}

/// Objects of pod red-team/a on node1 and of pod red-team/b on node2.
pub(super) struct Names {
    /// The `PodInterface` of the pod on node1.
    pub(super) own: String,
    /// The `PodInterface` of the pod on node2.
    pub(super) foreign: String,
    pub(super) own_uid: String,
    pub(super) foreign_uid: String,
    /// Network red.
    pub(super) network: Value,
}

const KNI: &str = "/apis/kni.dev/v1alpha1";
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

fn interfaces() -> String {
    format!("{KNI}/namespaces/red-team/podinterfaces")
}

fn interface(name: &str, pod: &str, uid: &str, node: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": { "name": name },
        "spec": {
            "podName": pod, "podUid": uid, "nodeName": node, "podNetworkName": "red", "interfaceName": "eth0",
            "sandboxId": "0",
        },
    })
}

fn with_status(mut object: Value, address: &str) -> Value {
    object["status"] = json!({ "addresses": [{ "ip": address, "family": "IPv4" }] });
    object
}

fn node_network(name: &str) -> Value {
    json!({ "apiVersion": "kni.dev/v1alpha1", "kind": "NodeNetwork", "metadata": { "name": name }, "spec": {} })
}

fn members(node: &str) -> String {
    format!(
        "{KNI}/networkmembers/{}",
        kni_api::network_members::name("red", node, 0)
    )
}

fn members_of(node: &str, label: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "NetworkMembers",
        "metadata": {
            "name": kni_api::network_members::name("red", node, 0), "labels": { "kni.dev/network": label },
        },
        "spec": { "network": "red", "networkUID": "0", "nodeName": node, "nodeUID": "0", "members": [] },
    })
}

fn endpoint(node: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "NodeEndpoint",
        "metadata": { "name": node },
        "spec": {
            "nodeName": node, "nodeUID": "0", "addresses": ["192.0.2.1"], "port": 4789, "mtu": 1500, "epoch": 1,
        },
    })
}

fn confirmed() -> Value {
    json!({ "status": { "kinds": [{ "labels": { "role": "admin" } }] } })
}

fn pod(name: &str, rest: &str) -> String {
    format!("/api/v1/namespaces/red-team/pods/{name}{rest}")
}

fn annotations(value: &Value) -> Value {
    json!({ "metadata": { "annotations": value } })
}

fn labels() -> Value {
    json!({ "metadata": { "labels": { "role": "admin" } } })
}

fn image() -> Value {
    json!({ "spec": { "containers": [{ "name": "main", "image": "evil.invalid/evil" }] } })
}

fn attachment(name: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodNetworkAttachment",
        "metadata": { "name": name },
        "spec": { "podNetworkName": "red", "interfaceName": "red9", "podSelector": { "matchLabels": { "none": "none" } } },
    })
}

fn node_condition(kind: &str, status: &str) -> Request {
    let body = json!({ "status": { "conditions": [{ "type": kind, "status": status }] } });
    Request::new(Verb::Strategic, "/api/v1/nodes/node2/status", body)
}

fn token_of(node: &str) -> Request {
    let body = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": { "boundObjectRef": { "kind": "Node", "apiVersion": "v1", "name": node } },
    });
    let path = "/api/v1/namespaces/kni-system/serviceaccounts/kni-agent/token";
    Request::new(Verb::Create, path, body)
}

/// What the token of node1 tries about node2.
#[expect(clippy::too_many_lines, reason = "one row after the other")]
pub(super) fn foreign(names: &Names) -> Vec<Request> {
    let object = format!("{}/{}", interfaces(), names.foreign);
    let same = interface(&names.foreign, "b", &names.foreign_uid, "node2");
    let (node, report) = ("/api/v1/nodes/node2", format!("{KNI}/nodenetworks/node2"));
    let network = format!("{KNI}/podnetworks/red");
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kni-system/leases";
    let lease = json!({ "spec": { "holderIdentity": "node1" } });
    let other_namespace = format!("{KNI}/namespaces/plain/podinterfaces");
    let ready = json!({ "status": { "conditions": [] } });
    let endpoints = format!("{KNI}/nodeendpoints");
    vec![
        Request::new(Verb::Patch, &object, labels()),
        Request::new(Verb::Apply, &object, same.clone()),
        // The object changes hands.
        Request::new(
            Verb::Apply,
            &object,
            interface(&names.foreign, "b", &names.foreign_uid, "node1"),
        ),
        Request::new(
            Verb::Patch,
            &format!("{object}/status"),
            json!({ "status": { "addresses": [] } }),
        ),
        Request::new(
            Verb::Apply,
            &format!("{object}/status"),
            with_status(same.clone(), "10.10.9.9"),
        ),
        Request::new(Verb::Update, &object, same),
        Request::new(Verb::Delete, &object, Value::Null),
        Request::new(Verb::Delete, &format!("{}?", interfaces()), Value::Null),
        Request::new(
            Verb::Create,
            &interfaces(),
            interface("forged", "b", &names.foreign_uid, "node2"),
        ),
        Request::new(
            Verb::Apply,
            &format!("{}/forged", interfaces()),
            interface("forged", "b", &names.foreign_uid, "node2"),
        ),
        Request::new(Verb::Create, &other_namespace, interface("forged", "web", "0", "node2")),
        Request::new(Verb::Create, &interfaces(), interface("forged", "c", "0", "nowhere")),
        Request::new(Verb::Patch, &report, labels()),
        Request::new(Verb::Apply, &report, node_network("node2")),
        Request::new(Verb::Patch, &format!("{report}/status"), ready.clone()),
        Request::new(
            Verb::Apply,
            &format!("{report}/status"),
            json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "NodeNetwork", "metadata": { "name": "node2" },
                "status": { "conditions": [] },
            }),
        ),
        Request::new(Verb::Delete, &report, Value::Null),
        Request::new(Verb::Create, &format!("{KNI}/nodenetworks"), node_network("node3")),
        Request::new(Verb::Apply, &members("node2"), members_of("node2", "red")),
        Request::new(Verb::Patch, &members("node2"), json!({ "spec": { "members": [] } })),
        // The object changes hands.
        Request::new(
            Verb::Patch,
            &members("node2"),
            json!({ "spec": { "nodeName": "node1" } }),
        ),
        Request::new(Verb::Patch, &format!("{}/status", members("node2")), confirmed()),
        Request::new(Verb::Delete, &members("node2"), Value::Null),
        Request::new(
            Verb::Create,
            &format!("{KNI}/networkmembers"),
            members_of("node3", "red"),
        ),
        Request::new(Verb::Apply, &format!("{endpoints}/node2"), endpoint("node2")),
        Request::new(
            Verb::Patch,
            &format!("{endpoints}/node2"),
            json!({ "spec": { "port": 4790 } }),
        ),
        // The object changes hands.
        Request::new(
            Verb::Patch,
            &format!("{endpoints}/node2"),
            json!({ "spec": { "nodeName": "node1" } }),
        ),
        Request::new(
            Verb::Patch,
            &format!("{endpoints}/node2/status"),
            json!({ "status": { "addresses": [] } }),
        ),
        Request::new(Verb::Delete, &format!("{endpoints}/node2"), Value::Null),
        Request::new(Verb::Delete, &format!("{endpoints}?"), Value::Null),
        Request::new(Verb::Create, &endpoints, endpoint("node3")),
        Request::new(Verb::Patch, &pod("b", "/status"), annotations(&json!({ STATUS: "[]" }))),
        Request::new(Verb::Patch, &pod("b", "/status"), ready.clone()),
        Request::new(Verb::Patch, &pod("b", "/status"), labels()),
        Request::new(Verb::Patch, &pod("b", ""), image()),
        Request::new(Verb::Patch, &pod("b", ""), labels()),
        Request::new(Verb::Patch, &pod("b", "/ephemeralcontainers"), image()),
        Request::new(Verb::Delete, &pod("b", ""), Value::Null),
        Request::new(
            Verb::Create,
            &pod("b", "/eviction"),
            json!({ "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": "b" } }),
        ),
        Request::new(Verb::Update, &format!("{network}/status"), names.network.clone()),
        Request::new(Verb::Patch, &format!("{network}/status"), ready),
        Request::new(Verb::Patch, &network, labels()),
        Request::new(Verb::Delete, &network, Value::Null),
        Request::new(Verb::Patch, node, json!({ "spec": { "unschedulable": true } })),
        Request::new(
            Verb::Patch,
            &format!("{node}/status"),
            json!({ "status": { "capacity": { "pods": "0" } } }),
        ),
        Request::new(Verb::Delete, node, Value::Null),
        Request::new(Verb::Patch, &format!("{leases}/kni-controller"), lease),
        Request::new(Verb::Delete, &format!("{leases}/kni-controller"), Value::Null),
        token_of("node2"),
        Request::new(Verb::Get, node, Value::Null).impersonating("system:node:node2"),
    ]
}

/// The rest of the table.
#[expect(clippy::too_many_lines, reason = "one row after the other")]
pub(super) fn rows(names: &Names) -> Vec<(&'static str, Expected, Vec<Request>)> {
    use Expected::{Accepted, Refused};
    let own = format!("{}/{}", interfaces(), names.own);
    let object = interface(&names.own, "a", &names.own_uid, "node1");
    let new = interface("new", "a", &names.own_uid, "node1");
    let network = format!("{KNI}/podnetworks/red");
    let attachments = format!("{KNI}/namespaces/red-team/podnetworkattachments");
    let elsewhere = format!("{KNI}/namespaces/blue-team/podnetworkattachments");
    let policies = format!("{KNI}/namespaces/red-team/egresspolicies");
    let egress = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy", "metadata": { "name": "new" },
        "spec": { "podSelector": {}, "defaultAction": "Deny" },
    });
    let numbers = format!("{KNI}/networknumbers");
    let endpoints = format!("{KNI}/nodeendpoints");
    let reached = json!({ "status": { "addresses": ["192.0.2.1"] } });
    let number = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkNumber", "metadata": { "name": "5000" },
        "spec": { "network": "red", "networkUID": "u" },
    });
    let red = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "mine" },
        "spec": { "subnets": ["10.99.0.0/24"] },
    });
    let taint = json!({ "spec": { "taints": [{ "key": "kni.dev/addresses-exhausted", "effect": "NoSchedule" }] } });
    let tenants_refused =
        |requests: Vec<Request>| [("viewer", Refused, requests.clone()), ("editor", Refused, requests)];
    let mut rows = vec![
        (
            "agent of node1",
            Accepted,
            vec![
                Request::new(Verb::Get, &interfaces(), Value::Null),
                Request::new(Verb::Get, &numbers, Value::Null),
                Request::new(Verb::Create, &interfaces(), new.clone()),
                Request::new(Verb::Apply, &own, object.clone()),
                Request::new(Verb::Apply, &format!("{own}/status"), with_status(object, "10.10.0.9")),
                Request::new(Verb::Delete, &own, Value::Null),
                Request::new(Verb::Apply, &format!("{KNI}/nodenetworks/node1"), node_network("node1")),
                Request::new(
                    Verb::Patch,
                    &format!("{KNI}/nodenetworks/node1/status"),
                    json!({ "status": {} }),
                ),
                Request::new(Verb::Patch, &members("node1"), json!({ "spec": { "members": [] } })),
                Request::new(Verb::Delete, &members("node1"), Value::Null),
                Request::new(Verb::Get, &endpoints, Value::Null),
                Request::new(
                    Verb::Patch,
                    &format!("{endpoints}/node1"),
                    json!({ "spec": { "port": 4790 } }),
                ),
                Request::new(Verb::Delete, &format!("{endpoints}/node1"), Value::Null),
                Request::new(Verb::Patch, &pod("a", "/status"), annotations(&json!({ STATUS: "[]" }))),
                Request::new(Verb::Patch, &pod("a", "/status"), annotations(&json!({ STATUS: null }))),
            ],
        ),
        // Also about its own node and pods: no more than that.
        (
            "agent of node1",
            Refused,
            vec![
                Request::new(Verb::Patch, &format!("{}/status", members("node1")), confirmed()),
                Request::new(
                    Verb::Patch,
                    &members("node1"),
                    json!({ "metadata": { "labels": { "kni.dev/network": "blue" } } }),
                ),
                Request::new(
                    Verb::Create,
                    &format!("{KNI}/networkmembers"),
                    members_of("node1", "blue"),
                ),
                Request::new(Verb::Patch, &format!("{endpoints}/node1/status"), reached.clone()),
                Request::new(Verb::Patch, &pod("a", ""), annotations(&json!({ STATUS: "[]" }))),
                Request::new(Verb::Patch, &pod("a", ""), image()),
                Request::new(Verb::Patch, &pod("a", "/status"), labels()),
                Request::new(
                    Verb::Patch,
                    &pod("a", "/status"),
                    annotations(&json!({ "kni.dev/network": "blue" })),
                ),
                Request::new(
                    Verb::Patch,
                    &pod("a", "/status"),
                    json!({ "metadata": { "finalizers": ["kni.dev/x"] } }),
                ),
                Request::new(
                    Verb::Patch,
                    &pod("a", "/status"),
                    json!({ "status": { "podIP": "10.10.0.250", "podIPs": [{ "ip": "10.10.0.250" }] } }),
                ),
                Request::new(Verb::Patch, "/api/v1/nodes/node1", taint.clone()),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node1/status",
                    json!({ "status": { "capacity": {} } }),
                ),
                Request::new(Verb::Create, &format!("{KNI}/podnetworks"), red.clone()),
                Request::new(Verb::Create, &attachments, attachment("new")),
                Request::new(Verb::Create, &policies, egress.clone()),
                Request::new(Verb::Get, "/api/v1/namespaces/red-team/secrets", Value::Null),
                Request::new(Verb::Update, &format!("{network}/status"), names.network.clone()),
                Request::new(Verb::Patch, &format!("{network}/status"), json!({ "status": {} })),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "namespaces": ["plain"] } }),
                ),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "interfaces": 0 } }),
                ),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "number": 5000 } }),
                ),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "fabric": "None" } }),
                ),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "fabric": null } }),
                ),
                Request::new(Verb::Create, &numbers, number.clone()),
                Request::new(Verb::Apply, &format!("{numbers}/5000"), number.clone()),
                Request::new(Verb::Patch, &format!("{numbers}/5000"), labels()),
                Request::new(Verb::Patch, &format!("{numbers}/5000/status"), json!({ "status": {} })),
                Request::new(Verb::Delete, &format!("{numbers}/5000"), Value::Null),
                Request::new(Verb::Delete, &format!("{numbers}?"), Value::Null),
                token_of("node1"),
            ],
        ),
        (
            "agent, token of no node",
            Refused,
            vec![
                Request::new(Verb::Create, &interfaces(), new.clone()),
                Request::new(Verb::Delete, &own, Value::Null),
                Request::new(Verb::Delete, &members("node1"), Value::Null),
                Request::new(Verb::Delete, &format!("{endpoints}/node1"), Value::Null),
                Request::new(
                    Verb::Patch,
                    &format!("{KNI}/nodenetworks/node1/status"),
                    json!({ "status": {} }),
                ),
                Request::new(Verb::Patch, &pod("a", "/status"), annotations(&json!({ STATUS: "[]" }))),
                Request::new(Verb::Update, &format!("{network}/status"), names.network.clone()),
            ],
        ),
        (
            "kni-controller",
            Accepted,
            vec![
                Request::new(Verb::Get, &interfaces(), Value::Null),
                Request::new(Verb::Create, &numbers, number.clone()),
                Request::new(
                    Verb::Patch,
                    &format!("{network}/status"),
                    json!({ "status": { "interfaces": 7 } }),
                ),
                Request::new(
                    Verb::Patch,
                    &network,
                    json!({ "metadata": { "finalizers": ["kni.dev/in-use"] } }),
                ),
                Request::new(Verb::Patch, "/api/v1/nodes/node2", taint),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2/status",
                    json!({ "status": { "capacity": { "kni.dev/network-red": "7" } } }),
                ),
                Request::new(Verb::Delete, &format!("{KNI}/nodenetworks/node2"), Value::Null),
                Request::new(Verb::Patch, &format!("{}/status", members("node2")), confirmed()),
                Request::new(Verb::Delete, &members("node2"), Value::Null),
                Request::new(Verb::Patch, &format!("{endpoints}/node2/status"), reached.clone()),
                Request::new(Verb::Delete, &format!("{endpoints}/node2"), Value::Null),
                Request::new(Verb::Delete, &own, Value::Null),
            ],
        ),
        (
            "kni-controller",
            Refused,
            vec![
                Request::new(
                    Verb::Patch,
                    &format!("{endpoints}/node2"),
                    json!({ "spec": { "port": 4790 } }),
                ),
                Request::new(Verb::Create, &endpoints, endpoint("node2")),
                Request::new(Verb::Patch, &format!("{numbers}/5000"), labels()),
                Request::new(Verb::Create, &interfaces(), new.clone()),
                Request::new(Verb::Patch, &members("node1"), json!({ "spec": { "members": [] } })),
                Request::new(Verb::Patch, &pod("a", ""), image()),
                Request::new(Verb::Patch, &pod("a", "/status"), labels()),
                Request::new(Verb::Create, &format!("{KNI}/podnetworks"), red.clone()),
                Request::new(Verb::Delete, &network, Value::Null),
                Request::new(Verb::Get, "/api/v1/namespaces/red-team/secrets", Value::Null),
                Request::new(Verb::Delete, "/api/v1/nodes/node2", Value::Null),
                token_of("node2"),
                Request::new(Verb::Patch, &network, labels()),
                Request::new(
                    Verb::Patch,
                    &network,
                    json!({ "spec": { "access": { "allowMac": false } } }),
                ),
                Request::new(Verb::Patch, "/api/v1/nodes/node2", labels()),
                Request::new(Verb::Patch, "/api/v1/nodes/node2/status", labels()),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2",
                    json!({ "spec": { "unschedulable": true } }),
                ),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2",
                    json!({ "spec": { "taints": [{ "key": "other", "effect": "NoSchedule" }] } }),
                ),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2",
                    json!({ "spec": { "taints": [{ "key": "kni.dev/addresses-exhausted", "effect": "NoExecute" }] } }),
                ),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2/status",
                    json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }] } }),
                ),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2/status",
                    json!({ "status": { "conditions": [] } }),
                ),
                node_condition("Ready", "False"),
                node_condition("NetworkUnavailable", "True"),
                // It may only change one that there is.
                node_condition("NetworkUnavailable", "False"),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2/status",
                    json!({ "status": { "capacity": { "pods": "0" } } }),
                ),
                Request::new(
                    Verb::Patch,
                    "/api/v1/nodes/node2/status",
                    json!({ "status": { "allocatable": { "cpu": null } } }),
                ),
            ],
        ),
        (
            "editor",
            Accepted,
            vec![
                Request::new(Verb::Get, &interfaces(), Value::Null),
                Request::new(Verb::Get, &policies, Value::Null),
                Request::new(Verb::Create, &attachments, attachment("new")),
            ],
        ),
        (
            "viewer",
            Accepted,
            vec![
                Request::new(Verb::Get, &interfaces(), Value::Null),
                Request::new(Verb::Get, &attachments, Value::Null),
            ],
        ),
        (
            "viewer",
            Refused,
            vec![Request::new(Verb::Create, &attachments, attachment("new"))],
        ),
    ];
    rows.extend(tenants_refused(vec![
        Request::new(Verb::Create, &elsewhere, attachment("new")),
        Request::new(Verb::Create, &format!("{KNI}/podnetworks"), red),
        Request::new(Verb::Patch, &network, labels()),
        Request::new(Verb::Patch, &format!("{network}/status"), json!({ "status": {} })),
        Request::new(Verb::Delete, &network, Value::Null),
        Request::new(Verb::Create, &interfaces(), new),
        Request::new(Verb::Patch, &own, labels()),
        Request::new(
            Verb::Patch,
            &format!("{own}/status"),
            json!({ "status": { "addresses": [] } }),
        ),
        Request::new(Verb::Delete, &own, Value::Null),
        Request::new(Verb::Patch, &format!("{KNI}/nodenetworks/node1"), labels()),
        Request::new(Verb::Patch, &format!("{}/status", members("node1")), confirmed()),
        Request::new(Verb::Delete, &members("node1"), Value::Null),
        Request::new(Verb::Patch, &format!("{endpoints}/node1/status"), reached),
        Request::new(Verb::Delete, &format!("{endpoints}/node1"), Value::Null),
        Request::new(Verb::Get, &format!("{KNI}/nodenetworks/node1"), Value::Null),
    ]));
    rows
}
