//! Compares the subnets of networks with the addresses of nodes and Services, and with the networks that nodes use
//! beside their own addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_api::{Condition, PodNetworkStatus, set_condition};
use kni_cluster::Tables;
use kni_crd::PodNetwork;
use kube::ResourceExt as _;

use super::fabric::shared_subnets;

/// The condition of a network whose subnets have no address of anything else.
const ADDRESS_SPACE_FREE: &str = "AddressSpaceFree";

/// What subnets are compared with, as of the last call of [`Self::update`].
#[derive(Debug, Default)]
pub(super) struct AddressSpace {
    /// Addresses of nodes, with their names.
    nodes: BTreeMap<IpAddr, String>,
    /// Virtual addresses of Services. Not their external ones, which the writers of Services choose.
    services: BTreeSet<IpAddr>,
    /// The default network and those of fabric Native.
    networks: BTreeMap<String, Vec<IpNet>>,
    /// The versions of the tables that were read last.
    seen: Option<[u64; 3]>,
}

/// Something else that has an address of a subnet.
#[derive(Debug, PartialEq, Eq)]
struct Meeting {
    reason: &'static str,
    what: String,
}

impl AddressSpace {
    /// Reads the tables where they have changed; nothing is known before all were read.
    pub(super) fn update(&mut self, tables: &Tables) {
        let are_read = tables.nodes.is_synced() && tables.service_addresses.is_synced();
        let now = [
            tables.nodes.version(),
            tables.service_addresses.version(),
            tables.networks.version(),
        ];
        if !are_read || self.seen == Some(now) {
            return;
        }
        let nodes = tables.nodes.rows().iter();
        let of_nodes = nodes.flat_map(|(key, row)| row.addresses.iter().map(|text| (text, &key.name)));
        self.nodes = of_nodes
            .filter_map(|(text, node)| Some((text.parse().ok()?, node.clone())))
            .collect();
        let services = tables.service_addresses.rows().values();
        self.services = services.flatten().copied().collect();
        let networks = tables.networks.rows().iter();
        self.networks = networks
            .filter_map(|(key, network)| Some((key.name.clone(), shared_subnets(network)?)))
            .collect();
        self.seen = Some(now);
    }

    /// Puts the condition into the status of a network.
    pub(super) fn note(&self, status: &mut PodNetworkStatus, object: &PodNetwork) {
        if self.seen.is_none() {
            return;
        }
        let generation = object.metadata.generation;
        let condition = match self.meeting(object) {
            None => {
                let message = "no node, no Service and no network beside it has an address of its subnets";
                Condition::now(ADDRESS_SPACE_FREE, true, "Apart", message, generation)
            }
            Some(Meeting { reason, what }) => {
                let effect = if shared_subnets(object).is_some() {
                    "its pods and what else has such an address are mistaken for each other"
                } else {
                    "at such an address its own pods may reach the one in place of the other; no other pod does"
                };
                let message = format!("{what}: {effect}");
                Condition::now(ADDRESS_SPACE_FREE, false, reason, &message, generation)
            }
        };
        set_condition(&mut status.conditions, condition);
    }

    /// The first that meets a subnet of the network.
    fn meeting(&self, object: &PodNetwork) -> Option<Meeting> {
        let subnets: Vec<IpNet> = object
            .spec
            .subnets
            .iter()
            .filter_map(|subnet| subnet.parse().ok())
            .collect();
        let found = |reason, what| Some(Meeting { reason, what });
        for subnet in &subnets {
            let range = subnet.network()..=subnet.broadcast();
            if let Some((address, node)) = self.nodes.range(range.clone()).next() {
                let what = format!("{subnet} contains {address}, an address of node {node}");
                return found("MeetsNodes", what);
            }
            if let Some(address) = self.services.range(range).next() {
                let what = format!("{subnet} contains {address}, the virtual address of a Service");
                return found("MeetsServices", what);
            }
        }
        let name = object.name_any();
        for (other, theirs) in self.networks.iter().filter(|(other, _)| **other != name) {
            let meets = |one: &IpNet| theirs.iter().find(|their| their.contains(one) || one.contains(*their));
            if let Some((subnet, their)) = subnets.iter().find_map(|subnet| Some((subnet, meets(subnet)?))) {
                return found("MeetsNetwork", format!("{subnet} meets {their} of network {other}"));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_api::ConditionStatus;
    use kni_cluster::{Key, NodeRow};
    use serde_json::{Value, json};

    use super::*;

    fn network(name: &str, spec: &Value) -> PodNetwork {
        serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": name}, "spec": spec,
        }))
        .unwrap()
    }

