//! Lists attempts by Services and their endpoints.

use kni_integration::cluster::objects;
use serde_json::{Value, json};

use super::{
    super::{
        super::request::{Request, Verb},
        row::{
            Answer::{Forbidden, Invalid, Refused},
            Class::Services,
            Form, Row,
            Shown::{Event, Listed, Nowhere},
        },
        scene::Scene,
    },
    make, request, served, service,
};

/// Changes of the endpoints of one Service.
const CHANGES: usize = 50;

pub(super) fn rows() -> Vec<Row> {
    let mut rows = of_endpoints();
    rows.extend(of_addresses());
    rows
}

/// Attempts by ports and endpoints.
fn of_endpoints() -> Vec<Row> {
    let accepted = |name, attempt, shown| Row::accepted(Services, name, attempt, shown);
    vec![
        accepted(
            "Services with very many ports",
            many_ports,
            Listed("rows of table SERVICES"),
        )
        .in_short(),
        accepted(
            "Services with very many endpoints",
            many_endpoints,
            Listed("rows of table BACKENDS"),
        ),
        accepted(
            "endpoint: pod of another network",
            foreign_pod,
            Event("EndpointNotInNetwork"),
        ),
        accepted("endpoint: pod of another tenant in the network", neighbour, Listed("")),
        accepted(
            "endpoints: Service of the victim, nodes, API server",
            elsewhere,
            Listed(""),
        ),
        accepted("endpoints that change all the time", changing, Listed("")),
    ]
}

/// Attempts by addresses and names.
fn of_addresses() -> Vec<Row> {
    let accepted = |name, attempt, shown| Row::accepted(Services, name, attempt, shown);
    let refused = |name, attempt, answer| Row::refused(Services, name, attempt, answer);
    vec![
        accepted(
            "external address: victims' pods",
            external_pods,
            Event("ExternalAddressNotServed"),
        ),
        accepted(
            "external address: victims' Services",
            external_services,
            Event("ExternalAddressNotServed"),
        ),
        accepted(
            "external address: nodes, API server",
            external_nodes,
            Event("ExternalAddressNotServed"),
        ),
        accepted(
            "external address: a host outside",
            external_host,
            Event("ExternalAddressNotServed"),
        ),
        refused(
            "virtual address of the victim's Service",
            same_address,
            Invalid("already allocated"),
        ),
        refused("addresses of a load balancer in the status", balanced, Forbidden),
        refused(
            "label of the victim's network",
            labelled,
            Refused("spec.access.namespaces"),
        ),
        accepted("ExternalName of the victim's Service", external_name, Nowhere),
        accepted("name and ports of the victim's Service", same_name, Listed("")),
        accepted("selector of the victim's pods", same_selector, Listed("")),
        accepted("headless, with the name of the victim's", headless, Nowhere),
        accepted("session affinity, named target ports", affinity, Listed("")),
    ]
}

fn many_ports(form: &Form) -> Vec<Request> {
    let ports: Vec<Value> = (1..=200)
        .map(|port| json!({ "name": format!("p{port}"), "port": port }))
        .collect();
    (1..=5)
        .map(|number| {
            let [mut object, _] = service(form, &format!("ports-{number}"), &json!({}));
            object["spec"]["ports"] = json!(ports);
            make(object)
        })
        .collect()
}

fn many_endpoints(form: &Form) -> Vec<Request> {
    let hosts =
        (1..=200).map(|last| json!({ "addresses": [format!("192.0.2.{last}")], "conditions": { "ready": true } }));
    let hosts: Vec<Value> = hosts.collect();
    let services = (1..=5).flat_map(|number| {
        let [object, mut slice] = service(form, &format!("hosts-{number}"), &json!({}));
        slice["endpoints"] = json!(hosts);
        [make(object), make(slice)]
    });
    services.collect()
}

/// A Service with one endpoint.
fn with_endpoint(form: &Form, name: &str, endpoint: &Value) -> Vec<Request> {
    let [object, mut slice] = service(form, name, &json!({}));
    slice["endpoints"] = json!([endpoint]);
    served([object, slice])
}

fn of_pod(form: &Form, target: usize, node: &str) -> Value {
    let target = &form.target[target];
    json!({
        "addresses": [target.pod], "nodeName": node, "conditions": { "ready": true },
        "targetRef": { "kind": "Pod", "namespace": target.namespace, "name": target.name, "uid": target.uid },
    })
}

fn foreign_pod(form: &Form) -> Vec<Request> {
    with_endpoint(form, "stranger", &of_pod(form, 0, "node1"))
}

