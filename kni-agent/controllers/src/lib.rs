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
mod client;
mod feed;
mod follow;
mod interfaces;
mod kinds;
mod leader;
mod lease;
mod network_status;
mod node;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

pub use client::{ClientError, connect};
use futures::future::BoxFuture;
use kni_crd::PodNetwork;
use kni_enforcement::PolicySync;
use kni_inspect::Inspector;
use kni_model::{
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
    view::WantedNetworks,
};
use kni_pods::Pods;
use kube::Client;
use tokio::sync::Notify;

use kni_cluster::{ClusterCache, Key, Networks, Tables};

/// The identity of the agent in the cluster, and its options.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Name of the node.
    pub node: String,
    /// Namespace of the Lease.
    pub namespace: String,
    /// Services, as `namespace/name`, that pods of every network with egress reach by their address.
    pub shared_services: BTreeSet<String>,
}

/// The initial objects of the cluster, before anything is applied.
#[derive(Debug, Default)]
pub struct Objects {
    /// Networks.
    pub networks: WantedNetworks,
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
pub type Apply = Arc<dyn Fn(WantedNetworks) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;
/// The watches of the API server, without the controllers of the node.
#[derive(Clone)]
pub struct Watches {
    client: Client,
    options: ClusterOptions,
    known: ClusterCache,
}

impl Watches {
    /// Starts to follow the API server. Call it inside a tokio runtime.
    pub fn start(client: Client, options: ClusterOptions) -> Self {
        let known = ClusterCache::new(&options.node);
        kinds::follow_all(&client, &known, &options.node);
        Self { client, options, known }
    }

    /// The cache that the watches fill.
    pub fn cache(&self) -> ClusterCache {
        self.known.clone()
    }

    /// Waits until every kind was read once.
    pub async fn synced(&self) {
        let mut changes = self.known.changes();
        loop {
            let missing = self.known.tables().missing();
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
        self.known.tables().missing()
    }

    /// The current objects of the cluster.
    pub fn objects(&self) -> Objects {
        let tables = self.known.tables();
        let networks = self.known.networks(&tables);
        feed::initial(&tables, networks, &self.options.shared_services)
    }

    /// Creates the controllers of the node.
    pub fn controllers(&self, attacher: Pods, inspector: Inspector, sync: Arc<PolicySync>, apply: Apply) -> Cluster {
        Cluster {
            shared: Arc::new(Shared {
                client: self.client.clone(),
                node: self.options.node.clone(),
                namespace: self.options.namespace.clone(),
                services_of_all: self.options.shared_services.clone(),
                known: self.known.clone(),
                attacher,
                inspector,
                sync,
                apply,
                policies_in_force: AtomicU64::new(0),
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
    namespace: String,
    services_of_all: BTreeSet<String>,
    known: ClusterCache,
    attacher: Pods,
    inspector: Inspector,
    sync: Arc<PolicySync>,
    apply: Apply,
    /// The newest policy version that was applied.
    policies_in_force: AtomicU64,
    /// Notifies that the status of the node's object has changed.
    node_changed: Notify,
}

impl Cluster {
    /// Starts the controllers, after everything was read; see [`Watches::synced`]. The tasks end with the runtime.
    pub fn run(&self) {
        tokio::spawn(self.clone().feed_networks());
        tokio::spawn(self.clone().feed_policies());
        tokio::spawn(self.clone().feed_services());
        tokio::spawn(self.clone().feed_pods());
        tokio::spawn(self.clone().keep_blocks());
        tokio::spawn(self.clone().keep_attachments());
        tokio::spawn(self.clone().keep_interfaces());
        tokio::spawn(self.clone().keep_node());
        tokio::spawn(self.clone().lead());
    }

    /// The kinds that were not read yet, by name.
    pub fn missing(&self) -> Vec<&'static str> {
        self.known.tables().missing()
    }
}

impl Shared {
    fn networks(&self, tables: &Tables) -> Networks {
        self.known.networks(tables)
    }

    fn policies_in_force(&self, newest: u64) {
        self.policies_in_force.store(newest, Ordering::Relaxed);
        self.node_changed.notify_one();
    }

    /// Records a written object before the watch reports it.
    fn known_network(&self, object: PodNetwork) {
        let name = object.metadata.name.clone().unwrap_or_default();
        self.known
            .change(|tables| tables.networks.put(Key::new("", &name), Some(Arc::new(object))));
    }
}
