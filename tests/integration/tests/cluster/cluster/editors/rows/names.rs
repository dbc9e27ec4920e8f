//! Lists attempts by names: very long ones, equal ones, and those that are none.

use kni_integration::cluster::objects;
use serde_json::json;

use super::{
    super::{
        super::request::Request,
        row::{
            Answer::Invalid,
            Class::Names,
            Form, Row,
            Shown::{Listed, Nowhere, Running, Unattached},
        },
    },
    annotated, make, pod, served, service,
};

/// The longest name of an object.
const LONGEST: usize = 253;

pub(super) fn rows() -> Vec<Row> {
    let accepted = |name, attempt, shown| Row::accepted(Names, name, attempt, shown);
    let refused = |name, attempt, answer| Row::refused(Names, name, attempt, answer);
    vec![
        accepted("pods with the longest names", long_pods, Running),
        accepted("pods named as a victim's and as nodes", equal_pods, Running).in_short(),
        accepted("Services named as those of the cluster", equal_services, Listed("")),
        accepted(
            "definitions named as networks of others",
            equal_definitions,
            Unattached("spec.access.namespaces"),
        ),
        accepted("attachment with the longest name", long_attachment, Nowhere),
        refused("attachment with a longer one", longer_attachment, Invalid("253")),
        refused("upper case", upper_case, Invalid("RFC 1123")),
        accepted(
            "network that is no name",
            no_name,
            Unattached("k8s.v1.cni.cncf.io/networks"),
        ),
        refused(
            "interface of the kernel",
            kernel,
            Invalid("the kernel keeps for itself"),
        ),
        refused(
            "network that can be none",
            no_network,
            Invalid("is no name of a PodNetwork"),
        ),
    ]
}

fn long_pods(form: &Form) -> Vec<Request> {
    ["a", "b"]
        .map(|last| make(pod(form, &format!("{}{last}", "p".repeat(LONGEST - 1)), &json!({}))))
        .into()
}

fn equal_pods(form: &Form) -> Vec<Request> {
    ["server1", "late1", "node1", "default"]
        .map(|name| make(pod(form, name, &json!({}))))
        .into()
}

fn equal_services(form: &Form) -> Vec<Request> {
    ["kubernetes", "kube-dns", "late"]
        .into_iter()
        .flat_map(|name| served(service(form, name, &json!({}))))
        .collect()
}

/// `default` is the network of the victim by the definition of that name.
fn equal_definitions(form: &Form) -> Vec<Request> {
    let mut requests = vec![make(objects::attachment_definition(
        &form.namespace,
        "default",
        "vault",
    ))];
    requests.extend(annotated(form, &json!({ "k8s.v1.cni.cncf.io/networks": "default" })));
    requests
}

/// An attachment with so long a name.
fn attachment(form: &Form, length: usize) -> Vec<Request> {
    let mut object = objects::attachment(&form.namespace, "any", "shared", "net1");
    object["metadata"]["name"] = json!("a".repeat(length));
    vec![make(object)]
}

fn long_attachment(form: &Form) -> Vec<Request> {
    attachment(form, LONGEST)
}

fn longer_attachment(form: &Form) -> Vec<Request> {
    attachment(form, LONGEST + 1)
}

fn upper_case(form: &Form) -> Vec<Request> {
    vec![
        make(pod(form, "Server1", &json!({}))),
        make(objects::attachment(&form.namespace, "Door", "shared", "net1")),
    ]
}

fn no_name(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "k8s.v1.cni.cncf.io/networks": "VAULT" }))
}

fn kernel(form: &Form) -> Vec<Request> {
    ["lo", "default", "all", ".."]
        .map(|interface| make(objects::attachment(&form.namespace, "kernel", "shared", interface)))
        .into()
}

fn no_network(form: &Form) -> Vec<Request> {
    ["Vault", "none", "../vault"]
        .map(|network| make(objects::attachment(&form.namespace, "none", network, "net1")))
        .into()
}
