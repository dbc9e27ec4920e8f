//! Generates the objects of the world: networks, namespaces, services, and policies of either kind.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::api::networking::v1::NetworkPolicySpec;
use serde_json::{Value, json};

use super::table::{MEMBERS, Net, PORTS, names_of, of_family};
use crate::{
    manifest::Manifest,
    oracle::{self, Labels, NamedPort, Protocol},
};

/// A policy of a case. `V4(x/a)` and `V6(x/a)` in the spec are replaced by the address of the pod in the policy's
/// network; `NET4` and `NET6` by the subnets of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyText {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its spec, as YAML.
    pub spec: String,
}

impl PolicyText {
    /// A policy.
    pub fn new(namespace: &str, name: &str, spec: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            spec: spec.into(),
        }
    }

    /// The object for the oracle.
    pub fn for_oracle(&self, net: Net, addresses: &Addresses) -> oracle::Policy {
        let networks = (net == Net::Named).then(|| [net.name().to_owned()].into());
        let object =
            json!({"metadata": {"namespace": self.namespace, "name": self.name}, "spec": self.spec(net, addresses)});
        oracle::Policy {
            networks,
            object: serde_json::from_value(object).unwrap_or_else(|e| panic!("{}: {e}", self.spec)),
        }
    }

    fn object(&self, net: Net, addresses: &Addresses) -> Value {
        let mut metadata = json!({"namespace": self.namespace, "name": self.name});
        let (version, kind) = match net {
            Net::Default => ("networking.k8s.io/v1", "NetworkPolicy"),
            Net::Named => {
                metadata["annotations"] = json!({"k8s.v1.cni.cncf.io/policy-for": net.name()});
                ("k8s.cni.cncf.io/v1beta2", "MultiNetworkPolicy")
            }
        };
        json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": self.spec(net, addresses)})
    }

    fn spec(&self, net: Net, addresses: &Addresses) -> Value {
        let [net4, net6] = subnets(net);
        let mut text = self.spec.replace("NET4", net4).replace("NET6", net6);
        for index in 0..MEMBERS {
            let (namespace, name) = names_of(index);
            for (family, v4) in [("V4", true), ("V6", false)] {
                let address = addresses.of(index, net, v4).to_string();
                text = text.replace(&format!("{family}({namespace}/{name})"), &address);
            }
        }
        // Parsed as its type: the name of namespace y would otherwise be a boolean (YAML 1.1).
        let spec: NetworkPolicySpec = serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        serde_json::to_value(spec).unwrap_or_else(|e| panic!("{text}: {e}"))
    }
}

/// Every pod's addresses on both networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses(pub(super) Vec<BTreeMap<Net, Vec<IpAddr>>>);

impl Addresses {
    /// Unused addresses, for tests without an agent.
    pub fn invented() -> Self {
        let of = |index: usize, net: Net| {
            let [v4, v6] = subnets(net).map(|subnet| subnet.split_once('/').expect("a prefix").0);
            let (v4, last) = (v4.strip_suffix("0.0").expect("a /16"), index + 10);
            [format!("{v4}0.{last}"), format!("{v6}{last}")]
                .map(|text| text.parse().expect("an address"))
                .to_vec()
        };
        Self(
            (0..MEMBERS)
                .map(|index| Net::BOTH.map(|net| (net, of(index, net))).into())
                .collect(),
        )
    }

    /// A pod's address.
    ///
    /// # Panics
    /// If it has none; every pod of the world has both families.
    pub fn of(&self, index: usize, net: Net, v4: bool) -> IpAddr {
        let found = self.0.get(index).and_then(|nets| of_family(nets.get(&net)?, v4));
        found.unwrap_or_else(|| panic!("pod {index} has no address on {} (IPv4 {v4})", net.name()))
    }
}

/// The subnets of a network.
pub(super) const fn subnets(net: Net) -> [&'static str; 2] {
    match net {
        Net::Default => ["10.244.0.0/16", "fd00:244::/64"],
        Net::Named => ["10.10.0.0/16", "fd10::/64"],
    }
}

