//! Lists attempts by the number of pods, and by what pods ask of nodes.

use kni_integration::cluster::objects;
use serde_json::{Value, json};

use super::{
    super::{
        super::request::{Request, Verb},
        row::{
            Class::{Addresses, Finalizers, Pods},
            Form, Network, Row,
            Shown::{Full, Listed, Nowhere, Running},
        },
    },
    make, pod, request, served, service,
};

/// More pods than a small network has addresses.
const FILL: usize = 17;
const PENDING: usize = 60;
const FINALIZER: &str = "example.com/kept";

pub(super) fn rows() -> Vec<Row> {
    vec![
        Row::accepted(Addresses, "own network full", own_network, Full(Network::Own)).in_short(),
        Row::accepted(Addresses, "shared network full", shared_network, Full(Network::Shared)),
        Row::accepted(Addresses, "many pods that no node has", pending, Nowhere),
        Row::accepted(Pods, "pods for a node that does not exist", absent_node, Nowhere),
        Row::accepted(
            Pods,
            "pods of the host network with the victims' labels",
            host_network,
            Nowhere,
        ),
        Row::accepted(Pods, "labels of a victim's pods", labels, Running).in_short(),
        Row::accepted(Pods, "mirror pod with the UID of a victim's pod", mirror, Nowhere),
        Row::accepted(
            Pods,
            "status of the networks of a pod, written by hand",
            status,
            Running,
        ),
        Row::accepted(Pods, "deletion of all own pods and Services", collection, Nowhere),
        Row::accepted(Finalizers, "own pod with a finalizer, deleted", kept_pod, Nowhere).in_short(),
        Row::accepted(
            Finalizers,
            "own Service with a finalizer, deleted",
            kept_service,
            Listed(""),
        ),
        Row::accepted(
            Finalizers,
            "own attachment with a finalizer, deleted",
            kept_attachment,
            Nowhere,
        ),
    ]
}

fn fill(form: &Form, more: &Value) -> Vec<Request> {
    let pods = (0..FILL).map(|number| make(pod(form, &format!("fill-{number}"), more)));
    pods.collect()
}

fn own_network(form: &Form) -> Vec<Request> {
    fill(form, &json!({ "annotations": { "kni.dev/network": form.own } }))
}

fn shared_network(form: &Form) -> Vec<Request> {
    fill(form, &json!({ "annotations": { "kni.dev/network": "shared" } }))
}

fn without_node(form: &Form, name: &str) -> Value {
    let mut object = pod(form, name, &json!({}));
    if let Some(spec) = object["spec"].as_object_mut() {
        spec.remove("nodeName");
    }
    object
}

fn pending(form: &Form) -> Vec<Request> {
    (0..PENDING)
        .map(|number| make(without_node(form, &format!("pending-{number}"))))
        .collect()
}

fn absent_node(form: &Form) -> Vec<Request> {
    let mut object = pod(form, "nowhere", &json!({}));
    object["spec"]["nodeName"] = json!("node9");
    vec![make(object)]
}

fn host_network(form: &Form) -> Vec<Request> {
    let labels = json!({ "labels": { "app": "server", "friend": "yes" } });
    let mut object = pod(form, "host", &labels);
    object["spec"]["hostNetwork"] = json!(true);
    object["spec"]["containers"][0]["ports"] = json!([]);
    vec![make(object)]
}

fn labels(form: &Form) -> Vec<Request> {
    ["server", "late"]
        .map(|app| make(pod(form, app, &json!({ "labels": { "app": app, "friend": "yes" } }))))
        .into()
}

/// Its kubelet would know it by this UID.
fn mirror(form: &Form) -> Vec<Request> {
    let annotations = json!({ objects::MIRROR: form.target[form.number].uid });
    vec![make(pod(form, "mirror", &json!({ "annotations": annotations })))]
}

fn status(form: &Form) -> Vec<Request> {
    let target = &form.target[1];
    let written = json!([{ "name": "default", "interface": "eth0", "ips": [target.pod], "default": true }]);
    let annotations = json!({ "k8s.v1.cni.cncf.io/network-status": written.to_string() });
    vec![make(pod(form, "status", &json!({ "annotations": annotations })))]
}

fn collection(form: &Form) -> Vec<Request> {
    let namespace = &form.namespace;
    let mut requests = vec![make(pod(form, "one", &json!({}))), make(pod(form, "two", &json!({})))];
    requests.extend(served(service(form, "three", &json!({}))));
    for kind in ["pods", "services"] {
        let path = format!("/api/v1/namespaces/{namespace}/{kind}?labelSelector=attempt");
        requests.push(request(Verb::Delete, &path, Value::Null));
    }
    requests
}

/// Creates the object with a finalizer, and deletes it.
fn kept(mut object: Value) -> [Request; 2] {
    object["metadata"]["finalizers"] = json!([FINALIZER]);
    let create = make(object);
    let delete = create.deletion(false);
    [create, delete]
}

fn kept_pod(form: &Form) -> Vec<Request> {
    kept(pod(form, "kept", &json!({}))).into()
}

fn kept_service(form: &Form) -> Vec<Request> {
    let [service, slice] = service(form, "kept", &json!({}));
    let [create, delete] = kept(service);
    vec![create, make(slice), delete]
}

fn kept_attachment(form: &Form) -> Vec<Request> {
    kept(objects::attachment(&form.namespace, "kept", "shared", "net1")).into()
}
