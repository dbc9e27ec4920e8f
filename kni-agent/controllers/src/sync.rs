//! Passes objects from the API server to the engines: policies at once, everything else after a short delay.

mod services;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use kni_enforcement::Enforcer;
use kni_flows::RemotePods;
use kni_model::{
    Sandbox, SandboxId,
    policy::{Policy, PolicyKind},
    view::DesiredNetworks,
};

use kni_cluster::{ClusterCache, Networks, Tables};
use kni_pods::Pods;
use tokio::time::timeout;

use super::{
    Cluster, ObjectControllers,
    peers::{Numbers, Peers},
    retry::Retry,
    state::{Peer, PeerChanges},
};
pub(super) use services::apply_services;
use services::{Reported, services};

/// Changes of networks, services and pods that arrive within this time are processed together. Policies do not wait.
const GATHER: Duration = Duration::from_millis(20);

/// How long policies that could not be applied wait for the next attempt. The enforcement service has pauses of its
/// own.
const CHECK: Duration = Duration::from_secs(1);

/// How long an agent that starts waits for the members of networks.
const MEMBERS_TIMEOUT: Duration = Duration::from_secs(10);

/// The resource version of each kind of policy up to which all changes are known, deletions included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PolicyVersions {
    egress: u64,
    network: u64,
    multi: u64,
}

impl PolicyVersions {
    fn of(tables: &Tables) -> Self {
        Self {
            egress: tables.egress_policies.newest(),
            network: tables.network_policies.newest(),
            multi: tables.multi_policies.newest(),
        }
    }

    /// The versions as they are reported.
    pub(super) fn by_kind(self) -> BTreeMap<String, String> {
        let kinds = [
            (PolicyKind::EgressPolicy, self.egress),
            (PolicyKind::NetworkPolicy, self.network),
            (PolicyKind::MultiNetworkPolicy, self.multi),
        ];
        kinds
            .map(|(kind, version)| (kind.as_str().to_owned(), version.to_string()))
            .into()
    }
}

impl ObjectControllers {
    /// Applies the current networks; returns whether that succeeded. Failures are logged.
    pub(super) async fn apply_networks(&self) -> bool {
        let desired = {
            let tables = self.cache.tables();
            self.networks(&tables).desired.clone()
        };
        self.apply_these(desired).await
    }

    async fn apply_these(&self, desired: DesiredNetworks) -> bool {
        let done = (self.state.apply_networks)(desired).await;
        if let Err(error) = &done {
            tracing::error!(%error, "cannot apply the cluster's networks");
        }
        done.is_ok()
    }

