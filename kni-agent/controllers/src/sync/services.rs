//! Passes the Services that networks admit, and their endpoints, to the enforcement service.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use kni_cluster::{ClusterCache, Networks, Tables};
use kni_enforcement::{Enforcer, Strangers, Unserved};
use kni_model::{
    AccessRefusal, NetworkName, joining,
    network::EgressMode,
    service::{EndpointSlice, ExternalAddresses, Service, ServiceRef},
};

use crate::Cluster;

/// The most events about Services that one change leads to. The others follow with the next change.
const MOST_EVENTS: usize = 8;

/// A Service in a network.
type InNetwork = (ServiceRef, NetworkName);

/// The Services and networks about which the agent has written an event that still holds.
#[derive(Debug, Default)]
pub(super) struct Reported {
    strangers: BTreeSet<InNetwork>,
    unserved: BTreeSet<InNetwork>,
}

impl Cluster {
    /// Writes an event about each Service with an endpoint on this node that gets no connections, and about each one
    /// whose first endpoint is on this node and that pods do not reach at all of its addresses: one of each for each
    /// Service and network, until it is right.
    pub(super) async fn report_services(&self, reported: &mut Reported) {
        let (node, shared) = (self.objects.node.as_str(), &self.services_of_all);
        let strangers = of_node(&self.sync.strangers(), (node, shared));
        self.report(("EndpointNotInNetwork", strangers), &mut reported.strangers)
            .await;
        let unserved = unserved_of_node(&self.sync.unserved(), node);
        self.report(("ExternalAddressNotServed", unserved), &mut reported.unserved)
            .await;
    }

    async fn report(&self, (reason, found): (&str, BTreeMap<InNetwork, String>), reported: &mut BTreeSet<InNetwork>) {
        for (key, note) in unreported(found, reported).into_iter().take(MOST_EVENTS) {
            self.events.warn_service(&key.0, reason, "Connect", &note).await;
            reported.insert(key);
        }
    }
}

/// Those that this node has to report and has not reported yet.
fn unreported(found: BTreeMap<InNetwork, String>, reported: &mut BTreeSet<InNetwork>) -> Vec<(InNetwork, String)> {
    reported.retain(|key| found.contains_key(key));
    let new = found.into_iter().filter(|(key, _)| !reported.contains(key));
    new.collect()
}

/// The node of a pod reports it: it knows best whether the pod is in the network. A shared Service is not reported, as
/// its pods are in no other network by intention.
fn of_node(strangers: &[Strangers], (node, shared): (&str, &BTreeSet<String>)) -> BTreeMap<InNetwork, String> {
    let is_here = |strangers: &&Strangers| strangers.pod.is_some() && strangers.node.as_deref() == Some(node);
    let here = strangers.iter().filter(is_here);
    let here = here.filter(|strangers| !shared.contains(&strangers.service.to_string()));
    here.map(|strangers| {
        let key = (strangers.service.clone(), strangers.network.clone());
        (key, strangers.to_string())
    })
    .collect()
}

/// All nodes know it; that of the first endpoint reports it.
fn unserved_of_node(unserved: &[Unserved], node: &str) -> BTreeMap<InNetwork, String> {
    let here = unserved
        .iter()
        .filter(|unserved| unserved.node.as_deref() == Some(node));
    here.map(|unserved| {
        let key = (unserved.service.clone(), unserved.network.clone());
        (key, unserved.to_string())
    })
    .collect()
}

/// Applies the Services and their endpoints.
pub(crate) async fn apply_services(cache: &ClusterCache, sync: &Arc<Enforcer>, shared: &BTreeSet<String>) {
    let (services, slices) = {
        let tables = cache.tables();
        services(&tables, &cache.networks(&tables), shared)
    };
    let sync = Arc::clone(sync);
    let done = tokio::task::spawn_blocking(move || {
        sync.set_services(services, slices);
        sync.sync()
    });
    if let Err(error) = done.await {
        tracing::error!(%error, "cannot process the cluster's services");
    }
}

