//! Generates Services and EndpointSlices as an API server would return them.

use std::net::IpAddr;

use kni_integration::{Manifest, Pod, stage::address};
use serde_json::{Value, json};

/// The default port of virtual addresses.
pub(crate) const FRONT: u16 = 80;
/// The port of the servers of all pods.
pub(crate) const BACK: u16 = 8080;
/// Name of this node and of its zone.
pub(crate) const HERE: &str = "here";
pub(crate) const ZONE: &str = "near";

/// A virtual address of the default network.
pub(crate) fn vip(v4: bool, last: u8) -> IpAddr {
    if v4 {
        [10, 96, 0, last].into()
    } else {
        [0xfd00, 0x96, 0, 0, 0, 0, 0, u16::from(last)].into()
    }
}

/// A virtual address in two networks.
pub(crate) fn shared_vip(v4: bool, last: u8) -> IpAddr {
    if v4 {
        [10, 97, 0, last].into()
    } else {
        [0xfd00, 0x97, 0, 0, 0, 0, 0, u16::from(last)].into()
    }
}

/// The default network, and blue and red, which have the same subnets and ranges of virtual addresses.
pub(crate) fn networks() -> Vec<Manifest> {
    let range = |n: u8| format!("serviceSubnets: [\"10.{n}.0.0/16\", \"fd00:{n}::/112\"]");
    let networks = Manifest::overlapping().into_iter().enumerate();
    networks
        .map(|(index, network)| network.spec(&range(if index == 0 { 96 } else { 97 })))
        .collect()
}

/// TCP and UDP at `port`, named by protocol.
pub(crate) fn both(port: u16) -> Value {
    json!([{"name": "tcp", "protocol": "TCP", "port": port}, {"name": "udp", "protocol": "UDP", "port": port}])
}

/// A Service of both families at the virtual addresses that end with `last`, TCP and UDP at [`FRONT`].
pub(crate) fn service(name: &str, last: u8) -> Value {
    let ips = [true, false].map(|v4| vip(v4, last).to_string());
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "team", "name": name, "labels": {}},
        "spec": {"clusterIP": ips[0], "clusterIPs": ips, "ports": both(FRONT)},
    })
}

/// Adds fields to the spec of a Service.
pub(crate) fn with(mut service: Value, spec: Value) -> Value {
    let Value::Object(fields) = spec else {
        panic!("not fields of a spec: {spec}")
    };
    for (name, value) in fields {
        service["spec"][name] = value;
    }
    service
}

/// Adds a label to an object.
pub(crate) fn labelled(mut object: Value, label: &str, value: &str) -> Value {
    object["metadata"]["labels"][label] = value.into();
    object
}

/// One of the EndpointSlices of a Service; TCP and UDP at [`BACK`].
pub(crate) fn slice(service: &str, name: &str, v4: bool, endpoints: impl IntoIterator<Item = Value>) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "addressType": if v4 { "IPv4" } else { "IPv6" },
        "metadata": {
            "namespace": "team",
            "name": format!("{service}-{name}-{}", if v4 { "v4" } else { "v6" }),
            "labels": {"kubernetes.io/service-name": service},
        },
        "endpoints": Value::from_iter(endpoints), "ports": both(BACK),
    })
}

/// The slices of a Service, one per family, with the same pods as endpoints.
pub(crate) fn slices(service: &str, pods: &[(&Pod, State)]) -> Vec<Value> {
    let of_family = |v4: bool| {
        let endpoints = pods.iter().map(|(pod, state)| endpoint(address(pod, v4), *state));
        slice(service, "only", v4, endpoints)
    };
    [true, false].map(of_family).to_vec()
}

/// A Service and its slices.
pub(crate) fn served(service: Value, pods: &[(&Pod, State)]) -> Vec<Value> {
    let name = service["metadata"]["name"].as_str().expect("a name").to_owned();
    let mut objects = vec![service];
    objects.extend(slices(&name, pods));
    objects
}

/// The conditions of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// Serves, and is terminating.
    Draining,
    /// Serves, neither ready nor terminating.
    Unready,
    /// Terminating, and does not serve.
    Gone,
}

/// An endpoint on this node.
pub(crate) fn endpoint(address: IpAddr, state: State) -> Value {
    let [ready, serving, terminating] = match state {
        State::Ready => [true, true, false],
        State::Draining => [false, true, true],
        State::Unready => [false, true, false],
        State::Gone => [false, false, true],
    };
    json!({
        "addresses": [address.to_string()], "nodeName": HERE, "zone": ZONE,
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
    })
}

/// The endpoint on another node.
pub(crate) fn elsewhere(mut endpoint: Value) -> Value {
    endpoint["nodeName"] = "there".into();
    endpoint["zone"] = "far".into();
    endpoint
}