    /// A node, a Service, a default network and one of fabric Native.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        let row = NodeRow {
            addresses: vec!["192.0.2.9".to_owned(), "2001:db8::9".to_owned(), "n1".to_owned()],
            ..NodeRow::default()
        };
        let service = vec!["10.96.0.1".parse().unwrap()];
        tables.nodes.begin();
        tables.nodes.put(Key::new("", "n1"), Some(row));
        tables.nodes.complete();
        tables.service_addresses.begin();
        tables
            .service_addresses
            .put(Key::new("default", "kubernetes"), Some(service));
        tables.service_addresses.complete();
        for (name, spec) in [
            ("main", json!({"subnets": ["10.244.0.0/16"], "default": true})),
            ("flat", json!({"subnets": ["10.8.0.0/16"], "fabric": "Native"})),
        ] {
            let object = Arc::new(network(name, &spec));
            tables.networks.put(Key::new("", name), Some(object));
        }
        tables
    }

    fn condition(space: &AddressSpace, object: &PodNetwork) -> Option<Condition> {
        let mut status = PodNetworkStatus::default();
        space.note(&mut status, object);
        status.conditions.pop()
    }

    #[test]
    fn subnets_that_meet_nodes_services_or_shared_networks_are_reported() {
        let mut space = AddressSpace::default();
        space.update(&tables());
        for (subnet, reason, what) in [
            ("192.0.2.0/24", "MeetsNodes", "192.0.2.9, an address of node n1"),
            ("2001:db8::/64", "MeetsNodes", "2001:db8::9, an address of node n1"),
            (
                "10.96.0.0/12",
                "MeetsServices",
                "10.96.0.1, the virtual address of a Service",
            ),
            ("10.244.7.0/24", "MeetsNetwork", "10.244.0.0/16 of network main"),
            ("10.0.0.0/12", "MeetsNetwork", "10.8.0.0/16 of network flat"),
        ] {
            for spec in [
                json!({"subnets": ["172.16.0.0/24", subnet]}),
                json!({"subnets": [subnet], "fabric": "Native"}),
                json!({"subnets": [subnet], "default": true}),
            ] {
                let found = condition(&space, &network("red", &spec)).unwrap();
                assert_eq!(
                    (found.status, found.reason.as_str()),
                    (ConditionStatus::False, reason),
                    "{spec}"
                );
                assert!(found.message.contains(what), "{spec}: {}", found.message);
                let mistaken = spec.get("fabric").or(spec.get("default")).is_some();
                assert_eq!(
                    found.message.contains("mistaken"),
                    mistaken,
                    "{spec}: {}",
                    found.message
                );
            }
        }
    }

    #[test]
    fn a_network_apart_is_free_also_from_external_addresses_and_from_itself() {
        let mut space = AddressSpace::default();
        let tables = tables();
        space.update(&tables);
        let apart = network(
            "red",
            &json!({"subnets": ["203.0.113.0/24", "10.0.0.0/16", "192.0.2.16/28", "fd00::/64"]}),
        );
        let main = tables.networks.get("", "main").unwrap();
        for object in [&apart, &**main] {
            let found = condition(&space, object).unwrap();
            assert_eq!((found.status, found.reason.as_str()), (ConditionStatus::True, "Apart"));
        }
    }

    #[test]
    fn nothing_is_reported_before_nodes_and_services_are_read() {
        let mut space = AddressSpace::default();
        space.update(&Tables::default());
        assert_eq!(
            condition(&space, &network("red", &json!({"subnets": ["192.0.2.0/24"]}))),
            None
        );
    }
}