/// The Services, with a copy of each shared one for every network with egress.
pub(super) fn services(
    tables: &Tables,
    networks: &Networks,
    shared: &BTreeSet<String>,
) -> (Vec<Service>, Vec<EndpointSlice>) {
    let leaving = networks.desired.networks.iter().map(|(spec, _)| spec);
    let leaving: Vec<&NetworkName> = leaving
        .filter(|spec| !spec.default && spec.egress == EgressMode::Masquerade)
        .map(|spec| &spec.name)
        .collect();
    let nodes = addresses_of_nodes(tables);
    let mut services = Vec::new();
    for service in tables.services.rows().values().filter_map(|row| row.as_ref().ok()) {
        let is_shared = shared.contains(&service.reference.to_string());
        // The operator shares a Service, so no network refuses it.
        if !is_shared && let Err(refusal) = admitted(tables, networks, service) {
            tracing::debug!(service = %service.reference, %refusal, "the Service is not applied");
            continue;
        }
        let mut own = service.clone();
        // A node has more ports than those of the Service, and its address leads there without a Service.
        own.external.balanced.retain(|address| !nodes.contains(address));
        if is_shared && service.network.is_none() && !service.foreign {
            services.extend(leaving.iter().map(|network| Service {
                network: Some((*network).clone()),
                external: ExternalAddresses::default(),
                ..service.clone()
            }));
        }
        services.push(own);
    }
    let slices = tables.slices.rows().values().filter_map(|row| row.as_ref().ok());
    let mut slices: Vec<EndpointSlice> = slices.cloned().collect();
    separate_hosts(tables, &mut slices);
    (services, slices)
}

/// The addresses of nodes: those of this one, and the confirmed ones of all.
fn addresses_of_nodes(tables: &Tables) -> BTreeSet<IpAddr> {
    let own = tables.own_node.rows().values();
    let own = own.flat_map(|node| node.addresses.iter().chain(&node.external_addresses));
    let own = own.filter_map(|address| address.parse().ok());
    own.chain(confirmed_addresses(tables)).collect()
}

fn confirmed_addresses(tables: &Tables) -> impl Iterator<Item = IpAddr> {
    let confirmed = tables.node_endpoints.rows().values().flat_map(|node| node.confirmed());
    confirmed.filter_map(|address| address.parse().ok())
}

/// Lets pods with a confirmed address of a node count as hosts, also where a network has that address.
fn separate_hosts(tables: &Tables, slices: &mut [EndpointSlice]) {
    let nodes: BTreeSet<IpAddr> = confirmed_addresses(tables).collect();
    for endpoint in slices.iter_mut().flat_map(|slice| &mut slice.endpoints) {
        if endpoint
            .addresses
            .first()
            .is_some_and(|address| nodes.contains(address))
        {
            endpoint.pod = None;
        }
    }
}

