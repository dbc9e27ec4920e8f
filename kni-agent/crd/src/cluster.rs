//! Converts objects that only exist in a cluster into the fields that the agent uses: pods, attachments, and
//! definitions of other tools.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::LabelSelector};
use kni_model::{
    IfName, MacAddr, NetworkName,
    policy::{ContainerPort, Labels, Selector},
};
use kube::ResourceExt as _;
use serde::Deserialize as _;
use serde_json::Value;

use super::{PodNetwork, PodNetworkAttachment, invalid::at, labels::read_selector, names::of_object};
use crate::InvalidObject;

/// A pod, reduced to the fields that the agent uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// UID.
    pub uid: String,
    /// Of a mirror pod, the UID that the kubelet and the runtime use: that of the static pod. Who may create pods may
    /// write it; the API server lets no user change it.
    pub mirror_of: Option<String>,
    /// Labels.
    pub labels: Labels,
    /// Annotations of KNI and of the Network Plumbing Working Group.
    pub annotations: BTreeMap<String, String>,
    /// The node it is on; empty before it is scheduled.
    pub node: String,
    /// Its service account; a mirror pod has none.
    pub service_account: String,
    /// Whether it uses the network namespace of the node.
    pub host_network: bool,
    /// Whether its containers have terminated for good.
    pub finished: bool,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Named ports of its containers.
    pub ports: Vec<ContainerPort>,
}

/// The specification of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentFacts {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The network.
    pub network: NetworkName,
    /// Selects the pods.
    pub pods: Selector,
    /// Name of the interface.
    pub ifname: IfName,
    /// Addresses.
    pub ips: Vec<IpAddr>,
    /// MAC address.
    pub mac: Option<MacAddr>,
    /// Whether the default routes leave through it.
    pub default_route: bool,
}

/// Prefixes of the retained annotations.
const KEPT_ANNOTATIONS: [&str; 4] = ["kni.dev/", "kni.io/", "k8s.v1.cni.cncf.io/", "v1.multus-cni.io/"];

/// The annotation by which the kubelet marks the object of a static pod: the UID of the static pod.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The service account of pods that name none.
const DEFAULT_ACCOUNT: &str = "default";

/// Reduces a pod to the fields that the agent uses.
pub fn read_pod(pod: Pod) -> PodFacts {
    let Pod { metadata, spec, status } = pod;
    let spec = spec.unwrap_or_default();
    let phase = status.and_then(|status| status.phase).unwrap_or_default();
    let mut annotations = metadata.annotations.unwrap_or_default();
    let mirror_of = annotations.remove(MIRROR_ANNOTATION);
    // The API server refuses a mirror pod that names one, and gives it no other.
    let service_account = if mirror_of.is_some() {
        String::new()
    } else {
        let named = spec.service_account_name.filter(|name| !name.is_empty());
        named.unwrap_or_else(|| DEFAULT_ACCOUNT.to_owned())
    };
    annotations.retain(|key, _| KEPT_ANNOTATIONS.iter().any(|prefix| key.starts_with(prefix)));
    // Of the init containers, only those that keep running (sidecars) have reachable ports. A name means the port of
    // the first container that has it with the protocol, and sidecars come last: so the EndpointSlice controller finds
    // the `targetPort` of a Service.
    let lasting = spec.init_containers.unwrap_or_default().into_iter();
    let lasting = lasting.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let containers = spec.containers.into_iter().chain(lasting);
    let mut ports: Vec<ContainerPort> = Vec::new();
    for port in containers.flat_map(|container| container.ports.unwrap_or_default()) {
        let protocol = match port.protocol.as_deref() {
            None | Some("TCP") => 6,
            Some("UDP") => 17,
            Some("SCTP") => 132,
            Some(_) => continue,
        };
        let (Some(name), Ok(number)) = (port.name, u16::try_from(port.container_port)) else {
            continue;
        };
        if !ports
            .iter()
            .any(|known| known.name == name && known.protocol == protocol)
        {
            ports.push(ContainerPort {
                name,
                protocol,
                port: number,
            });
        }
    }
    PodFacts {
        uid: metadata.uid.unwrap_or_default(),
        mirror_of,
        labels: metadata.labels.unwrap_or_default(),
        annotations,
        node: spec.node_name.unwrap_or_default(),
        service_account,
        host_network: spec.host_network.unwrap_or_default(),
        finished: phase == "Succeeded" || phase == "Failed",
        deleting: metadata.deletion_timestamp.is_some(),
        ports,
    }
}

