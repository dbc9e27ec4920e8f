//! Derives the networks of one node from the objects of the cluster, and the default networks of namespaces. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;
use kni_api::NodeEndpoint;
use kni_crd::{FromObject, PodNetwork, read_namespace_selector, read_raw_namespace_selector};
use kni_model::{
    Fabric, Home, InvalidId, NetworkName, NetworkSpec, NumberProblem, Provider,
    home::{self, Candidate, Selects},
    network::{OVERHEAD_V4, OVERHEAD_V6},
    policy::Labels,
    view::{DesiredNetworks, RefusedManifest},
};
use kube::ResourceExt as _;
use serde_json::Value;

use super::{
    blocks::HeldBlocks,
    numbers::Numbers,
    table::{Key, Refused},
    tables::Tables,
};

/// The networks of the cluster as one node sees them.
#[derive(Debug, Default)]
pub struct Networks {
    /// The valid networks, and the refused ones.
    pub desired: DesiredNetworks,
    /// All networks, the oldest first, then those that were never understood. Those that are refused have their
    /// namespaces all the same.
    candidates: Vec<Candidate>,
    /// Networks that are not applied, and why.
    pub refused: BTreeMap<String, String>,
}

impl Networks {
    /// Combines the objects; where two exclude each other, the older one takes precedence.
    ///
    /// `held` are the blocks from which the node leases.
    pub fn of(tables: &Tables, held: &HeldBlocks) -> Self {
        let mut objects: Vec<&PodNetwork> = tables.networks.rows().values().map(AsRef::as_ref).collect();
        objects.sort_by_key(|object| (object.creation_timestamp().map(|time| time.0), object.name_any()));
        let numbers = Numbers::of(tables);
        let mut networks = Self::default();
        let mut default: Option<String> = None;
        for object in objects {
            let name = object.name_any();
            let read = NetworkSpec::from_object(object)
                .map_err(|invalid| (invalid.field, invalid.reason))
                .and_then(|spec| match default.as_ref().filter(|_| spec.default) {
                    Some(holder) => Err((
                        "spec.default".to_owned(),
                        format!("network {holder} is already the default"),
                    )),
                    None => Ok(spec),
                });
            networks.candidates.push(Candidate {
                default: object.spec.default,
                selects: namespaces_of(tables, object),
                network: match &read {
                    Ok(spec) => Ok(spec.name.clone()),
                    Err((field, reason)) => Err(format!("{field}: {reason}")),
                },
                name: name.clone(),
            });
            match read {
                Ok(spec) => {
                    if spec.default {
                        default = Some(name);
                    }
                    let spec = networks.with_number(fitting(tables, object, spec), &numbers);
                    networks.add(object, spec, held);
                }
                Err((field, reason)) => networks.refuse(&name, &field, reason),
            }
        }
        networks.add_undecoded(tables);
        networks
    }

    /// Objects of a newer version of the API: the last version that this agent understood counts, if not of this
    /// process, then of an earlier one.
    fn add_undecoded(&mut self, tables: &Tables) {
        for (key, Refused { reason, spec }) in tables.networks.refused() {
            if !tables.networks.rows().contains_key(key) {
                self.desired.retained.extend(key.name.parse().ok());
                self.candidates.push(Candidate {
                    name: key.name.clone(),
                    default: spec.get("default").and_then(Value::as_bool).unwrap_or_default(),
                    selects: undecoded_namespaces(spec),
                    network: key.name.parse().map_err(|invalid: InvalidId| invalid.to_string()),
                });
            }
            self.refuse(&key.name, "object", format!("is not understood: {reason}"));
        }
    }

    /// Adds the number, or why there is none. Without the kind the cluster has no numbers, which is no problem.
    fn with_number(&mut self, spec: NetworkSpec, numbers: &Numbers) -> NetworkSpec {
        let number = match numbers.get(&spec.name) {
            Some(Ok(number)) => Some(*number),
            Some(Err(NumberProblem::NotServed)) | None => None,
            Some(Err(problem)) => {
                let problems = &mut self.desired.number_problems;
                problems.insert(spec.name.clone(), problem.clone());
                None
            }
        };
        NetworkSpec { number, ..spec }
    }

    fn add(&mut self, object: &PodNetwork, spec: NetworkSpec, held: &HeldBlocks) {
        let leased = !matches!(spec.provider, Provider::Cni(_));
        // A network that is being deleted accepts no new pods; existing pods keep it until the last one is gone.
        let enabled = spec.enabled && object.metadata.deletion_timestamp.is_none();
        let spec = NetworkSpec {
            enabled,
            blocks: leased.then(|| held.get(&spec.name).into_iter().flatten().copied().collect()),
            ..spec
        };
        let origin = format!("PodNetwork {}", spec.name);
        self.desired.networks.push((spec, origin));
    }

    fn refuse(&mut self, name: &str, field: &str, reason: String) {
        self.refused.insert(name.to_owned(), format!("{field}: {reason}"));
        self.desired.refused.push(RefusedManifest {
            file: format!("PodNetwork {name}"),
            line: 0,
            field: field.to_owned(),
            reason,
        });
    }

