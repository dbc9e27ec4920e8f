//! Builds the input of plugins about a pod: `CNI_ARGS` and the values of capabilities.

use std::{net::IpAddr, path::PathBuf};

use kni_model::{IfName, MacAddr, PluginHints, PodRef, PortMapping, PortProtocol};
use serde_json::{Map, Value, json};

/// Annotations of Kubernetes: the pod's rates in bits per second.
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
/// The burst that container runtimes pass for no limit, in bits.
const BURST: u32 = i32::MAX.cast_unsigned();

/// A request for an interface to plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The container, by the runtime's id.
    pub container: String,
    /// Path of the namespace.
    pub netns: PathBuf,
    /// Name of the interface inside the pod.
    pub ifname: IfName,
    /// The pod.
    pub pod: PodRef,
    /// Host ports of the pod; empty for an additional interface.
    pub port_mappings: Vec<PortMapping>,
    /// Requested addresses.
    pub ips: Vec<IpAddr>,
    /// Requested MAC address.
    pub mac: Option<MacAddr>,
    /// Additional properties of the pod.
    pub hints: PluginHints,
}

impl Call {
    /// `CNI_ARGS`, as container runtimes fill it. Characters that break its syntax are removed from values.
    pub(super) fn arguments(&self) -> String {
        let plain = |text: &str| text.replace([';', '=', '\0'], "");
        let PodRef { namespace, name, uid } = &self.pod;
        [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", &plain(namespace)),
            ("K8S_POD_NAME", &plain(name)),
            ("K8S_POD_INFRA_CONTAINER_ID", &plain(&self.container)),
            ("K8S_POD_UID", &plain(uid)),
        ]
        .map(|(key, value)| format!("{key}={value}"))
        .join(";")
    }

    /// The values of all capabilities; a plugin gets those that it declares.
    pub(super) fn capability_values(&self) -> Map<String, Value> {
        let PluginHints {
            annotations,
            dns_servers,
            dns_searches,
            dns_options,
        } = &self.hints;
        let mut values = Map::new();
        let mapped: Vec<Value> = self.port_mappings.iter().filter_map(mapping).collect();
        if !mapped.is_empty() {
            values.insert("portMappings".to_owned(), Value::Array(mapped));
        }
        if let Some(rates) = bandwidth(annotations.get(INGRESS), annotations.get(EGRESS)) {
            values.insert("bandwidth".to_owned(), rates);
        }
        if !self.ips.is_empty() {
            values.insert("ips".to_owned(), json!(self.ips));
        }
        if let Some(mac) = self.mac {
            values.insert("mac".to_owned(), json!(mac.to_string()));
        }
        if !(dns_servers.is_empty() && dns_searches.is_empty() && dns_options.is_empty()) {
            let dns = json!({ "servers": dns_servers, "searches": dns_searches, "options": dns_options });
            values.insert("dns".to_owned(), dns);
        }
        if !annotations.is_empty() {
            values.insert("io.kubernetes.cri.pod-annotations".to_owned(), json!(annotations));
        }
        values
    }
}

fn mapping(mapping: &PortMapping) -> Option<Value> {
    let protocol = match mapping.protocol {
        PortProtocol::Tcp => "tcp",
        PortProtocol::Udp => "udp",
        PortProtocol::Sctp => "sctp",
    };
    let host_ip = mapping.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
    (mapping.host_port != 0).then(|| {
        json!({
            "hostPort": mapping.host_port,
            "containerPort": mapping.container_port,
            "protocol": protocol,
            "hostIP": host_ip,
        })
    })
}

/// The API server has already rejected quantities that do not parse; here they set no limit.
fn bandwidth(ingress: Option<&String>, egress: Option<&String>) -> Option<Value> {
    let rate = |text: Option<&String>| text.and_then(|text| bits(text)).filter(|rate| *rate > 0);
    let mut rates = Map::new();
    for (direction, text) in [("ingress", ingress), ("egress", egress)] {
        if let Some(rate) = rate(text) {
            rates.insert(format!("{direction}Rate"), json!(rate));
            rates.insert(format!("{direction}Burst"), json!(BURST));
        }
    }
    (!rates.is_empty()).then_some(Value::Object(rates))
}

/// Parses a Kubernetes quantity, whole numbers only.
fn bits(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor: u64 = match text.strip_prefix(digits)? {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => 1_000_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn call() -> Call {
        let port = |host_port| PortMapping {
            protocol: PortProtocol::Tcp,
            container_port: 80,
            host_port,
            host_ip: None,
        };
        Call {
            container: "5f2b".to_owned(),
            netns: "/run/netns/x".into(),
            ifname: "eth0".parse().unwrap(),
            pod: PodRef {
                namespace: "shop".to_owned(),
                name: "we;b=1".to_owned(),
                uid: "u-1".to_owned(),
            },
            port_mappings: vec![port(8080), port(0)],
            ips: vec!["10.0.0.9".parse().unwrap()],
            mac: None,
            hints: PluginHints {
                annotations: [(INGRESS.to_owned(), "10M".to_owned())].into(),
                ..PluginHints::default()
            },
        }
    }

    #[test]
    fn arguments_are_those_of_container_runtimes() {
        assert_eq!(
            call().arguments(),
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web1;K8S_POD_INFRA_CONTAINER_ID=5f2b;K8S_POD_UID=u-1"
        );
    }

    #[test]
    fn only_capabilities_with_content_have_values() {
        let values = Value::Object(call().capability_values());
        assert_eq!(
            values,
            json!({
                "portMappings": [{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "" }],
                "bandwidth": { "ingressRate": 10_000_000, "ingressBurst": 2_147_483_647 },
                "ips": ["10.0.0.9"],
                "io.kubernetes.cri.pod-annotations": { "kubernetes.io/ingress-bandwidth": "10M" },
            })
        );
    }

    #[test]
    fn quantities() {
        for (text, value) in [
            ("1", Some(1)),
            ("2k", Some(2000)),
            ("1Mi", Some(1 << 20)),
            ("x", None),
            ("1.5M", None),
        ] {
            assert_eq!(bits(text), value, "{text}");
        }
    }
}