/// The namespaces for whose pods a network is the default; `None`: it is not the default of any namespace.
pub fn read_namespace_selector(object: &PodNetwork) -> Result<Option<Selector>, InvalidObject> {
    let selector = object.spec.namespace_selector.as_ref();
    selector
        .map(|selector| read_selector("spec.namespaceSelector", selector))
        .transpose()
        .map_err(of_object("PodNetwork", &object.metadata))
}

/// [`read_namespace_selector`] of a specification that cannot be decoded as a whole; the error is the reason.
pub fn read_raw_namespace_selector(spec: &Value) -> Result<Option<Selector>, String> {
    let Some(raw) = spec.get("namespaceSelector").filter(|raw| !raw.is_null()) else {
        return Ok(None);
    };
    // The type ignores fields of a later release, without which the selector would select other namespaces.
    refuse_unknown(raw, &["matchLabels", "matchExpressions"])?;
    let expressions = raw
        .get("matchExpressions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    for expression in expressions {
        refuse_unknown(expression, &["key", "operator", "values"])?;
    }
    let selector = LabelSelector::deserialize(raw).map_err(|error| error.to_string())?;
    let read = read_selector("spec.namespaceSelector", &selector);
    read.map(Some).map_err(|(field, reason)| format!("{field}: {reason}"))
}

fn refuse_unknown(object: &Value, known: &[&str]) -> Result<(), String> {
    let mut fields = object.as_object().into_iter().flat_map(serde_json::Map::keys);
    match fields.find(|field| !known.contains(&field.as_str())) {
        Some(field) => Err(format!("unknown field {field}")),
        None => Ok(()),
    }
}

/// Validates an attachment.
pub fn read_attachment(object: &PodNetworkAttachment) -> Result<AttachmentFacts, InvalidObject> {
    let spec = &object.spec;
    let read = || {
        let network = spec.pod_network_name.parse();
        let ifname = spec.interface_name.parse();
        let ips = super::cidr::read_addresses("spec.addresses", &spec.addresses)?;
        let mac = spec.mac.as_deref().map(str::parse).transpose();
        Ok(AttachmentFacts {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            network: network.map_err(|invalid: kni_model::InvalidId| at("spec.podNetworkName", invalid.to_string()))?,
            pods: read_selector("spec.podSelector", &spec.pod_selector)?,
            ifname: ifname.map_err(|invalid: kni_model::InvalidId| at("spec.interfaceName", invalid.to_string()))?,
            ips,
            mac: mac.map_err(|invalid| at("spec.mac", format!("{invalid}")))?,
            default_route: spec.default_route,
        })
    };
    read().map_err(of_object("PodNetworkAttachment", &object.metadata))
}

/// The network that a `NetworkAttachmentDefinition` for the KNI plugin refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Definition {
    /// The one that its configuration names, or the one of its own name where it has no configuration.
    Network(NetworkName),
    /// The cluster's default network: its configuration names none.
    Default,
    /// None, for this reason.
    Invalid(String),
}

