//! Builds objects for the API server from short descriptions, and finds their resources.

use anyhow::{Context as _, Result};
use kube::{
    api::{ApiResource, GroupVersionKind},
    core::TypeMeta,
};
use serde_json::{Value, json};

/// The annotation of a mirror pod: the UID of its static pod.
pub const MIRROR: &str = "kubernetes.io/config.mirror";

/// The resource of an object, its namespace if it is namespaced, and its name.
pub fn locate(object: &Value) -> Result<(ApiResource, Option<String>, String)> {
    let types: TypeMeta = serde_json::from_value(object.clone()).with_context(|| format!("types of {object}"))?;
    let kind = GroupVersionKind::try_from(&types).with_context(|| format!("types of {object}"))?;
    let plural = match kind.kind.as_str() {
        "NetworkPolicy" => "networkpolicies".into(),
        "EgressPolicy" => "egresspolicies".into(),
        "EgressAddressPool" => "egressaddresspools".into(),
        "EgressAddressClaim" => "egressaddressclaims".into(),
        "NetworkMembers" => "networkmembers".into(),
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies".into(),
        "MultiNetworkPolicy" => "multi-networkpolicies".into(),
        "NetworkAttachmentDefinition" => "network-attachment-definitions".into(),
        other => format!("{}s", other.to_lowercase()),
    };
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().with_context(|| format!("name of {object}"))?;
    let namespace = metadata["namespace"].as_str().map(str::to_owned);
    Ok((
        ApiResource::from_gvk_with_plural(&kind, &plural),
        namespace,
        name.into(),
    ))
}

/// A namespace with labels.
pub fn namespace(name: &str, labels: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } })
}

/// A network with these subnets that pods of every namespace may join, with everything that they may choose; `more` is
/// merged into its spec.
pub fn network(name: &str, subnets: &[&str], more: &Value) -> Value {
    let mut open = json!({ "access": {
        "namespaces": { "from": "All" }, "allowAddresses": true, "allowMac": true, "allowDefaultRoute": true,
    } });
    merge(&mut open, more);
    network_without_access(name, subnets, &open)
}

/// A network with these subnets, and nothing about who may join unless `more` has it; `more` is merged into its spec.
pub fn network_without_access(name: &str, subnets: &[&str], more: &Value) -> Value {
    let mut spec = json!({ "subnets": subnets });
    merge(&mut spec, more);
    json!({ "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name }, "spec": spec })
}

/// The default network.
pub fn default_network() -> Value {
    network(
        "default",
        &["10.244.0.0/16", "fd00:244::/64"],
        &json!({ "default": true }),
    )
}

/// A pod for a node.
pub fn pod(namespace: &str, name: &str, node: &str) -> Value {
    pod_with(namespace, name, node, &json!({}))
}

/// A pod for a node; `more` with labels and annotations is merged into its metadata.
pub fn pod_with(namespace: &str, name: &str, node: &str, more: &Value) -> Value {
    let mut metadata = json!({ "name": name, "namespace": namespace });
    merge(&mut metadata, more);
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": node,
            "containers": [{ "name": "main", "image": "none.invalid/none", "ports": [{ "containerPort": 8080 }] }],
            "tolerations": [{ "operator": "Exists" }],
        },
    })
}

/// Joins the pods of a namespace with the label `join: <name>` to a network.
pub fn attachment(namespace: &str, name: &str, network: &str, interface: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodNetworkAttachment",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "podNetworkName": network,
            "interfaceName": interface,
            "podSelector": { "matchLabels": { "join": name } },
        },
    })
}

/// A policy for all pods of a namespace; `spec` is merged into its spec.
pub fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    let mut whole = json!({ "podSelector": {} });
    merge(&mut whole, spec);
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": name, "namespace": namespace },
        "spec": whole,
    })
}

/// A Service with one UDP and one TCP port without a selector, and the slice that refers to `backend`.
pub fn service(namespace: &str, name: &str, port: u16, backend: (&str, u16), labels: &Value) -> [Value; 2] {
    let ports = |port: u16| {
        json!([
            { "name": "udp", "protocol": "UDP", "port": port },
            { "name": "tcp", "protocol": "TCP", "port": port },
        ])
    };
    let family = if backend.0.contains(':') { "IPv6" } else { "IPv4" };
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": namespace, "labels": labels },
        "spec": { "ports": ports(port), "ipFamilies": [family], "ipFamilyPolicy": "SingleStack" },
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{name}-{}", family.to_lowercase()),
            "namespace": namespace,
            "labels": { "kubernetes.io/service-name": name },
        },
        "addressType": family,
        "ports": ports(backend.1),
        "endpoints": [{ "addresses": [backend.0], "conditions": { "ready": true } }],
    });
    [service, slice]
}

/// A `NetworkAttachmentDefinition` that refers to a `PodNetwork`.
pub fn attachment_definition(namespace: &str, name: &str, network: &str) -> Value {
    let config = json!({ "cniVersion": "1.0.0", "type": "kni-cni", "name": "any", "network": network });
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": { "name": name, "namespace": namespace },
        "spec": { "config": config.to_string() },
    })
}

/// Merges the fields of `more` recursively into the objects of `onto`.
pub fn merge(onto: &mut Value, more: &Value) {
    match (onto, more) {
        (Value::Object(onto), Value::Object(more)) => {
            for (key, value) in more {
                merge(onto.entry(key).or_insert(Value::Null), value);
            }
        }
        (onto, more) => *onto = more.clone(),
    }
}
