//! Passes the Services that networks admit, and their endpoints, to the enforcement service.

use std::{collections::BTreeSet, sync::Arc};

use kni_cluster::{ClusterCache, Networks, Tables};
use kni_enforcement::Enforcer;
use kni_model::{
    AccessRefusal, NetworkName, joining,
    network::EgressMode,
    service::{EndpointSlice, Service},
};

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
    (services, slices.cloned().collect())
}

/// Whether the network of a Service admits its namespace. A namespace that is not known yet has no labels.
fn admitted(tables: &Tables, networks: &Networks, service: &Service) -> Result<(), AccessRefusal> {
    let namespace = &service.reference.namespace;
    let labels = tables.namespace_labels(namespace);
    let labels = labels.unwrap_or_else(|| joining::unknown_namespace(namespace));
    let specs = networks.desired.networks.iter().map(|(spec, _)| spec);
    joining::admits_service(specs, service, &labels)
}
