//! Derives the access that interfaces from before `spec.access` need, so that an upgrade locks none of them out. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    PodNetwork, PodNetworkAttachment,
    access::{Access, NamespaceAccess, selects},
};

/// Annotations by which a pod chooses for its primary interface.
const IPS: &str = "kni.dev/ips";
const MAC: &str = "kni.dev/mac";
/// The annotation whose JSON form chooses for other interfaces.
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The primary interface.
const PRIMARY: &str = "eth0";
/// Most ranges of an access.
const MOST_RANGES: usize = 64;

/// One interface in a network.
#[derive(Debug, Clone, Copy)]
pub struct Interface<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Name inside the pod.
    pub name: &'a str,
    /// Annotations of the pod; empty where the pod is not known.
    pub annotations: &'a BTreeMap<String, String>,
}

/// What interfaces in a network make use of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InUse {
    /// Namespaces of the pods.
    pub namespaces: BTreeSet<String>,
    /// Addresses that pods have chosen.
    pub addresses: BTreeSet<String>,
    /// Whether a pod has chosen its MAC address.
    pub mac: bool,
    /// Whether an interface beside the primary one has taken the default routes.
    pub default_route: bool,
}

impl InUse {
    /// What the interfaces of a network make use of, and the attachments that made some of them.
    pub fn of<'a>(
        network: &str,
        interfaces: impl IntoIterator<Item = Interface<'a>>,
        attachments: impl IntoIterator<Item = &'a PodNetworkAttachment>,
    ) -> Self {
        let mut found = Self::default();
        for interface in interfaces {
            found.namespaces.insert(interface.namespace.to_owned());
            if interface.name == PRIMARY {
                found.add_primary(interface.annotations);
            } else {
                found.add_listed(network, &interface);
            }
        }
        for attachment in attachments {
            let spec = &attachment.spec;
            let namespace = attachment.metadata.namespace.as_deref().unwrap_or_default();
            if spec.pod_network_name == network && found.namespaces.contains(namespace) {
                found.addresses.extend(spec.addresses.iter().cloned());
                found.mac |= spec.mac.is_some();
                found.default_route |= spec.default_route;
            }
        }
        found
    }

    fn add_primary(&mut self, annotations: &BTreeMap<String, String>) {
        let ips = annotations.get(IPS).map(String::as_str).unwrap_or_default();
        let ips = ips.split(',').map(str::trim).filter(|ip| !ip.is_empty());
        self.addresses.extend(ips.map(str::to_owned));
        self.mac |= annotations.get(MAC).is_some_and(|mac| !mac.trim().is_empty());
    }

    /// The element of the list that requests the interface: by its name where it has one, else by the network's.
    fn add_listed(&mut self, network: &str, interface: &Interface<'_>) {
        let list = interface
            .annotations
            .get(NETWORKS)
            .map(String::as_str)
            .unwrap_or_default();
        let Ok(Value::Array(elements)) = serde_json::from_str(list) else {
            return;
        };
        for element in elements {
            let requests = match element.get("interface").and_then(Value::as_str) {
                Some(name) => name == interface.name,
                None => element.get("name").and_then(Value::as_str) == Some(network),
            };
            if !requests {
                continue;
            }
            let is_filled = |field: &str| {
                element
                    .get(field)
                    .and_then(Value::as_array)
                    .is_some_and(|list| !list.is_empty())
            };
            let ips = element.get("ips").and_then(Value::as_array).into_iter().flatten();
            let ips = ips
                .filter_map(Value::as_str)
                .map(|ip| ip.split_once('/').map_or(ip, |(ip, _)| ip));
            self.addresses.extend(ips.map(str::to_owned));
            self.mac |= element.get("mac").is_some_and(Value::is_string);
            self.default_route |= is_filled("default-route");
        }
    }

    /// The access that a network without one needs so that all of this stays possible; `None` where the defaults allow
    /// it. `namespaces` are the labels of all namespaces; one that is gone needs no right.
    pub fn access(
        &self,
        network: &PodNetwork,
        namespaces: &BTreeMap<String, BTreeMap<String, String>>,
    ) -> Option<Access> {
        if network.spec.access.is_some() {
            return None;
        }
        let locked_out = self.locked_out(network, namespaces);
        // Without a range, every address may be chosen: of too many, the first ones stay possible.
        let ranges = self.addresses.iter().filter_map(|ip| range(ip)).take(MOST_RANGES);
        let ranges: Vec<String> = ranges.collect();
        let access = Access {
            namespaces: (!locked_out.is_empty()).then(|| NamespaceAccess::of_names(locked_out)),
            allow_addresses: !ranges.is_empty(),
            address_ranges: ranges,
            allow_mac: self.mac,
            allow_default_route: self.default_route,
            ..Access::default()
        };
        (access != Access::default()).then_some(access)
    }

    /// The namespaces of these that a network without `access` does not admit.
    pub fn locked_out(
        &self,
        network: &PodNetwork,
        namespaces: &BTreeMap<String, BTreeMap<String, String>>,
    ) -> Vec<String> {
        if network.spec.default {
            return Vec::new();
        }
        let admitted = |name: &String| {
            let selector = network.spec.namespace_selector.as_ref();
            selector.is_some_and(|selector| namespaces.get(name).is_some_and(|labels| selects(selector, labels)))
        };
        let known = self.namespaces.iter().filter(|name| namespaces.contains_key(*name));
        known.filter(|name| !admitted(name)).cloned().collect()
    }
}

