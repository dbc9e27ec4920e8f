//! Connects the agent to a cluster: follows the API server's objects, completes attach requests with them, and writes
//! status back.
//! Layer: service.
//!
//! ```text
//! API server ── watches ──> tables ──> engines (policies, services, networks)
//!                             │  └───> attach (networks of a pod; no request to the API server meanwhile)
//!                             └──────> controllers ── writes ──> API server
//! ```
//!
//! Everything is level-triggered: a controller compares the actual with the desired state whenever either may have
//! changed, and periodically. An unavailable API server changes nothing: the known state stays, and writes are repeated
//! later.

mod attachments;
mod blocks;
mod interfaces;
mod network_status;
mod node;
mod peers;
mod sync;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::future::BoxFuture;
use kni_crd::PodNetwork;
use kni_enforcement::Enforcer;
use kni_inspect::Inspector;
use kni_model::{
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
    view::DesiredNetworks,
};
use kni_pods::Pods;
use kni_reflectors::reflect_node;
use kube::Client;
use tokio::sync::Notify;

use kni_cluster::{ClusterCache, Key, Networks, Tables};

/// The identity of the agent in the cluster, and its options.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Name of the node.
    pub node: String,
    /// Services, as `namespace/name`, that pods of every network with egress reach by their address.
    pub shared_services: BTreeSet<String>,
}

/// The initial objects of the cluster, before anything is applied.
#[derive(Debug, Default)]
pub struct Objects {
    /// Networks.
    pub networks: DesiredNetworks,
    /// Policies of all kinds.
    pub policies: Vec<Arc<Policy>>,
    /// Namespaces.
    pub namespaces: BTreeMap<String, Labels>,
    /// Services.
    pub services: Vec<Service>,
    /// Their endpoints.
    pub slices: Vec<EndpointSlice>,
}

/// Applies networks.
pub type Apply = Arc<dyn Fn(DesiredNetworks) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// The watches of the API server, without the controllers of the node.
#[derive(Clone)]
pub struct Reflectors {
    client: Client,
    options: ClusterOptions,
    cache: ClusterCache,
}

impl Reflectors {
    /// Starts to follow the API server. Call it inside a tokio runtime.
    pub fn start(client: Client, options: ClusterOptions) -> Self {
        let cache = ClusterCache::new(&options.node);
        // They end with the runtime.
        reflect_node(&client, &cache, &options.node).detach_all();
        Self { client, options, cache }
    }

    /// The cache that the watches fill.
    pub fn cache(&self) -> ClusterCache {
        self.cache.clone()
    }

    /// Waits until every kind was read once.
    pub async fn synced(&self) {
        let mut changes = self.cache.changes();
        loop {
            let missing = self.cache.tables().missing();
            if missing.is_empty() {
                return;
            }
            tracing::debug!(?missing, "waiting for the API server");
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// The kinds that were not read yet, by name; empty once everything was read.
    pub fn missing(&self) -> Vec<&'static str> {
        self.cache.tables().missing()
    }

    /// The current objects of the cluster.
    pub fn objects(&self) -> Objects {
        let tables = self.cache.tables();
        let networks = self.cache.networks(&tables);
        sync::initial(&tables, networks, &self.options.shared_services)
    }

    /// Creates the controllers of the node.
    pub fn controllers(&self, attacher: Pods, inspector: Inspector, sync: Arc<Enforcer>, apply: Apply) -> Cluster {
        Cluster {
            shared: Arc::new(Shared {
                client: self.client.clone(),
                node: self.options.node.clone(),
                services_of_all: self.options.shared_services.clone(),
                cache: self.cache.clone(),
                attacher,
                inspector,
                sync,
                apply,
                applied_policies: AtomicU64::new(0),
                node_changed: Notify::new(),
            }),
        }
    }
}

/// The controllers of one node. Clones share them.
#[derive(Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
}

impl std::ops::Deref for Cluster {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// The state that the controllers of a node share.
pub struct Shared {
    client: Client,
    node: String,
    services_of_all: BTreeSet<String>,
    cache: ClusterCache,
    attacher: Pods,
    inspector: Inspector,
    sync: Arc<Enforcer>,
    apply: Apply,
    /// The newest policy version that was applied.
    applied_policies: AtomicU64,
    /// Notifies that the status of the node's object has changed.
    node_changed: Notify,
}

impl Cluster {
    /// Starts the controllers, after everything was read; see [`Reflectors::synced`]. The tasks end with the runtime.
    pub fn run(&self) {
        tokio::spawn(self.clone().sync_networks());
        tokio::spawn(self.clone().sync_policies());
        tokio::spawn(self.clone().sync_services());
        tokio::spawn(self.clone().sync_pods());
        tokio::spawn(self.clone().reconcile_blocks());
        tokio::spawn(self.clone().reconcile_attachments());
        tokio::spawn(self.clone().reconcile_interfaces());
        tokio::spawn(self.clone().reconcile_node());
    }

    /// The kinds that were not read yet, by name.
    pub fn missing(&self) -> Vec<&'static str> {
        self.cache.tables().missing()
    }
}

impl Shared {
    fn networks(&self, tables: &Tables) -> Networks {
        self.cache.networks(tables)
    }

    fn applied_policies(&self, newest: u64) {
        self.applied_policies.store(newest, Ordering::Relaxed);
        self.node_changed.notify_one();
    }

    /// Records a written object before the watch reports it.
    fn cache_network(&self, object: PodNetwork) {
        let name = object.metadata.name.clone().unwrap_or_default();
        self.cache
            .change(|tables| tables.networks.put(Key::new("", &name), Some(Arc::new(object))));
    }
}