/// Whether the network of a Service admits its namespace. A namespace that is not known yet has no labels.
fn admitted(tables: &Tables, networks: &Networks, service: &Service) -> Result<(), AccessRefusal> {
    let namespace = &service.reference.namespace;
    let labels = tables.namespace_labels(namespace);
    let labels = labels.unwrap_or_else(|| joining::unknown_namespace(namespace));
    let specs = networks.desired.networks.iter().map(|(spec, _)| spec);
    joining::admits_service(specs, service, &labels)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::{Key, NodeRow};
    use kni_model::{PodRef, service::SliceEndpoint};
    use serde_json::json;

    use super::*;

    fn strangers(service: &str, node: &str, pod: Option<&str>) -> Strangers {
        Strangers {
            service: ServiceRef {
                namespace: "shop".to_owned(),
                name: service.to_owned(),
            },
            network: "default".parse().unwrap(),
            address: "10.10.0.5".parse().unwrap(),
            pod: pod.map(|name| PodRef::named("shop", name)),
            node: Some(node.to_owned()),
            count: 1,
        }
    }

    #[test]
    fn the_node_of_the_pod_reports_a_service_once() {
        let all = [
            strangers("db", "n1", Some("db-0")),
            strangers("web", "n2", Some("web-0")),
            strangers("manual", "n1", None),
            strangers("dns", "n1", Some("dns-0")),
        ];
        let shared = BTreeSet::from(["shop/dns".to_owned()]);
        let mut reported = BTreeSet::new();
        let mut names = |all: &[Strangers]| -> Vec<String> {
            let new = unreported(of_node(all, ("n1", &shared)), &mut reported);
            let names = new.iter().map(|((service, _), _)| service.name.clone()).collect();
            reported.extend(new.into_iter().map(|(key, _)| key));
            names
        };
        assert_eq!(names(&all), ["db"]);
        assert!(names(&all).is_empty());
        assert!(names(&[]).is_empty());
        assert_eq!(names(&all), ["db"], "it is wrong again");
    }

    #[test]
    fn the_node_of_the_first_endpoint_reports_what_is_not_served() {
        let unserved = |service: &str, node: Option<&str>| Unserved {
            service: ServiceRef {
                namespace: "shop".to_owned(),
                name: service.to_owned(),
            },
            network: "default".parse().unwrap(),
            address: "203.0.113.9".parse().unwrap(),
            reason: kni_enforcement::UnservedReason::Chosen,
            count: 1,
            node: node.map(str::to_owned),
        };
        let all = [
            unserved("web", Some("n1")),
            unserved("db", Some("n2")),
            unserved("idle", None),
        ];
        let found = unserved_of_node(&all, "n1");
        let names: Vec<&str> = found.keys().map(|(service, _)| service.name.as_str()).collect();
        assert_eq!(names, ["web"]);
    }

    #[test]
    fn an_address_of_a_node_is_none_of_a_load_balancer() {
        let mut tables = Tables::default();
        tables.node_endpoints.put(Key::new("", "n2"), Some(node_endpoint()));
        let own = NodeRow {
            addresses: vec!["192.0.2.1".to_owned()],
            external_addresses: vec!["198.51.100.1".to_owned()],
            ..NodeRow::default()
        };
        tables.own_node.put(Key::new("", "n1"), Some(own));
        let found: Vec<String> = addresses_of_nodes(&tables).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["192.0.2.1", "192.0.2.2", "198.51.100.1"]);
    }

    /// Node n2, one of whose addresses is confirmed.
    fn node_endpoint() -> Arc<kni_api::NodeEndpoint> {
        let node = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NodeEndpoint", "metadata": { "name": "n2" },
            "spec": {
                "nodeName": "n2", "nodeUID": "u2", "addresses": ["192.0.2.2", "2001:db8::2"], "port": 4789, "mtu": 1500,
                "epoch": 1,
            },
            "status": { "addresses": ["192.0.2.2"] },
        });
        Arc::new(serde_json::from_value(node).unwrap())
    }

    #[test]
    fn a_pod_with_a_confirmed_address_of_a_node_counts_as_a_host() {
        let mut tables = Tables::default();
        tables.node_endpoints.put(Key::new("", "n2"), Some(node_endpoint()));
        let endpoint = |address: &str| SliceEndpoint {
            addresses: vec![address.parse().unwrap()],
            ready: true,
            serving: true,
            terminating: false,
            node: Some("n2".to_owned()),
            pod: Some(PodRef::named("shop", "web")),
            for_zones: BTreeSet::new(),
            for_nodes: BTreeSet::new(),
        };
        let mut slices = [EndpointSlice {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            service: "web".to_owned(),
            ports: Vec::new(),
            endpoints: ["192.0.2.2", "192.0.2.3", "2001:db8::2"].map(endpoint).into(),
        }];
        separate_hosts(&tables, &mut slices);
        let are_pods: Vec<bool> = slices[0]
            .endpoints
            .iter()
            .map(|endpoint| endpoint.pod.is_some())
            .collect();
        assert_eq!(are_pods, [false, true, true], "the last address is not confirmed");
    }
}