/// The range of one address.
fn range(ip: &str) -> Option<String> {
    let ip: std::net::IpAddr = ip.parse().ok()?;
    let bits = if ip.is_ipv4() { 32 } else { 128 };
    Some(format!("{ip}/{bits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(spec: &Value) -> PodNetwork {
        let object = serde_json::json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": "red"}, "spec": spec,
        });
        serde_json::from_value(object).unwrap()
    }

    fn strings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn namespaces() -> BTreeMap<String, BTreeMap<String, String>> {
        [
            ("red-team".to_owned(), strings(&[("tenant", "red")])),
            ("guest".to_owned(), strings(&[])),
        ]
        .into()
    }

    #[test]
    fn namespaces_in_use_that_the_defaults_lock_out_are_named() {
        let none = strings(&[]);
        let interface = |namespace| Interface {
            namespace,
            name: "eth0",
            annotations: &none,
        };
        let found = InUse::of("red", ["red-team", "guest", "gone"].map(interface), []);
        let selecting = serde_json::json!({ "namespaceSelector": { "matchLabels": { "tenant": "red" } } });
        for (spec, names) in [
            (selecting, Some(vec!["guest"])),
            (serde_json::json!({}), Some(vec!["guest", "red-team"])),
            (serde_json::json!({ "default": true }), None),
            (serde_json::json!({ "access": {} }), None),
        ] {
            let access = found.access(&network(&spec), &namespaces());
            let expected = names.map(|names| Access {
                namespaces: Some(NamespaceAccess::of_names(names.into_iter().map(str::to_owned))),
                ..Access::default()
            });
            assert_eq!(access, expected, "{spec}");
        }
    }

    #[test]
    fn choices_in_use_stay_possible() {
        let primary = strings(&[
            ("kni.dev/ips", "10.0.0.7, fd00::7"),
            ("kni.dev/mac", "02:00:00:00:00:01"),
        ]);
        let listed = strings(&[(
            NETWORKS,
            r#"[{"name":"red","ips":["10.0.0.8/24"],"default-route":["10.0.0.1"]},{"name":"blue","ips":["10.9.9.9"]}]"#,
        )]);
        let interfaces = [
            Interface {
                namespace: "red-team",
                name: "eth0",
                annotations: &primary,
            },
            Interface {
                namespace: "red-team",
                name: "net1",
                annotations: &listed,
            },
        ];
        let attachment = serde_json::json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetworkAttachment",
            "metadata": {"name": "a", "namespace": "red-team"},
            "spec": {"podNetworkName": "red", "podSelector": {}, "interfaceName": "net2", "addresses": ["10.0.0.9"]},
        });
        let attachment: PodNetworkAttachment = serde_json::from_value(attachment).unwrap();
        let found = InUse::of("red", interfaces, [&attachment]);
        let access = found
            .access(&network(&serde_json::json!({ "default": true })), &namespaces())
            .unwrap();
        assert_eq!(
            access.address_ranges,
            ["10.0.0.7/32", "10.0.0.8/32", "10.0.0.9/32", "fd00::7/128"]
        );
        assert!(access.allow_addresses && access.allow_mac && access.allow_default_route);
        assert_eq!(access.namespaces, None);
    }
}
