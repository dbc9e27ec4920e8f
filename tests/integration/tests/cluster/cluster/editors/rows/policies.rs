//! Lists attempts by policies.

use kni_integration::cluster::objects;
use serde_json::{Value, json};

use super::{
    super::{
        super::request::Request,
        row::{
            Answer::{Forbidden, Invalid},
            Class::Policies,
            Form, Row,
            Shown::{Closed, Event, Nowhere},
        },
    },
    make,
};

/// More ranges than the quota of a namespace has rows.
const RANGES: u32 = 1500;
const MANY: usize = 100;

pub(super) fn rows() -> Vec<Row> {
    let accepted = |name, attempt, shown| Row::accepted(Policies, name, attempt, shown);
    let refused = |name, attempt, answer| Row::refused(Policies, name, attempt, answer);
    vec![
        accepted("peers: the victims' namespaces, both directions", peers, Nowhere),
        accepted("all of its own pods closed", closed, Nowhere),
        accepted("very many policies", many, Nowhere),
        accepted("more ranges than its quota", ranges, Closed).in_short(),
        refused("range that is not one", no_range, Invalid("ipBlock.cidr")),
        accepted(
            "range that is not one, of Multus",
            no_range_of_multus,
            Event("PolicyRefused"),
        ),
        accepted("policy for the victims' networks", for_network, Event("PolicyRefused")),
        accepted(
            "policy for a victim's definition",
            for_definition,
            Event("PolicyRefused"),
        ),
        accepted(
            "policy for a network that does not exist",
            for_nothing,
            Event("NetworkNotFound"),
        ),
        refused("EgressPolicy", egress, Forbidden),
    ]
}

fn policy(form: &Form, name: &str, spec: &Value) -> Request {
    make(objects::policy(&form.namespace, name, spec))
}

fn of_victims(form: &Form) -> Vec<Value> {
    let of = form.target.iter().map(|target| {
        json!({
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": target.namespace } },
            "podSelector": { "matchLabels": { "app": "server" } },
        })
    });
    of.collect()
}

fn peers(form: &Form) -> Vec<Request> {
    let peers = of_victims(form);
    vec![policy(
        form,
        "guard",
        &json!({
            "policyTypes": ["Ingress", "Egress"], "ingress": [{ "from": peers }], "egress": [{ "to": peers }],
        }),
    )]
}

fn closed(form: &Form) -> Vec<Request> {
    vec![policy(form, "guard", &json!({ "policyTypes": ["Ingress", "Egress"] }))]
}

fn many(form: &Form) -> Vec<Request> {
    let of = |number: usize| {
        let peer = json!({ "podSelector": { "matchLabels": { "number": format!("n{number}") } } });
        policy(
            form,
            &format!("many-{number}"),
            &json!({ "ingress": [{ "from": [peer] }] }),
        )
    };
    (0..MANY).map(of).collect()
}

fn ranges(form: &Form) -> Vec<Request> {
    let blocks = (0..RANGES).map(|number| {
        let [_, _, high, low] = number.to_be_bytes();
        json!({ "ipBlock": { "cidr": format!("64.{high}.{low}.0/24") } })
    });
    let peers: Vec<Value> = blocks.collect();
    vec![policy(
        form,
        "ranges",
        &json!({ "policyTypes": ["Ingress"], "ingress": [{ "from": peers }] }),
    )]
}

fn no_range(form: &Form) -> Vec<Request> {
    let peers = json!([{ "ipBlock": { "cidr": "10.0.0.0/99" } }]);
    vec![policy(form, "no-range", &json!({ "ingress": [{ "from": peers }] }))]
}

/// A policy of Multus for networks, all of whose pods may send to these peers.
fn of_multus(form: &Form, name: &str, networks: &str, peers: &Value) -> Request {
    make(json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1",
        "kind": "MultiNetworkPolicy",
        "metadata": {
            "name": name, "namespace": form.namespace, "annotations": { "k8s.v1.cni.cncf.io/policy-for": networks },
        },
        "spec": { "podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{ "from": peers }] },
    }))
}

/// It is refused, with an event: what was written before it is evaluated then.
fn last(form: &Form) -> Request {
    let no_range = json!([{ "ipBlock": { "cidr": "192.0.2.1" } }]);
    of_multus(form, "last", "shared", &no_range)
}

fn no_range_of_multus(form: &Form) -> Vec<Request> {
    vec![last(form)]
}

fn for_network(form: &Form) -> Vec<Request> {
    let networks = form.target.each_ref().map(|target| &*target.network).join(",");
    vec![of_multus(form, "guard", &networks, &json!([])), last(form)]
}

fn for_definition(form: &Form) -> Vec<Request> {
    vec![of_multus(form, "guard", "victim/door", &json!([])), last(form)]
}

fn for_nothing(form: &Form) -> Vec<Request> {
    vec![of_multus(form, "nothing", "ghost", &json!([]))]
}

fn egress(form: &Form) -> Vec<Request> {
    vec![make(json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "EgressPolicy",
        "metadata": { "name": "egress", "namespace": form.namespace },
        "spec": { "podSelector": {} },
    }))]
}
