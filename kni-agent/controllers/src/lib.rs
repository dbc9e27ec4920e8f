//! Reconciles the node with the objects of the API server, whose caches `kni-reflectors` fills, and writes status back.
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
mod egress;
mod endpoint;
mod events;
mod fabric;
mod interfaces;
mod joining;
mod members;
mod network_status;
mod node;
mod node_services;
mod peers;
mod reported;
mod retry;
mod rights;
pub mod state;
mod storage;
mod sync;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

pub use endpoint::Tunnel;
use events::Events;
use kni_enforcement::Enforcer;
use kni_fabric::Fabric;
use kni_flows::RemotePods;
use kni_inspect::Inspector;
use kni_model::{
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
    view::DesiredNetworks,
};
use kni_pods::Pods;
use kni_reflectors::{Connection, Interruptions, RequestCount, WatchState, WatchView, reflect_node};
use kni_tasks::Tasks;
use kni_uplink::Uplink;
use kube::Client;
use tokio::sync::Notify;

use kni_cluster::{ClusterCache, Networks, Tables};

use self::node_services::node_state;
pub use self::state::Apply;
use self::{node::SentStatus, peers::Peers, state::NodeState, sync::PolicyVersions};

/// How long a round of attaches may take.
const ATTACH_LIMIT: Duration = Duration::from_mins(5);

/// The identity of the agent in the cluster, and its options.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Name of the node.
    pub node: String,
    /// Services, as `namespace/name`, that pods of every network with egress reach by their address.
    pub shared_services: BTreeSet<String>,
    /// How other nodes shall reach this one.
    pub tunnel: Tunnel,
    /// How long watches and writes wait at most after failures, where tests demand less than usual.
    pub longest_pause: Option<Duration>,
    /// How long an empty block is kept, where tests demand less than usual.
    pub block_grace: Option<Duration>,
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

/// The watches of the API server, without the controllers of the node.
#[derive(Clone)]
pub struct Reflectors {
    connection: Connection,
    options: ClusterOptions,
    cache: ClusterCache,
    counts: WatchState,
    tasks: Tasks,
}

impl Reflectors {
    /// Starts to follow the API server. Call it inside a tokio runtime.
    pub fn start(connection: Connection, options: ClusterOptions, tasks: Tasks) -> Self {
        let cache = ClusterCache::of_node(&options.node);
        let counts = options.longest_pause.map_or_else(WatchState::default, WatchState::new);
        for reflector in reflect_node(&connection.client, &cache, &counts, &options.node) {
            tasks.spawn(reflector.task, reflector.run);
        }
        Self {
            connection,
            options,
            cache,
            counts,
            tasks,
        }
    }

    /// The state of each watch.
    pub fn watches(&self) -> Vec<WatchView> {
        self.counts.view()
    }

    /// The requests until now, by result.
    pub fn requests(&self) -> Vec<RequestCount> {
        self.connection.requests.view()
    }