    /// The network that pods of a namespace with these labels join by default.
    pub fn home(&self, namespace: &str, labels: &Labels) -> Home {
        home::home(&self.candidates, namespace, labels)
    }

    /// One network.
    pub fn spec(&self, name: &NetworkName) -> Option<&NetworkSpec> {
        let mut specs = self.desired.networks.iter().map(|(spec, _)| spec);
        specs.find(|spec| spec.name == *name)
    }

    /// The cluster's default network.
    pub fn default_network(&self) -> Option<&NetworkName> {
        let mut specs = self.desired.networks.iter().map(|(spec, _)| spec);
        specs.find(|spec| spec.default).map(|spec| &spec.name)
    }
}

/// The namespaces whose pods a network has by default. Where the object is not understood any more, those of its
/// present version count: the one that was understood may have had others.
fn namespaces_of(tables: &Tables, object: &PodNetwork) -> Selects {
    match tables.networks.refused().get(&Key::new("", &object.name_any())) {
        Some(Refused { spec, .. }) => undecoded_namespaces(spec),
        None => match read_namespace_selector(object) {
            Ok(selector) => Selects::Namespaces(selector),
            Err(invalid) => Selects::Unclear(format!("{}: {}", invalid.field, invalid.reason)),
        },
    }
}

fn undecoded_namespaces(spec: &Value) -> Selects {
    match read_raw_namespace_selector(spec) {
        Ok(selector) => Selects::Namespaces(selector),
        Err(reason) => Selects::Unclear(reason),
    }
}

/// The interfaces of pods take no larger packets than fit into the tunnel of this node. Before the agent has reported
/// how the node is reached, they leave room for the longest outer headers; so they do before kni-controller has decided
/// whether there is to be a tunnel.
fn fitting(tables: &Tables, object: &PodNetwork, spec: NetworkSpec) -> NetworkSpec {
    if spec.fabric != Fabric::Overlay && !may_become_overlay(object, &spec) {
        return spec;
    }
    let mtu = match own_endpoint(tables) {
        Some(endpoint) => {
            let preferred = endpoint.spec.addresses.first();
            let is_v6 = preferred.is_some_and(|address| address.contains(':'));
            let overhead = if is_v6 { OVERHEAD_V6 } else { OVERHEAD_V4 };
            spec.mtu.min(endpoint.spec.mtu.saturating_sub(overhead))
        }
        None => spec.mtu.saturating_sub(OVERHEAD_V6),
    };
    NetworkSpec { mtu, ..spec }
}

fn may_become_overlay(object: &PodNetwork, spec: &NetworkSpec) -> bool {
    let decided = object.status.as_ref().and_then(|status| status.fabric);
    let wanted = object.spec.fabric.unwrap_or(kni_api::Fabric::Overlay);
    decided.is_none()
        && wanted == kni_api::Fabric::Overlay
        && matches!(spec.provider, Provider::Ebpf | Provider::Tap(_))
}

/// The endpoint of the agent's own node.
pub(super) fn own_endpoint(tables: &Tables) -> Option<&Arc<NodeEndpoint>> {
    let node = tables.own_node.rows().keys().next()?;
    tables.node_endpoints.get("", &node.name)
}

