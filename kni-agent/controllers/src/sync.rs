//! Passes objects from the API server to the engines: policies at once, everything else after a short delay.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_enforcement::Enforcer;
use kni_model::{
    NetworkName, Sandbox, SandboxId,
    network::EgressMode,
    policy::PolicyPod,
    service::{EndpointSlice, Service},
};

use kni_cluster::{Key, Networks, Tables};

use super::{Cluster, peers::Peers};

/// Changes of networks, services and pods that arrive within this time are processed together. Policies do not wait.
const GATHER: Duration = Duration::from_millis(20);

impl Cluster {
    /// Applies the current networks. Failures are logged and retried with the next change.
    pub(super) async fn apply_networks(&self) {
        let desired = {
            let tables = self.cache.tables();
            self.networks(&tables).desired
        };
        if let Err(error) = (self.apply)(desired).await {
            tracing::error!(%error, "cannot apply the cluster's networks");
        }
    }

    /// Applies changes of networks for as long as the agent runs.
    pub(super) async fn sync_networks(self) {
        let mut changes = self.cache.changes();
        let mut seen = None;
        loop {
            // The status of networks changes with every pod; their specification rarely does.
            let desired = {
                let tables = self.cache.tables();
                self.networks(&tables).desired
            };
            if seen.as_ref() != Some(&desired) {
                seen = Some(desired);
                self.apply_networks().await;
                // Services depend on networks.
                self.apply_services().await;
            }
            if changes.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Applies changes of policies within some milliseconds after the API server reports them. Runs as long as the
    /// agent.
    pub(super) async fn sync_policies(self) {
        let mut changes = self.cache.changes();
        let mut seen = (None, None);
        loop {
            let (policies, namespaces, versions, newest) = {
                let tables = self.cache.tables();
                let versions = (Some(tables.policy_version()), Some(tables.namespaces.version()));
                let policies = (seen.0 != versions.0).then(|| {
                    let valid = tables.policies().filter_map(|row| row.policy.as_ref().ok());
                    valid.cloned().collect::<Vec<_>>()
                });
                let namespaces = (seen.1 != versions.1).then(|| {
                    let rows = tables.namespaces.rows().iter();
                    rows.map(|(key, labels)| (key.name.clone(), labels.clone())).collect()
                });
                (policies, namespaces, versions, newest_policy(&tables))
            };
            if policies.is_some() || namespaces.is_some() {
                seen = versions;
                let sync = Arc::clone(&self.sync);
                let done = tokio::task::spawn_blocking(move || {
                    if let Some(namespaces) = namespaces {
                        sync.set_namespaces(namespaces);
                    }
                    if let Some(policies) = policies {
                        sync.set_policies(policies);
                    }
                    sync.sync_policies()
                });
                // The enforcement service logs and retries failures.
                if let Ok(Ok(_rows)) = done.await {
                    self.applied_policies(newest);
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Applies changes of Services and their endpoints for as long as the agent runs.
    pub(super) async fn sync_services(self) {
        let mut changes = self.cache.changes();
        let mut seen = None;
        loop {
            let versions = {
                let tables = self.cache.tables();
                (tables.services.version(), tables.slices.version())
            };
            if seen != Some(versions) {
                seen = Some(versions);
                self.apply_services().await;
            }
            if changes.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    async fn apply_services(&self) {
        let (services, slices) = {
            let tables = self.cache.tables();
            services(&tables, &self.networks(&tables), &self.services_of_all)
        };
        let sync = Arc::clone(&self.sync);
        let done = tokio::task::spawn_blocking(move || {
            sync.set_services(services, slices);
            sync.sync()
        });
        if let Err(error) = done.await {
            tracing::error!(%error, "cannot process the cluster's services");
        }
    }

    /// Updates the labels of the node's pods, and the pods of other nodes that policies may select. Runs as long as the
    /// agent.
    pub(super) async fn sync_pods(self) {
        let mut changes = self.cache.changes();
        let mut attached = self.attacher.changes();
        let mut seen = None;
        let (mut peers, mut refused) = (BTreeMap::new(), BTreeMap::new());
        loop {
            let versions = {
                let tables = self.cache.tables();
                let versions = (
                    tables.pods.version(),
                    tables.interfaces.version(),
                    tables.networks.version(),
                );
                (versions, *attached.borrow_and_update())
            };
            if seen != Some(versions) {
                seen = Some(versions);
                self.relabel().await;
                self.sync_peers(&mut peers, &mut refused).await;
            }
            tokio::select! {
                sent = changes.changed() => if sent.is_err() { return },
                sent = attached.changed() => if sent.is_err() { return },
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    async fn relabel(&self) {
        let sandboxes = self.attacher.sandboxes();
        let changed: Vec<(SandboxId, _)> = {
            let tables = self.cache.tables();
            let facts = |sandbox: &Sandbox| {
                let pod = tables.pods.get(&sandbox.pod.namespace, &sandbox.pod.name)?;
                let same = sandbox.pod.uid.is_empty() || sandbox.pod.uid == pod.uid;
                let differs = sandbox.labels != pod.labels || sandbox.container_ports != pod.ports;
                (same && differs).then(|| Arc::clone(pod))
            };
            let all = sandboxes.iter();
            all.filter_map(|sandbox| Some((sandbox.id.clone(), facts(sandbox)?)))
                .collect()
        };
        for (id, pod) in changed {
            let done = self.attacher.relabel(id, pod.labels.clone(), pod.ports.clone());
            if let Err(error) = done.await {
                tracing::warn!(%error, "cannot update a pod's labels");
            }
        }
    }

    async fn sync_peers(&self, known: &mut BTreeMap<SandboxId, PolicyPod>, reported: &mut BTreeMap<Key, String>) {
        let numbers: BTreeMap<NetworkName, _> = {
            let views = self.attacher.networks().into_iter();
            views.map(|view| (view.network.spec.name, view.network.id)).collect()
        };
        let Peers { pods: desired, refused } = {
            let tables = self.cache.tables();
            Peers::of(&tables, &self.networks(&tables), &self.node, &numbers)
        };
        for (interface, reason) in refused
            .iter()
            .filter(|(key, reason)| reported.get(*key) != Some(*reason))
        {
            tracing::warn!(%interface, reason, "a PodInterface gives no identity");
        }
        *reported = refused;
        let gone: BTreeSet<SandboxId> = known.keys().filter(|id| !desired.contains_key(*id)).cloned().collect();
        let new: Vec<PolicyPod> = desired
            .values()
            .filter(|pod| known.get(&pod.sandbox) != Some(pod))
            .cloned()
            .collect();
        if gone.is_empty() && new.is_empty() {
            return;
        }
        *known = desired;
        let sync = Arc::clone(&self.sync);
        let done = tokio::task::spawn_blocking(move || apply_peers(&sync, new, &gone));
        if let Err(error) = done.await {
            tracing::error!(%error, "cannot process the pods of other nodes");
        }
    }
}

fn apply_peers(sync: &Enforcer, new: Vec<PolicyPod>, gone: &BTreeSet<SandboxId>) {
    for pod in new {
        sync.put_peer(pod);
    }
    for id in gone {
        sync.leave(id);
    }
    // The enforcement service logs and retries failures.
    let _told = sync.sync_policies().is_ok();
}

/// The Services, with a copy of each shared one for every network with egress.
fn services(tables: &Tables, networks: &Networks, shared: &BTreeSet<String>) -> (Vec<Service>, Vec<EndpointSlice>) {
    let leaving = networks.desired.networks.iter().map(|(spec, _)| spec);
    let leaving: Vec<&NetworkName> = leaving
        .filter(|spec| !spec.default && spec.egress == EgressMode::Masquerade)
        .map(|spec| &spec.name)
        .collect();
    let mut services = Vec::new();
    for service in tables.services.rows().values().filter_map(|row| row.as_ref().ok()) {
        services.push(service.clone());
        let is_shared = shared.contains(&service.reference.to_string());
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

fn newest_policy(tables: &Tables) -> u64 {
    tables.policies().map(|row| row.version).max().unwrap_or(0)
}

/// The initial objects for the agent, before it serves.
pub(super) fn initial(tables: &Tables, networks: Networks, shared: &BTreeSet<String>) -> super::Objects {
    let policies = tables.policies().filter_map(|row| row.policy.as_ref().ok());
    let namespaces = tables.namespaces.rows().iter();
    let (services, slices) = services(tables, &networks, shared);
    super::Objects {
        networks: networks.desired,
        policies: policies.cloned().collect(),
        namespaces: namespaces
            .map(|(key, labels)| (key.name.clone(), labels.clone()))
            .collect(),
        services,
        slices,
    }
}