    /// Applies changes of networks for as long as the agent runs, and repeats what fails.
    pub(super) async fn sync_networks(self: Arc<Self>) {
        let mut changes = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut tried = None;
        let mut retry = Retry::default();
        let mut retains = false;
        loop {
            // The status of networks changes with every pod; their specification rarely does.
            let networks = {
                let tables = self.cache.tables();
                self.networks(&tables)
            };
            let is_same = |tried: &Arc<Networks>| Arc::ptr_eq(tried, &networks) || tried.desired == networks.desired;
            let same = tried.as_ref().is_some_and(is_same);
            if same {
                tried = Some(Arc::clone(&networks));
            }
            if !same || retry.is_over() || (retains && self.has_freed_number()) {
                tried = Some(Arc::clone(&networks));
                retry.ended(self.apply_these(networks.desired.clone()).await);
                // Services depend on networks.
                (self.state.networks_applied)(()).await;
                retains = (self.state.networks)().iter().any(|view| view.number_retained);
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    // The last pod of a network may have left.
                    sent = attached.changed(), if retains => sent.is_ok(),
                    () = retry.wait() => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Whether a network without pods waits for the number that the cluster has given it since.
    fn has_freed_number(&self) -> bool {
        let views = (self.state.networks)();
        views.iter().any(|view| view.number_retained && view.attachments == 0)
    }

    /// Updates the labels of the node's pods, and the pods of other nodes that policies may select. Runs as long as the
    /// agent.
    pub(super) async fn sync_pods(self: Arc<Self>) {
        let mut changes = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut seen = None;
        let mut retry = Retry::default();
        loop {
            let versions = {
                let tables = self.cache.tables();
                let versions = (
                    tables.pods.version(),
                    tables.members.version(),
                    tables.networks.version(),
                );
                (versions, *attached.borrow_and_update())
            };
            if seen != Some(versions) || retry.is_over() {
                seen = Some(versions);
                let relabeled = (self.state.relabel)(()).await;
                let covered = self.covered(|tables, network| tables.members.covers(network));
                let known = self.sync_peers().await;
                // Also after a failure: nothing more happens before it is tried again.
                self.cache.others().set_members_applied(covered);
                retry.ended(relabeled && known);
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    sent = attached.changed() => sent.is_ok(),
                    () = retry.wait() => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// The pods of other nodes, for the policy engine before the first policies. Waits for the members of the networks
    /// that the node has pods in, but not for long: without them the own pods must be enforced, too.
    pub async fn first_peers(&self) -> PeerChanges {
        let mut changes = self.cache.changes();
        let read = async { while !self.cache.tables().members.is_synced() && changes.changed().await.is_ok() {} };
        if kni_tasks::waiting(timeout(MEMBERS_TIMEOUT, read)).await.is_err() {
            tracing::warn!("the members of networks cannot be read; policies begin without the pods of other nodes");
        }
        self.peer_changes()
    }

    fn peer_changes(&self) -> PeerChanges {
        let numbers: Numbers = {
            let views = (self.state.networks)().into_iter();
            views.map(|view| (view.network.spec.name, view.network.id)).collect()
        };
        let tables = self.cache.tables();
        self.peers().update(&tables, &self.node, &numbers)
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the pods of other nodes; returns whether that succeeded.
    async fn sync_peers(&self) -> bool {
        let changes = self.peer_changes();
        if changes.is_empty() {
            return true;
        }
        let applied = (self.state.apply_peers)(changes).await;
        if !applied {
            self.peers().clear();
        }
        applied
    }
}

impl Cluster {
    /// Applies changes of policies within some milliseconds after the API server reports them. Runs as long as the
    /// agent.
    pub(super) async fn sync_policies(self: Arc<Self>) {
        let mut changes = self.objects.cache.changes();
        let mut seen = (None, None);
        let mut waits = false;
        loop {
            let (policies, namespaces, versions, newest) = {
                let tables = self.objects.cache.tables();
                let versions = (Some(tables.policy_version()), Some(tables.namespaces.version()));
                let policies = (seen.0 != versions.0).then(|| policies(&tables));
                let namespaces = (seen.1 != versions.1).then(|| {
                    let rows = tables.namespaces.rows().iter();
                    rows.map(|(key, labels)| (key.name.clone(), labels.clone())).collect()
                });
                (policies, namespaces, versions, PolicyVersions::of(&tables))
            };
            // After a failure, the enforcement service retries; this asks whether it succeeded.
            if policies.is_some() || namespaces.is_some() || (waits && self.sync.policy_problem().is_none()) {
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
                match done.await {
                    Ok(result) => {
                        seen = versions;
                        waits = result.is_err();
                    }
                    Err(error) => {
                        tracing::error!(%error, "cannot process the cluster's policies");
                        waits = true;
                    }
                }
            }
            if !waits {
                self.objects.applied_policies(newest);
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    () = tokio::time::sleep(CHECK), if waits => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
        }
    }

    /// Applies changes of Services and their endpoints for as long as the agent runs.
    pub(super) async fn sync_services(self: Arc<Self>) {
        let mut changes = self.objects.cache.changes();
        let mut reported = Reported::default();
        let mut seen = None;
        loop {
            let versions = {
                let tables = self.objects.cache.tables();
                // Networks admit Services by the labels of namespaces, and nodes are hosts outside, by all addresses.
                (
                    tables.services.version(),
                    tables.slices.version(),
                    tables.namespaces.version(),
                    tables.node_endpoints.version(),
                    tables.own_node.version(),
                )
            };
            if seen != Some(versions) {
                seen = Some(versions);
                apply_services(&self.objects.cache, &self.sync, &self.services_of_all).await;
                self.report_services(&mut reported).await;
            }
            if kni_tasks::waiting(changes.changed()).await.is_err() {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Updates labels and named ports of the attached pods before the first policies, which also gives pods theirs
    /// whose records were rebuilt.
    pub async fn relabel(&self) {
        relabel(&self.objects.cache, &self.attacher).await;
    }

    /// Gives the enforcement service the pods of other nodes before the first policies, which otherwise take from them
    /// the identities that an earlier agent wrote.
    pub async fn load_peers(&self) {
        for Peer { node, pod } in self.objects.first_peers().await.put {
            self.remote_pods.put(&node, &pod);
            self.sync.put_peer(pod);
        }
    }
}

/// Updates labels and named ports of the attached pods from the API server. Returns whether all of them could be
/// updated.
pub(super) async fn relabel(cache: &ClusterCache, attacher: &Pods) -> bool {
    let sandboxes = attacher.sandboxes();
    let changed: Vec<(SandboxId, _)> = {
        let tables = cache.tables();
        let facts = |sandbox: &Sandbox| {
            let pod = tables.pod_of(cache.node(), &sandbox.pod)?;
            let differs = sandbox.labels != pod.labels || sandbox.container_ports != pod.ports;
            differs.then(|| Arc::clone(pod))
        };
        let all = sandboxes.iter();
        all.filter_map(|sandbox| Some((sandbox.id.clone(), facts(sandbox)?)))
            .collect()
    };
    let mut succeeded = true;
    for (id, pod) in changed {
        let done = attacher.relabel(id, pod.labels.clone(), pod.ports.clone());
        if let Err(error) = done.await {
            tracing::warn!(%error, "cannot update a pod's labels; trying again");
            succeeded = false;
        }
        kni_tasks::progress();
    }
    succeeded
}

/// Passes the pods of other nodes to the policy engine, and to those who name flows; returns whether that succeeded.
pub(super) async fn apply_peers((sync, remote_pods): (Arc<Enforcer>, Arc<RemotePods>), changes: PeerChanges) -> bool {
    let done = tokio::task::spawn_blocking(move || put_peers(&sync, &remote_pods, changes)).await;
    if let Err(error) = &done {
        tracing::error!(%error, "cannot process the pods of other nodes; trying again");
    }
    done.is_ok()
}

fn put_peers(sync: &Enforcer, remote_pods: &RemotePods, PeerChanges { put, gone }: PeerChanges) {
    for Peer { node, pod } in put {
        remote_pods.put(&node, &pod);
        sync.put_peer(pod);
    }
    for id in gone {
        remote_pods.remove(&id);
        sync.leave(&id);
    }
    // With the Services that have one as an endpoint. The enforcement service logs and retries failures.
    let _told = sync.sync().is_ok();
}

/// What is enforced of each policy, also of those that are refused.
fn policies(tables: &Tables) -> Vec<Arc<Policy>> {
    tables.policies().map(|row| Arc::clone(&row.policy)).collect()
}

/// The initial objects for the agent, before it serves.
pub(super) fn initial(tables: &Tables, networks: &Networks, shared: &BTreeSet<String>) -> super::Objects {
    let namespaces = tables.namespaces.rows().iter();
    let (services, slices) = services(tables, networks, shared);
    super::Objects {
        networks: networks.desired.clone(),
        policies: policies(tables),
        namespaces: namespaces
            .map(|(key, labels)| (key.name.clone(), labels.clone()))
            .collect(),
        services,
        slices,
    }
}