/// The virtual address of a pod's own service.
pub(super) fn cluster_ip(net: Net, index: usize, v4: bool) -> IpAddr {
    let (range, last) = (
        u8::from(net == Net::Named),
        10 + u8::try_from(index).expect("nine pods"),
    );
    if v4 {
        [10, 96, range, last].into()
    } else {
        [0xfd00, 0x96, 0, 0, 0, 0, 0, u16::from_be_bytes([range, last])].into()
    }
}

/// The named ports of every pod.
pub(super) fn named_ports() -> Vec<NamedPort> {
    let ports = PORTS
        .into_iter()
        .flat_map(|port| Protocol::TRANSPORTS.map(|protocol| (port, protocol)));
    let named = |(port, protocol): (u16, Protocol)| NamedPort {
        name: format!("serve-{port}-{}", protocol.name().to_lowercase()),
        protocol,
        port,
    };
    ports.map(named).collect()
}

/// The same ports as an annotation of a pod.
pub(super) fn ports_annotation() -> String {
    let entry =
        |port: NamedPort| json!({"name": port.name, "containerPort": port.port, "protocol": port.protocol.name()});
    Value::from(named_ports().into_iter().map(entry).collect::<Vec<_>>()).to_string()
}

/// The ranges of the virtual addresses of a network: disjoint, because each pod is on both, and inside the ranges of an
/// API server.
pub(super) const fn service_subnets(net: Net) -> [&'static str; 2] {
    match net {
        Net::Default => ["10.96.0.0/24", "fd00:96::/120"],
        Net::Named => ["10.96.1.0/24", "fd00:96::100/120"],
    }
}

/// Both networks.
pub(super) fn networks() -> Vec<Manifest> {
    let manifest = |net: Net| {
        let services = format!("serviceSubnets: {}", json!(service_subnets(net)));
        match net {
            Net::Default => Manifest::default_network(net.name(), &subnets(net)),
            Net::Named => Manifest::network(net.name(), &subnets(net)),
        }
        .spec(&services)
    };
    Net::BOTH.map(manifest).to_vec()
}

/// Namespaces with their labels.
pub(super) fn namespaces(labels: &BTreeMap<String, Labels>) -> Vec<Value> {
    let object = |(name, labels): (&String, &Labels)| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
    labels.iter().map(object).collect()
}

/// One service per pod and network, with the pod as its only endpoint in each family.
pub(super) fn services(addresses: &Addresses) -> Vec<Value> {
    let mut objects = Vec::new();
    for index in 0..MEMBERS {
        for net in Net::BOTH {
            objects.extend(service(index, net, addresses));
        }
    }
    objects
}

fn service(index: usize, net: Net, addresses: &Addresses) -> Vec<Value> {
    let (namespace, pod) = names_of(index);
    let name = format!("{pod}-{}", net.name());
    let ports: Vec<_> = named_ports()
        .into_iter()
        .map(|port| json!({"name": port.name, "protocol": port.protocol.name(), "port": port.port}))
        .collect();
    let ips = [true, false].map(|v4| cluster_ip(net, index, v4).to_string());
    let mut labels = json!({});
    if net == Net::Named {
        labels["kni.dev/network"] = net.name().into();
    }
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {"clusterIP": ips[0], "clusterIPs": ips, "ipFamilyPolicy": "RequireDualStack", "ports": ports},
    })];
    for (family, v4) in [("IPv4", true), ("IPv6", false)] {
        objects.push(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {
                "namespace": namespace,
                "name": format!("{name}-{}", family.to_lowercase()),
                "labels": {"kubernetes.io/service-name": name},
            },
            "endpoints": [{"addresses": [addresses.of(index, net, v4).to_string()], "conditions": {"ready": true}}],
            "ports": ports,
        }));
    }
    objects
}

/// All policies of the nine pods' namespaces.
pub(super) fn policies(net: Net, policies: &[PolicyText], addresses: &Addresses) -> Vec<Value> {
    policies.iter().map(|policy| policy.object(net, addresses)).collect()
}

/// A policy that allows pods of a namespace to receive only UDP on one port of a network.
pub(super) fn canary(net: Net, namespace: &str, port: u16) -> Value {
    let spec = format!(
        "{{podSelector: {{}}, policyTypes: [Ingress], ingress: [{{ports: [{{protocol: UDP, port: {port}}}]}}]}}"
    );
    let policy = PolicyText::new(namespace, "canary", &spec);
    policy.object(net, &Addresses::invented())
}