    /// The bytes that the API server has sent until now, by resource.
    pub fn received(&self) -> BTreeMap<String, u64> {
        self.connection.requests.received()
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
            if kni_tasks::waiting(changes.changed()).await.is_err() {
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
        sync::initial(&tables, &networks, &self.options.shared_services)
    }

    /// Creates the controllers of this node.
    pub fn controllers(
        &self,
        attacher: Pods,
        inspector: &Inspector,
        sync: Arc<Enforcer>,
        (uplink, fabric): (Arc<Uplink>, Arc<Fabric>),
        apply: Apply,
    ) -> Arc<Cluster> {
        let services = (
            self.cache.clone(),
            Arc::clone(&sync),
            self.options.shared_services.clone(),
        );
        let state = node_state(&attacher, inspector, &sync, (&uplink, &fabric), apply, &services);
        Arc::new(Cluster {
            objects: self.object_controllers(state),
            events: Events::new(self.connection.client.clone(), &self.options.node),
            tasks: self.tasks.clone(),
            services_of_all: self.options.shared_services.clone(),
            remote_pods: Arc::clone(inspector.flows().remote_pods()),
            attacher,
            sync,
            uplink,
        })
    }

    /// Creates the controllers of the node's objects alone, for a node with this state.
    pub fn object_controllers(&self, state: NodeState) -> Arc<ObjectControllers> {
        Arc::new(ObjectControllers {
            client: self.connection.client.clone(),
            node: self.options.node.clone(),
            tunnel: self.options.tunnel,
            block_grace: self.options.block_grace.unwrap_or(blocks::GRACE),
            longest_pause: self.options.longest_pause.unwrap_or(retry::LONGEST),
            interruptions: self.connection.interruptions.clone(),
            cache: self.cache.clone(),
            state,
            sent_status: Mutex::default(),
            peers: Mutex::default(),
            applied_policies: Mutex::default(),
            node_changed: Notify::new(),
        })
    }
}

/// The controllers of one node, with the state that they share.
pub struct Cluster {
    objects: Arc<ObjectControllers>,
    events: Events,
    tasks: Tasks,
    services_of_all: BTreeSet<String>,
    attacher: Pods,
    sync: Arc<Enforcer>,
    remote_pods: Arc<RemotePods>,
    uplink: Arc<Uplink>,
}

/// The controllers that write the objects of one node, and derive from those of other nodes what it has to know. They
/// know the node by its [`NodeState`] only.
pub struct ObjectControllers {
    client: Client,
    node: String,
    tunnel: Tunnel,
    /// How long an empty block is kept.
    block_grace: Duration,
    /// How long writes wait at most after failures.
    longest_pause: Duration,
    interruptions: Interruptions,
    cache: ClusterCache,
    state: NodeState,
    sent_status: Mutex<Option<SentStatus>>,
    /// The pods of other nodes that the enforcement service knows.
    peers: Mutex<Peers>,
    /// The changes of policies that are applied.
    applied_policies: Mutex<PolicyVersions>,
    /// Notifies that the status of the node's object has changed.
    node_changed: Notify,
}

impl ObjectControllers {
    /// Starts the controllers, after everything was read; see [`Reflectors::synced`].
    pub fn run(self: &Arc<Self>, tasks: &Tasks) {
        tasks.spawn("sync-networks", Arc::clone(self).sync_networks());
        tasks.spawn("followed-networks", Arc::clone(self).watch_networks());
        tasks.spawn("sync-pods", Arc::clone(self).sync_pods());
        tasks.spawn("fabric", Arc::clone(self).reconcile_fabric());
        tasks.spawn("address-blocks", Arc::clone(self).reconcile_blocks());
        tasks.spawn("networkmembers", Arc::clone(self).reconcile_members());
        tasks.spawn("nodeendpoint", Arc::clone(self).reconcile_endpoint());
        tasks.spawn("podinterfaces", Arc::clone(self).reconcile_interfaces());
        tasks.spawn("node-status", Arc::clone(self).reconcile_node());
        tasks.spawn("storage", Arc::clone(self).compare_storage());
    }
}

impl Cluster {
    /// Starts the controllers, after everything was read; see [`Reflectors::synced`].
    pub fn run(self: &Arc<Self>) {
        let tasks = &self.tasks;
        self.objects.run(tasks);
        tasks.spawn("sync-policies", Arc::clone(self).sync_policies());
        tasks.spawn("sync-services", Arc::clone(self).sync_services());
        // Each of its steps is an attach.
        tasks.spawn_slow("attachments", ATTACH_LIMIT, Arc::clone(self).reconcile_attachments());
        // It may detach pods.
        tasks.spawn_slow("rights", ATTACH_LIMIT, Arc::clone(self).reconcile_rights());
        tasks.spawn("egress-claims", Arc::clone(self).reconcile_egress());
    }

    /// The controllers of the node's objects.
    pub fn objects(&self) -> &ObjectControllers {
        &self.objects
    }

    /// The kinds that were not read yet, by name.
    pub fn missing(&self) -> Vec<&'static str> {
        self.objects.cache.tables().missing()
    }
}

impl ObjectControllers {
    fn networks(&self, tables: &Tables) -> Arc<Networks> {
        self.cache.networks(tables)
    }

    fn applied_policies(&self, versions: PolicyVersions) {
        let mut applied = self.applied_policies.lock().unwrap_or_else(PoisonError::into_inner);
        if *applied != versions {
            *applied = versions;
            self.node_changed.notify_one();
        }
    }

    fn policy_versions(&self) -> PolicyVersions {
        *self.applied_policies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
