//! The agent's part in a cluster: follows the API server's objects, completes what runtimes ask for by what they say, and
//! tells the API server what became of it.
//! Layer: service.
//!
//! ```text
//! API server ── watches ──> tables ──> engines (policies, services, networks)
//!                             │  └───> attach (what a pod joins; no request between question and answer)
//!                             └──────> controllers ── writes ──> API server
//! ```
//!
//! Everything is level-triggered: a controller compares what is with what shall be whenever either may have changed, and
//! once in a while. An API server that is away changes nothing: what is known stays, writes are made up for afterwards.

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
    view::{StatusView, WantedNetworks},
};
use kni_pods::Pods;
use kube::Client;
use tokio::sync::Notify;

use kni_cluster::{ClusterCache, Key, Networks, Tables};

/// Who the agent is in the cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Name of the node.
    pub node: String,
    /// Namespace of the Lease.
    pub namespace: String,
    /// Services, as `namespace/name`, that pods of every network with a way out reach by their address.
    pub shared_services: BTreeSet<String>,
}

/// What the cluster says before anything is put into force.
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

/// Puts networks into force.
pub type Apply = Arc<dyn Fn(WantedNetworks) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;
/// Tells how the agent stands.
pub type Standing = Arc<dyn Fn() -> StatusView + Send + Sync>;

/// What follows the API server. It knows nothing of the node yet.
#[derive(Clone)]
pub struct Watches {
    client: Client,
    options: ClusterOptions,
    known: ClusterCache,
}

impl Watches {
    /// Begins to follow the API server. Call it inside a tokio runtime.
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

    /// What is not known yet, by name; empty once everything was read.
    pub fn missing(&self) -> Vec<&'static str> {
        self.known.tables().missing()
    }

    /// What the cluster says now.
    pub fn objects(&self) -> Objects {
        let tables = self.known.tables();
        let networks = self.known.networks(&tables);
        feed::initial(&tables, networks, &self.options.shared_services)
    }

    /// Joins the watches with the node.
    pub fn controllers(
        &self,
        attacher: Pods,
        inspector: Inspector,
        sync: Arc<PolicySync>,
        apply: Apply,
        standing: Standing,
    ) -> Cluster {
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
                standing,
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

/// What the controllers of a node have in common.
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
    standing: Standing,
    /// The newest policy that was known when policies came into force last.
    policies_in_force: AtomicU64,
    /// The node's own object has something new to tell.
    node_changed: Notify,
}

impl Cluster {
    /// Begins the work, once everything was read; see [`Watches::synced`]. The tasks end with the runtime.
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

    /// What is not known yet, by name.
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

    /// What was just written is known before the watch tells.
    fn known_network(&self, object: PodNetwork) {
        let name = object.metadata.name.clone().unwrap_or_default();
        self.known
            .change(|tables| tables.networks.put(Key::new("", &name), Some(Arc::new(object))));
    }
}
