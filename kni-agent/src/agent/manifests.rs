//! Applies the objects of manifests to the services of the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_enforcement::Enforcer;
use kni_manifests::ManifestSet;
use kni_model::{
    joining,
    service::Service,
    view::{DesiredNetworks, RefusedManifest},
};
use tokio::sync::watch;

use super::{Node, apply_networks};

/// Changes of the manifests are collected for this long, so that a folder that is being written is read once.
pub(super) const MANIFEST_DEBOUNCE: Duration = Duration::from_millis(100);

pub(super) async fn follow_manifests(node: Node, mut desired: watch::Receiver<ManifestSet>) {
    while kni_tasks::waiting(desired.changed()).await.is_ok() {
        let set = desired.borrow_and_update().clone();
        let sync = Arc::clone(&node.sync);
        let objects = set.clone();
        let uplink = Arc::clone(&node.uplink);
        let done = tokio::task::spawn_blocking(move || {
            set_objects(&sync, &objects);
            // Waits for a change of the uplink that is being carried out.
            uplink.set_rights(objects.egress, BTreeSet::new())
        })
        .await;
        if let Err(error) = done {
            tracing::error!(%error, "cannot process the changed policies and services");
        }
        node.attacher.set_namespaces(set.namespaces.clone());
        if let Err(error) = apply_networks(&node, desired_networks(&set)).await {
            tracing::error!(%error, "cannot apply the changed networks");
        }
    }
}

pub(super) fn set_objects(sync: &Enforcer, set: &ManifestSet) {
    sync.set_objects(
        set.policies.iter().map(|(policy, _)| policy.clone()).collect(),
        set.namespaces.clone(),
        admitted_services(set),
        set.slices.iter().map(|(slice, _)| slice.clone()).collect(),
    );
}

/// The Services that the networks admit. Those of networks that are not there stay: there is nothing to put them into.
fn admitted_services(set: &ManifestSet) -> Vec<Service> {
    let networks = || set.networks.iter().map(|(spec, _)| spec);
    let admitted = |service: &Service| {
        let namespace = &service.reference.namespace;
        let labels = set.namespaces.get(namespace).cloned();
        let labels = labels.unwrap_or_else(|| joining::unknown_namespace(namespace));
        let refusal = joining::admits_service(networks(), service, &labels).err();
        if let Some(refusal) = &refusal {
            tracing::warn!(service = %service.reference, %refusal, "the Service is not applied");
        }
        refusal.is_none()
    };
    let services = set.services.iter().map(|(service, _)| service);
    services.filter(|service| admitted(service)).cloned().collect()
}

pub(super) fn desired_networks(set: &ManifestSet) -> DesiredNetworks {
    let networks = set
        .networks
        .iter()
        .map(|(spec, origin)| (spec.clone(), origin.to_string()))
        .collect();
    let refused = set
        .refused
        .iter()
        .map(|refusal| {
            tracing::warn!(%refusal, "manifest refused");
            RefusedManifest {
                file: refusal.file.display().to_string(),
                line: refusal.line.unwrap_or(0),
                field: refusal.field.clone().unwrap_or_default(),
                reason: refusal.reason.clone(),
            }
        })
        .collect();
    DesiredNetworks {
        networks,
        refused,
        retained: BTreeSet::new(),
        number_problems: BTreeMap::new(),
    }
}