fn neighbour(form: &Form) -> Vec<Request> {
    with_endpoint(form, "neighbour", &of_pod(form, 1, "node1"))
}

fn elsewhere(form: &Form) -> Vec<Request> {
    let [object, mut slice] = service(form, "elsewhere", &json!({}));
    let mut addresses = vec![form.target[1].service.to_string(), "198.51.100.10".to_owned()];
    addresses.extend(form.nodes.clone());
    let endpoints = addresses
        .iter()
        .map(|address| json!({ "addresses": [address], "conditions": { "ready": true } }));
    slice["endpoints"] = endpoints.collect();
    served([object, slice])
}

fn changing(form: &Form) -> Vec<Request> {
    let objects = service(form, "changing", &json!({}));
    let name = objects[1]["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let path = format!(
        "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices/{name}",
        form.namespace
    );
    let mut requests = served(objects);
    for number in 0..CHANGES {
        let hosts = (1..=20).map(|last| {
            let address = format!("192.0.2.{}", last + 20 * (number % 5));
            json!({ "addresses": [address], "conditions": { "ready": true } })
        });
        let body = json!({ "endpoints": hosts.collect::<Vec<_>>() });
        requests.push(request(Verb::Patch, &path, body));
    }
    requests
}

/// A Service with external addresses.
fn external(form: &Form, addresses: &[String]) -> Vec<Request> {
    let at = json!({ "externalIPs": addresses, "ports": [{ "name": "udp", "protocol": "UDP", "port": 7000 }] });
    served(service(form, "external", &at))
}

fn external_pods(form: &Form) -> Vec<Request> {
    external(form, &form.target.each_ref().map(|target| target.pod.to_string()))
}

fn external_services(form: &Form) -> Vec<Request> {
    external(form, &form.target.each_ref().map(|target| target.service.to_string()))
}

fn external_nodes(form: &Form) -> Vec<Request> {
    let mut addresses = form.nodes.clone();
    addresses.push("198.51.100.10".to_owned());
    external(form, &addresses)
}

fn external_host(form: &Form) -> Vec<Request> {
    external(form, &[Scene::outside_address().to_string()])
}

fn same_address(form: &Form) -> Vec<Request> {
    let [object, _] = service(form, "same", &json!({ "clusterIP": form.target[form.number].service }));
    vec![make(object)]
}

fn balanced(form: &Form) -> Vec<Request> {
    // The right is evaluated before the object is read.
    let path = format!("/api/v1/namespaces/{}/services/balanced/status", form.namespace);
    let ingress = json!([{ "ip": form.target[1].pod }, { "ip": form.target[1].service }]);
    let body = json!({ "status": { "loadBalancer": { "ingress": ingress } } });
    vec![request(Verb::Patch, &path, body)]
}

fn labelled(form: &Form) -> Vec<Request> {
    let [mut object, _] = service(form, "labelled", &json!({}));
    object["metadata"]["labels"] = json!({ "kni.dev/network": form.target[0].network });
    vec![make(object)]
}

fn external_name(form: &Form) -> Vec<Request> {
    let target = &form.target[form.number];
    let name = format!("web.{}.svc.cluster.local", target.namespace);
    vec![make(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "web", "namespace": form.namespace },
        "spec": { "type": "ExternalName", "externalName": name },
    }))]
}

fn same_name(form: &Form) -> Vec<Request> {
    served(service(form, "web", &json!({})))
}

fn same_selector(form: &Form) -> Vec<Request> {
    let [mut object, _] = service(form, "web", &json!({ "selector": { "app": "server" } }));
    object["spec"]["ports"] = json!([{ "name": "udp", "protocol": "UDP", "port": 80, "targetPort": 7000 }]);
    vec![make(object)]
}

fn headless(form: &Form) -> Vec<Request> {
    let [object, slice] = service(form, "web", &json!({ "clusterIP": "None" }));
    served([object, slice])
}

fn affinity(form: &Form) -> Vec<Request> {
    let [object, slice] = service(
        form,
        "sticky",
        &json!({
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 86_400 } },
            "ports": [{ "name": "udp", "protocol": "UDP", "port": 80, "targetPort": "web" }],
        }),
    );
    let selecting = objects::service(&form.namespace, "named", 81, ("192.0.2.1", 81), &json!({}));
    let [mut named, _] = selecting;
    named["spec"]["selector"] = json!({ "friend": "yes" });
    named["spec"]["ports"] = json!([{ "name": "udp", "protocol": "UDP", "port": 81, "targetPort": "none-such" }]);
    vec![make(object), make(slice), make(named)]
}
