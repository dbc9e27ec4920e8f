//! Lists attempts by accounts, and by events.

use serde_json::{Value, json};

use super::{
    super::{
        super::request::{Request, Verb},
        row::{
            Answer::{Forbidden, Refused},
            Class::{Accounts, Events},
            Form, Row,
            Shown::{Nowhere, Unattached},
        },
    },
    annotated, make, pod, request,
};

const MANY: usize = 60;

pub(super) fn rows() -> Vec<Row> {
    vec![
        Row::accepted(Accounts, "many accounts, each of a pod", many, Nowhere),
        Row::refused(
            Accounts,
            "network that needs a verb: kni.dev/network",
            network,
            Refused("spec.access.requireJoin"),
        )
        .in_short(),
        Row::accepted(
            Accounts,
            "network that needs a verb: list of Multus",
            listed,
            Unattached("spec.access.requireJoin"),
        ),
        Row::refused(Accounts, "the verb, by a binding of its own", binding, Forbidden),
        Row::refused(Accounts, "in the name of the agent's account", impersonated, Forbidden),
        Row::refused(Accounts, "tokens of the accounts of the deployment", tokens, Forbidden),
        Row::refused(Events, "events about a victim's pod", about_pod, Forbidden).in_short(),
        Row::refused(Events, "events about nodes and networks", about_cluster, Forbidden),
        // They are shown in that namespace only.
        Row::accepted(
            Events,
            "events of its own namespace about the victim",
            about_victim,
            Nowhere,
        ),
    ]
}

fn many(form: &Form) -> Vec<Request> {
    let of = |number: usize| {
        let name = format!("account-{number}");
        let account = json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name, "namespace": form.namespace },
        });
        let mut object = pod(
            form,
            &name,
            &json!({ "annotations": { "k8s.v1.cni.cncf.io/networks": "granted" } }),
        );
        object["spec"]["nodeName"] = json!("node9");
        object["spec"]["serviceAccountName"] = json!(name);
        [make(account), make(object)]
    };
    (0..MANY).flat_map(of).collect()
}

fn network(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "kni.dev/network": "granted" }))
}

fn listed(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "k8s.v1.cni.cncf.io/networks": "granted" }))
}

fn binding(form: &Form) -> Vec<Request> {
    let group = "rbac.authorization.k8s.io";
    let metadata = json!({ "name": "join", "namespace": form.namespace });
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": metadata,
        "rules": [{ "apiGroups": ["kni.dev"], "resources": ["podnetworks"], "verbs": ["join"] }],
    });
    let subject = json!({ "kind": "ServiceAccount", "namespace": form.namespace, "name": "default" });
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "RoleBinding", "metadata": metadata, "subjects": [subject],
        "roleRef": { "apiGroup": group, "kind": "Role", "name": "join" },
    });
    let mut cluster = binding.clone();
    cluster["kind"] = json!("ClusterRoleBinding");
    cluster["metadata"] = json!({ "name": "join" });
    [role, binding, cluster].map(make).into()
}

fn impersonated(_form: &Form) -> Vec<Request> {
    let path = "/apis/kni.dev/v1alpha1/podnetworks/vault";
    [
        "system:serviceaccount:kni-system:kni-agent",
        "system:serviceaccount:kni-system:kni-controller",
        "system:node:node1",
        "test",
    ]
    .map(|user| request(Verb::Get, path, Value::Null).impersonating(user))
    .into()
}

fn tokens(_form: &Form) -> Vec<Request> {
    let body = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": { "audiences": [] } });
    ["kni-agent", "kni-controller"]
        .map(|account| {
            let path = format!("/api/v1/namespaces/kni-system/serviceaccounts/{account}/token");
            request(Verb::Create, &path, body.clone())
        })
        .into()
}

/// An event in a namespace about an object.
fn event(namespace: &str, about: &Value) -> Request {
    make(json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": { "name": "forged", "namespace": namespace },
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "kni-agent", "reportingInstance": "node1",
        "type": "Warning", "reason": "NotAuthorized", "action": "Attach", "note": "forged", "regarding": about,
    }))
}

fn of_victim(form: &Form) -> Value {
    let target = &form.target[form.number];
    json!({ "apiVersion": "v1", "kind": "Pod", "namespace": target.namespace, "name": target.name, "uid": target.uid })
}

fn about_pod(form: &Form) -> Vec<Request> {
    vec![event(&form.target[form.number].namespace, &of_victim(form))]
}

fn about_cluster(_form: &Form) -> Vec<Request> {
    [("v1", "Node", "node1"), ("kni.dev/v1alpha1", "PodNetwork", "vault")]
        .map(|(version, kind, name)| event("default", &json!({ "apiVersion": version, "kind": kind, "name": name })))
        .into()
}

fn about_victim(form: &Form) -> Vec<Request> {
    vec![event(&form.namespace, &of_victim(form))]
}
