//! Passes the Services that networks admit, and their endpoints, to the enforcement service.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use kni_cluster::{ClusterCache, Networks, Tables};
use kni_enforcement::{Enforcer, Strangers};
use kni_model::{
    AccessRefusal, NetworkName, joining,
    network::EgressMode,
    service::{EndpointSlice, Service, ServiceRef},
};

use crate::Cluster;

/// The most events about Services that one change leads to. The others follow with the next change.
const MOST_EVENTS: usize = 8;

/// The Services and networks about which the agent has written an event that still holds.
pub(super) type Reported = BTreeSet<(ServiceRef, NetworkName)>;

impl Cluster {
    /// Writes an event about each Service with an endpoint on this node that gets no connections: one for each Service
    /// and network, until it is right.
    pub(super) async fn report_strangers(&self, reported: &mut Reported) {
        let strangers = self.sync.strangers();
        let new = unreported(&strangers, (&self.objects.node, &self.services_of_all), reported);
        for strangers in new.into_iter().take(MOST_EVENTS) {
            let (service, note) = (&strangers.service, strangers.to_string());
            self.events
                .warn_service(service, "EndpointNotInNetwork", "Connect", &note)
                .await;
            reported.insert((service.clone(), strangers.network.clone()));
        }
    }
}

/// Those that this node has to report and has not reported yet. The node of a pod reports it: it knows best whether the
/// pod is in the network. A shared Service is not reported, as its pods are in no other network by intention.
fn unreported<'a>(
    strangers: &'a [Strangers],
    (node, shared): (&str, &BTreeSet<String>),
    reported: &mut Reported,
) -> Vec<&'a Strangers> {
    let is_here = |strangers: &&Strangers| strangers.pod.is_some() && strangers.node.as_deref() == Some(node);
    let here = strangers.iter().filter(is_here);
    let here = here.filter(|strangers| !shared.contains(&strangers.service.to_string()));
    let here: BTreeMap<(ServiceRef, NetworkName), &Strangers> = here
        .map(|strangers| ((strangers.service.clone(), strangers.network.clone()), strangers))
        .collect();
    reported.retain(|key| here.contains_key(key));
    let new = here.into_iter().filter(|(key, _)| !reported.contains(key));
    new.map(|(_, strangers)| strangers).collect()
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
    let mut services = Vec::new();
    for service in tables.services.rows().values().filter_map(|row| row.as_ref().ok()) {
        let is_shared = shared.contains(&service.reference.to_string());
        // The operator shares a Service, so no network refuses it.
        if !is_shared && let Err(refusal) = admitted(tables, networks, service) {
            tracing::debug!(service = %service.reference, %refusal, "the Service is not applied");
            continue;
        }
        services.push(service.clone());
        if is_shared && service.network.is_none() && !service.foreign {
            services.extend(leaving.iter().map(|network| Service {
                network: Some((*network).clone()),
                ..service.clone()
            }));
        }
    }
    let slices = tables.slices.rows().values().filter_map(|row| row.as_ref().ok());
    let mut slices: Vec<EndpointSlice> = slices.cloned().collect();
    separate_hosts(tables, &mut slices);
    (services, slices)
}

/// Lets pods with a confirmed address of a node count as hosts, also where a network has that address.
fn separate_hosts(tables: &Tables, slices: &mut [EndpointSlice]) {
    let confirmed = tables.node_endpoints.rows().values().flat_map(|node| node.confirmed());
    let nodes: BTreeSet<IpAddr> = confirmed.filter_map(|address| address.parse().ok()).collect();
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

    use kni_cluster::Key;
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
        let mut reported = Reported::default();
        let names = |found: &[&Strangers]| found.iter().map(|s| s.service.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&unreported(&all, ("n1", &shared), &mut reported)), ["db"]);
        reported.insert((all[0].service.clone(), all[0].network.clone()));
        assert!(unreported(&all, ("n1", &shared), &mut reported).is_empty());
        assert!(unreported(&[], ("n1", &shared), &mut reported).is_empty());
        assert_eq!(
            names(&unreported(&all, ("n1", &shared), &mut reported)),
            ["db"],
            "it is wrong again"
        );
    }

    #[test]
    fn a_pod_with_a_confirmed_address_of_a_node_counts_as_a_host() {
        let mut tables = Tables::default();
        let node = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NodeEndpoint", "metadata": { "name": "n2" },
            "spec": {
                "nodeName": "n2", "nodeUID": "u2", "addresses": ["192.0.2.2", "2001:db8::2"], "port": 4789, "mtu": 1500,
                "epoch": 1,
            },
            "status": { "addresses": ["192.0.2.2"] },
        });
        let node = serde_json::from_value(node).unwrap();
        tables.node_endpoints.put(Key::new("", "n2"), Some(Arc::new(node)));
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