/// The blocks of a network that nodes are known to have, each once.
pub fn taken_blocks(tables: &Tables, network: &NetworkName) -> Vec<IpNet> {
    let of_others = tables.other_blocks.of_network(network.as_str());
    let objects = of_others.chain(tables.blocks.of_network(network.as_str()));
    let all: BTreeSet<IpNet> = objects
        .filter_map(|(_, object)| object.spec.cidr.parse().ok())
        .collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(name: &str, age: i64, spec: &serde_json::Value) -> (Key, Option<Arc<PodNetwork>>) {
        let object = serde_json::json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:00:{:02}Z", 59 - age)},
            "spec": spec,
        });
        let object: PodNetwork = serde_json::from_value(object).unwrap();
        (Key::new("", name), Some(Arc::new(object)))
    }

    fn tables(networks: &[(&str, i64, serde_json::Value)]) -> Tables {
        let mut tables = Tables::default();
        for (name, age, spec) in networks {
            let (key, value) = network(name, *age, spec);
            tables.networks.put(key, value);
        }
        tables
    }

    fn selecting(tenant: &str) -> serde_json::Value {
        serde_json::json!({"subnets": ["10.0.0.0/16"], "namespaceSelector": {"matchLabels": {"tenant": tenant}}})
    }

    #[test]
    fn a_node_leases_from_the_blocks_that_it_holds() {
        let tables = tables(&[("red", 1, selecting("red"))]);
        let block: IpNet = "10.0.0.192/26".parse().unwrap();
        let held = HeldBlocks::from([("red".parse().unwrap(), [block].into())]);
        let networks = Networks::of(&tables, &held);
        assert_eq!(networks.desired.networks[0].0.blocks, Some(vec![block]));
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert_eq!(networks.desired.networks[0].0.blocks, Some(vec![]));
    }

    #[test]
    fn blocks_of_a_network_are_taken_by_their_objects() {
        let mut tables = tables(&[("red", 1, selecting("red"))]);
        for (network, cidr) in [
            ("red", "10.0.0.128/26"),
            ("red", "10.0.1.0/26"),
            ("blue", "10.0.2.0/26"),
        ] {
            let object = serde_json::from_value(serde_json::json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": {"name": cidr},
                "spec": {"network": network, "networkUID": "u", "cidr": cidr, "nodeName": "n2", "nodeUID": "u"},
            }));
            let row = Some(Arc::new(object.unwrap()));
            tables.other_blocks.put(Key::new("", cidr), row);
        }
        let expected = ["10.0.0.128/26", "10.0.1.0/26"].map(|cidr| cidr.parse().unwrap());
        assert_eq!(taken_blocks(&tables, &"red".parse().unwrap()), expected);
    }

    #[test]
    fn the_older_network_has_the_namespace() {
        let tables = tables(&[
            ("a", 1, selecting("red")),
            ("b", 2, selecting("red")),
            ("c", 3, selecting("blue")),
        ]);
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert_eq!(home_of(&networks, "red"), Home::Network("b".parse().unwrap()));
        assert_eq!(home_of(&networks, "blue"), Home::Network("c".parse().unwrap()));
        assert_eq!(home_of(&networks, "green"), Home::Default);
    }

    fn home_of(networks: &Networks, tenant: &str) -> Home {
        networks.home("shop", &[("tenant".to_owned(), tenant.to_owned())].into())
    }

    fn assert_closed(networks: &Networks, tenant: &str, reason: &str) {
        let Home::Unknown(found) = home_of(networks, tenant) else {
            panic!("{tenant} is open: {:?}", home_of(networks, tenant));
        };
        assert!(found.contains("namespace shop") && found.contains(reason), "{found}");
    }

    #[test]
    fn a_network_that_is_not_valid_closes_the_namespaces_that_it_selects() {
        let default = serde_json::json!({"subnets": ["10.244.0.0/16"], "default": true});
        let mut invalid = selecting("red");
        invalid["subnets"] = serde_json::json!(["10.0.0.1/16"]);
        let mut second = selecting("blue");
        second["default"] = true.into();
        let mut unclear = selecting("green");
        unclear["namespaceSelector"] = serde_json::json!({"matchExpressions": [{"key": "a", "operator": "Like"}]});
        let mut all = vec![("default", 5, default), ("red", 4, invalid), ("blue", 3, second)];
        let networks = Networks::of(&tables(&all), &HeldBlocks::new());
        assert_closed(
            &networks,
            "red",
            "network red selects it, but is not valid: spec.subnets[0]",
        );
        assert_closed(
            &networks,
            "blue",
            "network blue selects it, but is not valid: spec.default",
        );
        assert_eq!(home_of(&networks, "none"), Home::Default);
        all.extend([("unclear", 2, unclear), ("own", 1, selecting("own"))]);
        let networks = Networks::of(&tables(&all), &HeldBlocks::new());
        assert_closed(&networks, "none", "network unclear may select it");
        assert_eq!(home_of(&networks, "own"), Home::Network("own".parse().unwrap()));
    }

    #[test]
    fn a_network_that_is_not_understood_has_the_namespaces_of_its_latest_version() {
        let mut tables = tables(&[("red", 1, selecting("red"))]);
        for (version, name) in [(2, "red"), (3, "new")] {
            let mut spec = selecting(if name == "red" { "purple" } else { "green" });
            spec["zzz"] = true.into();
            let refused = Refused {
                reason: "unknown field zzz".to_owned(),
                spec,
            };
            tables.networks.refuse(Key::new("", name), version, refused, |_| None);
        }
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert_eq!(home_of(&networks, "purple"), Home::Network("red".parse().unwrap()));
        assert_eq!(home_of(&networks, "red"), Home::Default);
        assert_eq!(home_of(&networks, "green"), Home::Network("new".parse().unwrap()));
        assert!(
            networks
                .desired
                .retained
                .contains(&"new".parse::<NetworkName>().unwrap())
        );
        let later = serde_json::json!({"namespaceSelector": {"matchNames": ["shop"]}});
        let refused = Refused {
            reason: "unknown field matchNames".to_owned(),
            spec: later,
        };
        tables.networks.refuse(Key::new("", "new"), 4, refused, |_| None);
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert_closed(&networks, "green", "network new may select it");
    }

    #[test]
    fn there_is_one_default_and_invalid_ones_are_named() {
        let default = serde_json::json!({"subnets": ["10.0.0.0/16"], "default": true});
        let bad = serde_json::json!({"subnets": ["10.0.0.1/16"]});
        let tables = tables(&[("young", 1, default.clone()), ("old", 2, default), ("bad", 3, bad)]);
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert_eq!(networks.default_network().map(NetworkName::as_str), Some("old"));
        assert!(networks.refused["young"].contains("network old is already the default"));
        assert!(networks.refused["bad"].contains("spec.subnets[0]"));
        assert_eq!(networks.desired.networks.len(), 1);
    }
}
