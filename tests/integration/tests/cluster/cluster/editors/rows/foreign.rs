//! Lists attempts on objects of the cluster, of nodes and of victims.

use serde_json::{Value, json};

use super::{
    super::{
        super::request::{Request, Verb},
        row::{Answer::Forbidden, Class::Objects, Form, Row},
    },
    make, request,
};

const KNI: &str = "/apis/kni.dev/v1alpha1";

pub(super) fn rows() -> Vec<Row> {
    let refused = |name, attempt| Row::refused(Objects, name, attempt, Forbidden);
    vec![
        refused("networks", networks).in_short(),
        refused("address blocks and numbers of networks", blocks),
        refused("members of networks", members),
        refused("endpoints and reports of nodes", nodes),
        refused("pools and claims of egress addresses", egress),
        refused("interfaces of its own pods", own_interfaces),
        refused("interfaces of a victim's pods", interfaces),
        refused("pods, Services and policies of a victim", victims),
        refused("status of its own pods", own_status),
        refused("nodes, policies of admission, roles", cluster),
    ]
}

/// All ways to write an object of one kind: `name` is one that exists.
fn written(path: &str, kind: &str, name: &str) -> Vec<Request> {
    let object =
        json!({ "apiVersion": "kni.dev/v1alpha1", "kind": kind, "metadata": { "name": "forged" }, "spec": {} });
    let change = json!({ "metadata": { "labels": { "forged": "yes" }, "finalizers": ["example.com/forged"] } });
    let one = format!("{path}/{name}");
    vec![
        request(Verb::Create, path, object),
        request(Verb::Patch, &one, change.clone()),
        request(Verb::Patch, &format!("{one}/status"), change),
        request(Verb::Delete, &one, Value::Null),
        request(Verb::Delete, path, Value::Null),
    ]
}

fn networks(_form: &Form) -> Vec<Request> {
    let path = format!("{KNI}/podnetworks");
    let mut requests = written(&path, "PodNetwork", "vault");
    requests.extend(written(&path, "PodNetwork", "default"));
    requests
}

fn blocks(_form: &Form) -> Vec<Request> {
    let mut requests = written(&format!("{KNI}/addressblocks"), "AddressBlock", "10.10.0.0-26");
    requests.extend(written(&format!("{KNI}/networknumbers"), "NetworkNumber", "1"));
    requests
}

fn members(_form: &Form) -> Vec<Request> {
    let name = kni_api::network_members::name("vault", "node1", 0);
    written(&format!("{KNI}/networkmembers"), "NetworkMembers", &name)
}

fn nodes(_form: &Form) -> Vec<Request> {
    let mut requests = written(&format!("{KNI}/nodeendpoints"), "NodeEndpoint", "node1");
    requests.extend(written(&format!("{KNI}/nodenetworks"), "NodeNetwork", "node1"));
    requests
}

fn egress(_form: &Form) -> Vec<Request> {
    let mut requests = written(&format!("{KNI}/egressaddresspools"), "EgressAddressPool", "pool");
    requests.extend(written(
        &format!("{KNI}/egressaddressclaims"),
        "EgressAddressClaim",
        "claim",
    ));
    requests
}

fn own_interfaces(form: &Form) -> Vec<Request> {
    let path = format!("{KNI}/namespaces/{}/podinterfaces", form.namespace);
    written(&path, "PodInterface", "probe")
}

fn interfaces(form: &Form) -> Vec<Request> {
    let target = &form.target[form.number];
    let path = format!("{KNI}/namespaces/{}/podinterfaces", target.namespace);
    let name = kni_api::pod_interface::name(&target.name, &target.uid, "eth0");
    written(&path, "PodInterface", &name)
}

fn victims(form: &Form) -> Vec<Request> {
    let target = &form.target[form.number];
    let core = format!("/api/v1/namespaces/{}", target.namespace);
    let policies = format!(
        "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
        target.namespace
    );
    let slices = format!(
        "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
        target.namespace
    );
    let mut requests = Vec::new();
    for (path, name) in [
        (format!("{core}/pods"), &*target.name),
        (format!("{core}/services"), "web"),
        (policies, "guard"),
        (slices, "web-ipv4"),
    ] {
        requests.extend(written(&path, "Any", name));
    }
    requests
}

fn own_status(form: &Form) -> Vec<Request> {
    let path = format!("/api/v1/namespaces/{}/pods/probe/status", form.namespace);
    let address = form.target[1].pod;
    let body = json!({ "status": { "podIP": address, "podIPs": [{ "ip": address }] } });
    vec![request(Verb::Patch, &path, body)]
}

fn cluster(form: &Form) -> Vec<Request> {
    let mut requests = Vec::new();
    let admission = "/apis/admissionregistration.k8s.io/v1";
    let roles = "/apis/rbac.authorization.k8s.io/v1";
    for (path, name) in [
        ("/api/v1/nodes".to_owned(), "node1"),
        ("/api/v1/namespaces".to_owned(), "victim"),
        (format!("{admission}/validatingadmissionpolicies"), "pod-join.kni.dev"),
        (
            format!("{admission}/validatingadmissionpolicybindings"),
            "pod-join.kni.dev",
        ),
        (format!("{roles}/clusterroles"), "kni-edit"),
        (
            "/apis/coordination.k8s.io/v1/namespaces/kni-system/leases".to_owned(),
            "kni-controller",
        ),
    ] {
        requests.extend(written(&path, "Any", name));
    }
    let more = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": format!("{}-2", form.namespace) },
    });
    requests.push(make(more));
    requests
}