/// Reads a `NetworkAttachmentDefinition`, whose configuration has the keys of the KNI plugin; `None` if it is for
/// another plugin.
pub fn read_attachment_definition(name: &str, config: Option<&str>) -> Option<Definition> {
    let named = |field: &str, name: &str| match name.parse::<NetworkName>() {
        Ok(network) => Definition::Network(network),
        Err(invalid) => Definition::Invalid(format!("{field}: {invalid}")),
    };
    let Some(config) = config.filter(|config| !config.trim().is_empty()) else {
        return Some(named("metadata.name", name));
    };
    let config: Value = match serde_json::from_str(config) {
        Ok(config) => config,
        Err(error) => return Some(Definition::Invalid(format!("spec.config: {error}"))),
    };
    let plugin = config.get("plugins").map_or(Some(&config), |plugins| plugins.get(0));
    let kind = plugin.and_then(|plugin| plugin.get("type")).and_then(Value::as_str);
    match (kind, plugin.and_then(|plugin| plugin.get("network"))) {
        (None, _) => Some(Definition::Invalid("spec.config: no plugin type".to_owned())),
        (Some("kni-cni"), None | Some(Value::Null)) => Some(Definition::Default),
        (Some("kni-cni"), Some(Value::String(network))) => Some(named("spec.config: network", network)),
        (Some("kni-cni"), Some(other)) => {
            let reason = format!("spec.config: network: {other} is not a name");
            Some(Definition::Invalid(reason))
        }
        (Some(_), _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_for_our_plugin_name_a_network_as_the_plugin_reads_it() {
        let of = |config| read_attachment_definition("blue", config);
        let network = |name: &str| Some(Definition::Network(name.parse().unwrap()));
        assert_eq!(of(None), network("blue"));
        for config in [
            r#"{"type":"kni-cni","name":"x","network":"red"}"#,
            r#"{"type":"kni-cni","name":"x","network":"red","podNetwork":"green"}"#,
            r#"{"name":"x","network":"green","plugins":[{"type":"kni-cni","network":"red"},{"type":"tuning"}]}"#,
        ] {
            assert_eq!(of(Some(config)), network("red"), "{config}");
        }
        for config in [
            r#"{"type":"kni-cni","name":"red"}"#,
            r#"{"type":"kni-cni","network":null}"#,
            r#"{"name":"x","plugins":[{"type":"kni-cni","podNetwork":"green"}]}"#,
        ] {
            assert_eq!(of(Some(config)), Some(Definition::Default), "{config}");
        }
        assert_eq!(of(Some(r#"{"type":"macvlan","name":"red","network":"red"}"#)), None);
    }

    #[test]
    fn definitions_that_are_not_valid_name_no_network() {
        for (config, expected) in [
            ("{", "spec.config: EOF"),
            (r#"{"name":"x"}"#, "no plugin type"),
            (r#"{"name":"x","plugins":[]}"#, "no plugin type"),
            (r#"{"type":"kni-cni","network":"Blue Network"}"#, "spec.config: network"),
            (r#"{"type":"kni-cni","network":""}"#, "spec.config: network"),
            (r#"{"type":"kni-cni","network":7}"#, "7 is not a name"),
        ] {
            let Some(Definition::Invalid(reason)) = read_attachment_definition("blue", Some(config)) else {
                panic!("{config}");
            };
            assert!(reason.contains(expected), "{config}: {reason}");
        }
        let unnamed = read_attachment_definition("blue.v1", None);
        assert!(matches!(unnamed, Some(Definition::Invalid(_))), "{unnamed:?}");
    }

    #[test]
    fn a_selector_is_read_out_of_a_specification_that_is_not_understood() {
        let of = |selector: Value| {
            read_raw_namespace_selector(&serde_json::json!({"zzz": 1, "namespaceSelector": selector}))
        };
        let found = of(serde_json::json!({"matchLabels": {"tenant": "red"}}))
            .unwrap()
            .unwrap();
        assert!(found.matches(&[("tenant".to_owned(), "red".to_owned())].into()) && !found.matches(&Labels::new()));
        assert_eq!(of(Value::Null), Ok(None));
        assert_eq!(read_raw_namespace_selector(&Value::Null), Ok(None));
        for (selector, reason) in [
            (serde_json::json!({"matchNames": ["a"]}), "unknown field matchNames"),
            (
                serde_json::json!({"matchExpressions": [{"key": "a", "operator": "Exists", "zzz": 1}]}),
                "zzz",
            ),
            (
                serde_json::json!({"matchExpressions": [{"key": "a", "operator": "Like"}]}),
                "Like",
            ),
            (serde_json::json!({"matchLabels": ["a"]}), "expected a map"),
            (serde_json::json!("all"), "invalid type"),
        ] {
            let error = of(selector.clone()).unwrap_err();
            assert!(error.contains(reason), "{selector}: {error}");
        }
    }

    #[test]
    fn a_pod_keeps_what_is_needed() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "a", "uid": "u", "labels": {"app": "x"},
                "annotations": {"kni.dev/network": "red", "other.io/x": "y"}},
            "spec": {"nodeName": "n1", "initContainers": [
                    {"name": "i", "ports": [{"name": "gone", "containerPort": 1}]},
                    {"name": "s", "restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 2}]}],
                "containers": [{"name": "c", "ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"},
                    {"containerPort": 9}]}]},
            "status": {"phase": "Failed"}
        }))
        .unwrap();
        let facts = read_pod(pod);
        assert_eq!(
            (facts.uid.as_str(), facts.node.as_str(), facts.finished),
            ("u", "n1", true)
        );
        assert_eq!(facts.annotations.len(), 1);
        let ports: Vec<_> = facts
            .ports
            .iter()
            .map(|port| (port.name.as_str(), port.protocol))
            .collect();
        assert_eq!(ports, [("dns", 17), ("side", 6)]);
    }

    #[test]
    fn a_mirror_pod_keeps_the_uid_of_its_static_pod_and_has_no_service_account() {
        let read = |annotations: Value, account: Value| {
            let pod = serde_json::json!({
                "metadata": { "name": "a", "uid": "u", "annotations": annotations },
                "spec": { "serviceAccountName": account, "containers": [] },
            });
            read_pod(serde_json::from_value(pod).unwrap())
        };
        let mirror = read(serde_json::json!({ MIRROR_ANNOTATION: "hash" }), Value::Null);
        assert_eq!((mirror.uid.as_str(), mirror.mirror_of.as_deref()), ("u", Some("hash")));
        assert_eq!(mirror.service_account, "");
        assert!(mirror.annotations.is_empty());
        let forged = read(serde_json::json!({ MIRROR_ANNOTATION: "" }), "admin".into());
        assert_eq!(
            (forged.mirror_of.as_deref(), forged.service_account.as_str()),
            (Some(""), "")
        );
        // The hash alone does not make a mirror pod.
        let other = read(serde_json::json!({ "kubernetes.io/config.hash": "hash" }), Value::Null);
        assert_eq!((other.mirror_of, other.service_account.as_str()), (None, "default"));
        assert_eq!(read(Value::Null, "admin".into()).service_account, "admin");
    }

    #[test]
    fn a_named_port_is_that_of_the_first_container_before_sidecars() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "a"},
            "spec": {"initContainers": [{"name": "s", "restartPolicy": "Always", "ports": [
                    {"name": "metrics", "containerPort": 9001}, {"name": "metrics-udp", "containerPort": 9002}]}],
                "containers": [
                    {"name": "c", "ports": [{"name": "metrics", "containerPort": 7000}]},
                    {"name": "d", "ports": [{"name": "metrics", "containerPort": 7001},
                        {"name": "dns", "containerPort": 53, "protocol": "UDP"}]},
                    {"name": "e", "ports": [{"name": "dns", "containerPort": 5353}]}]},
        }))
        .unwrap();
        let ports: Vec<_> = read_pod(pod)
            .ports
            .into_iter()
            .map(|port| (port.name, port.protocol, port.port))
            .collect();
        let expected = [
            ("metrics", 6, 7000),
            ("dns", 17, 53),
            ("dns", 6, 5353),
            ("metrics-udp", 6, 9002),
        ];
        assert_eq!(
            ports,
            expected.map(|(name, protocol, port)| (name.to_owned(), protocol, port))
        );
    }
}
