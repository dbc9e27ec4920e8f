//! Lists attempts by the ways to name networks, addresses and devices.

use kni_integration::cluster::objects;
use serde_json::{Value, json};

use super::{
    super::{
        super::request::{Request, Verb},
        row::{
            Answer::{Forbidden, Refused},
            Class::Attachments,
            Form, Row,
            Shown::Unattached,
        },
    },
    annotated, make, request,
};

const NAMESPACES: &str = "spec.access.namespaces";
const ADDRESSES: &str = "spec.access.allowAddresses";
const MAC: &str = "spec.access.allowMac";
const ROUTE: &str = "spec.access.allowDefaultRoute";
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const DEFAULT: &str = "v1.multus-cni.io/default-network";

pub(super) fn rows() -> Vec<Row> {
    let agent = |name, attempt, field| Row::accepted(Attachments, name, attempt, Unattached(field));
    let early = |name, attempt, field| Row::refused(Attachments, name, attempt, Refused(field));
    vec![
        early("the victim's network: kni.dev/network", network, NAMESPACES).in_short(),
        agent("the victim's network: list of Multus", short, NAMESPACES).in_short(),
        agent("the victim's network: list of Multus in JSON", json_list, NAMESPACES),
        agent("the victim's network: its definition", foreign_definition, NAMESPACES),
        agent("the victim's network: own definition", own_definition, NAMESPACES),
        agent(
            "the victim's network: default network of Multus",
            default_network,
            NAMESPACES,
        ),
        agent("the victim's network: kni.io/multi-network", multi, NAMESPACES),
        early("the victim's network: attachment", attachment, NAMESPACES),
        agent("address of a victim's pod: kni.dev/ips", address, ADDRESSES),
        early(
            "address of a victim's pod: kni.dev/ips beside a network",
            address_of_network,
            ADDRESSES,
        ),
        agent("address of a victim's pod: list of Multus", listed_address, ADDRESSES),
        early("address of a victim's pod: attachment", attached_address, ADDRESSES),
        agent("MAC address: kni.dev/mac", mac, MAC),
        agent("MAC address: list of Multus", listed_mac, MAC),
        early("MAC address: attachment", attached_mac, MAC),
        agent("default routes: list of Multus", listed_route, ROUTE),
        Row::refused(
            Attachments,
            "labels of the own Namespace: the victim's network and tenant",
            labels,
            Forbidden,
        ),
    ]
}

fn victims(form: &Form) -> &str {
    &form.target[0].network
}

fn network(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "kni.dev/network": victims(form) }))
}

fn short(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ NETWORKS: victims(form) }))
}

/// A list of Multus with one network.
fn listed(form: &Form, network: &str, more: &Value) -> Vec<Request> {
    let mut element = json!({ "name": network, "interface": "net1" });
    objects::merge(&mut element, more);
    annotated(form, &json!({ NETWORKS: json!([element]).to_string() }))
}

fn json_list(form: &Form) -> Vec<Request> {
    listed(form, victims(form), &json!({}))
}

fn foreign_definition(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ NETWORKS: "victim/door" }))
}

fn own_definition(form: &Form) -> Vec<Request> {
    let mut requests = vec![make(objects::attachment_definition(
        &form.namespace,
        "door",
        victims(form),
    ))];
    requests.extend(annotated(form, &json!({ NETWORKS: "door" })));
    requests
}

fn default_network(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ DEFAULT: victims(form) }))
}

fn multi(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "kni.io/multi-network": victims(form) }))
}

fn attached(form: &Form, network: &str, more: &Value) -> Vec<Request> {
    let mut object = objects::attachment(&form.namespace, "attempt", network, "net1");
    objects::merge(&mut object["spec"], more);
    vec![make(object)]
}

fn attachment(form: &Form) -> Vec<Request> {
    attached(form, victims(form), &json!({}))
}

/// The network of `eth0` is that of the namespace.
fn address(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "kni.dev/ips": form.target[1].pod }))
}

fn address_of_network(form: &Form) -> Vec<Request> {
    let target = &form.target[1];
    annotated(
        form,
        &json!({ "kni.dev/network": target.network, "kni.dev/ips": target.pod }),
    )
}

fn listed_address(form: &Form) -> Vec<Request> {
    let target = &form.target[1];
    listed(form, &target.network, &json!({ "ips": [target.pod] }))
}

fn attached_address(form: &Form) -> Vec<Request> {
    let target = &form.target[1];
    attached(form, &target.network, &json!({ "addresses": [target.pod] }))
}

fn mac(form: &Form) -> Vec<Request> {
    annotated(form, &json!({ "kni.dev/mac": "02:00:00:00:00:07" }))
}

fn listed_mac(form: &Form) -> Vec<Request> {
    listed(form, "shared", &json!({ "mac": "02:00:00:00:00:07" }))
}

fn attached_mac(form: &Form) -> Vec<Request> {
    attached(form, "shared", &json!({ "mac": "02:00:00:00:00:07" }))
}

fn listed_route(form: &Form) -> Vec<Request> {
    listed(form, "shared", &json!({ "default-route": ["169.254.1.1"] }))
}

fn labels(form: &Form) -> Vec<Request> {
    let path = format!("/api/v1/namespaces/{}", form.namespace);
    [
        json!({ "kni.dev/network": victims(form) }),
        json!({ "tenant": "victim" }),
    ]
    .map(|labels| request(Verb::Patch, &path, json!({ "metadata": { "labels": labels } })))
    .into()
}
