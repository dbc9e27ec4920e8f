//! Attaches and detaches pod sandboxes: owns the order of steps, the locks, the undo and the state in memory.
//! Layer: service.
//!
//! ```text
//! attach:  plan (pure) -> record Pending -> policies in force -> per interface: veth, programs, addresses, routes, dataplane
//!          row -> record Ready
//! detach:  record Deleting -> dataplane rows, host routes -> forget, release, queue the device -> (background) delete it
//! ```
//!
//! A failed attach is undone by the same code that detaches, driven by the record: whatever was done is in it (I5).

mod bandwidth;
mod cleanup;
mod detach;
mod error;
mod existing;
mod fast_path;
mod garbage;
mod gate;
mod host_ports;
mod inside;
mod interface;
mod lock;
mod namespace;
mod networks;
mod plan;
mod provider;
mod relabel;
mod reserve;
mod restore;
mod sandbox;
mod slots;
mod state;
mod views;
mod warm;

use std::{
    future::Future,
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

pub use cleanup::cleanup;
pub use error::AttachError;
pub use garbage::{Garbage, GarbageRequest};
pub use gate::PolicyGate;
use kni_dataplane::Dataplane;
use kni_model::{
    AttachRequest, Attachment, EndpointId, NetnsIdentity, NetworkId, NetworkName, Phase, PodRef, Sandbox, SandboxId,
    durations::Durations,
    policy::{ContainerPort, Labels},
    view::{
        DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, Owner, RefusedManifest, StatusView,
        WantedNetworks,
    },
};
use kni_netlink::{Netlink, Netns};
use kni_plugins::Plugins;
use kni_store::{Change, Store};
pub use namespace::DeleteRequest;
use tokio::sync::{Notify, watch};

use self::{lock::KeyedLocks, state::State};

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// Where namespaces are mounted.
    pub netns_dir: PathBuf,
    /// Sandboxes kept ready ahead of `CreateNetwork`.
    pub warm_sandboxes: u32,
    /// CNI plugins, where they may be run.
    pub plugins: Option<Plugins>,
}

/// The attach service. Clones share it.
///
/// # Guarantees
/// - Idempotent by sandbox: a repeated attach gives the same answer, detach and delete of anything unknown succeed (I6).
/// - All or nothing: a failed attach leaves nothing behind, also when the agent is killed in its middle.
/// - When attach answers, traffic flows as the policies say; when detach answers, none does, and the addresses are free.
/// - Work once begun is finished even if the caller goes away, and is bounded in time.
///
/// # Assumptions
/// - One agent per node: the store's lock sees to it.
#[derive(Clone)]
pub struct Attacher {
    inner: Arc<Inner>,
}

struct Inner {
    options: AttachOptions,
    netlink: Netlink,
    teardown_netlink: Netlink,
    dataplane: Arc<Dataplane>,
    gate: Arc<dyn PolicyGate>,
    store: Store,
    /// Never held across an await. Changes to it and to the store happen under one lock, so that both have one order.
    state: Mutex<State>,
    locks: KeyedLocks,
    node_netns: NetnsIdentity,
    /// The node's own namespace, where lent devices come back to.
    home: Netns,
    reaper_wanted: Notify,
    removed: Notify,
    warm_wanted: Notify,
    stopping: AtomicBool,
    attach_times: Mutex<Durations>,
    changes: watch::Sender<u64>,
}

impl Attacher {
    /// Takes over what an earlier agent left and begins the background work. Call it inside a tokio runtime, in the
    /// node's network namespace. Attaching begins to work with the first [`Self::apply_networks`].
    pub async fn start(
        options: AttachOptions,
        dataplane: Arc<Dataplane>,
        gate: Arc<dyn PolicyGate>,
        store: Store,
    ) -> Result<Self, AttachError> {
        let node = |error: kni_netlink::Error| error::kernel_of_node("connecting to rtnetlink", &error);
        let contents = store.load().map_err(|error| AttachError::Store(error::chain(&error)))?;
        let home = Netns::current().map_err(node)?;
        let inner = Arc::new(Inner {
            state: Mutex::new(State::new(dataplane.capacity())),
            options,
            netlink: Netlink::new().map_err(node)?,
            teardown_netlink: Netlink::for_teardown().map_err(node)?,
            dataplane,
            gate,
            store,
            locks: KeyedLocks::default(),
            node_netns: home.id(),
            home,
            reaper_wanted: Notify::new(),
            removed: Notify::new(),
            warm_wanted: Notify::new(),
            stopping: AtomicBool::new(false),
            attach_times: Mutex::default(),
            changes: watch::Sender::new(0),
        });
        inner.restore(contents).await?;
        tokio::spawn(Arc::clone(&inner).reap());
        tokio::spawn(Arc::clone(&inner).keep_warm());
        tokio::spawn(Arc::clone(&inner).collect_garbage());
        tokio::spawn(Arc::clone(&inner).watch_namespaces());
        Ok(Self { inner })
    }

    /// Makes a fresh network namespace and returns its path; from the warm pool where that has one, about 0.1 ms.
    pub async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        let prefix = path_prefix.to_owned();
        self.run(|inner| async move { inner.create_namespace(pod, &prefix).await })
            .await
    }

    /// Removes the namespace of a sandbox, after detaching it. What is unknown succeeds.
    pub async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.delete(request).await }).await
    }

    /// Attaches a sandbox; see the type's guarantees.
    pub async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        self.run(|inner| async move { inner.attach(request).await }).await
    }

    /// Ties a namespace to a sandbox without attaching it, so that deleting the sandbox removes it. What is not one of
    /// ours is left as it is.
    pub async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.claim(&sandbox, &netns).await })
            .await
    }

    /// Detaches a sandbox. What is unknown succeeds.
    pub async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.detach(&sandbox).await }).await
    }

    /// Takes back what one CNI call made. What is unknown, or was made by another call, stays and succeeds.
    pub async fn undo(&self, sandbox: SandboxId, invocation: String) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.undo_invocation(&sandbox, &invocation).await })
            .await
    }

    /// Detaches what a CNI runtime no longer has. Goes on after errors and tells them.
    pub async fn collect_garbage(&self, request: GarbageRequest) -> Result<Garbage, AttachError> {
        self.run(|inner| async move { Ok(inner.collect_for_runtime(request).await) })
            .await
    }

    /// An attached sandbox, with its further interfaces.
    pub fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        let state = self.inner.state();
        let ready = |found: &&Arc<Sandbox>| found.phase == Phase::Ready;
        let found = state.sandboxes.get(sandbox).filter(ready)?;
        let all = state.sandboxes.values().filter(ready);
        let mut further: Vec<&Arc<Sandbox>> = all.filter(|child| child.parent.as_ref() == Some(sandbox)).collect();
        if further.is_empty() {
            return Some(Arc::clone(found));
        }
        further.sort_by_key(|child| &child.id);
        let mut whole = Sandbox::clone(found);
        whole
            .attachments
            .extend(further.into_iter().flat_map(|child| child.attachments.iter().cloned()));
        Some(Arc::new(whole))
    }

    /// Puts the wanted networks into force.
    pub async fn apply_networks(&self, wanted: WantedNetworks) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.apply_networks(wanted).await })
            .await
    }

    /// The networks, the default one first, then by name.
    pub fn networks(&self) -> Vec<NetworkView> {
        self.inner.network_views()
    }

    /// Manifests that are not in force.
    pub fn refused(&self) -> Vec<RefusedManifest> {
        self.inner.state().refused.clone()
    }

    /// Attached interfaces, compared with the kernel. Takes some microseconds for each.
    pub fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        self.inner.interface_views(filter)
    }

    /// Counted drops.
    pub fn drops(&self) -> Vec<DropView> {
        self.inner.drop_views()
    }

    /// The pinned maps.
    pub fn maps(&self) -> Vec<MapView> {
        self.inner.map_views()
    }

    /// How the agent stands.
    pub fn status(&self) -> StatusView {
        self.inner.status_view()
    }

    /// Whose an endpoint is; `None` while it is nobody's.
    pub fn owner(&self, endpoint: EndpointId) -> Option<Owner> {
        self.inner.state().owner_of(endpoint)
    }

    /// An endpoint's attachment and its sandbox.
    pub fn attachment(&self, endpoint: EndpointId) -> Option<(Arc<Sandbox>, Attachment)> {
        let state = self.inner.state();
        let mut attachments = state.attachments();
        let (sandbox, attachment) = attachments.find(|(_, attachment)| attachment.endpoint == endpoint)?;
        Some((Arc::clone(sandbox), attachment.clone()))
    }

    /// Every attachment that is complete, with its sandbox.
    pub fn attachments(&self) -> Vec<(Arc<Sandbox>, Attachment)> {
        let state = self.inner.state();
        let ready = state.attachments().filter(|(sandbox, _)| sandbox.phase == Phase::Ready);
        ready
            .map(|(sandbox, attachment)| (Arc::clone(sandbox), attachment.clone()))
            .collect()
    }

    /// The endpoint that has an address of a network.
    pub fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        self.inner.state().endpoint_at(network, address)
    }

    /// The sandbox of a pod, by namespace and name; one that is completely attached where there are several.
    pub fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        self.inner.state().sandbox_of(namespace, name)
    }

    /// The name that a network's number stands for.
    pub fn network_name(&self, id: NetworkId) -> Option<NetworkName> {
        let state = self.inner.state();
        let known = state.network_ids.iter().find(|(_, known)| **known == id);
        known.map(|(name, _)| name.clone())
    }

    /// How long attaching took, successful or not, repeated requests left out.
    pub fn attach_times(&self) -> Durations {
        *self.inner.attach_times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells of every change of what is attached, and of the networks. Receivers that are slow see the last one only.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// Every sandbox that is complete.
    pub fn sandboxes(&self) -> Vec<Arc<Sandbox>> {
        let state = self.inner.state();
        let ready = state.sandboxes.values().filter(|sandbox| sandbox.phase == Phase::Ready);
        ready.map(Arc::clone).collect()
    }

    /// Gives a sandbox other labels and named ports, and puts into force what policies say of it then. What is unknown,
    /// or has them already, succeeds.
    pub async fn relabel(
        &self,
        sandbox: SandboxId,
        labels: Labels,
        ports: Vec<ContainerPort>,
    ) -> Result<(), AttachError> {
        self.run(|inner| async move { inner.relabel(&sandbox, labels, ports).await })
            .await
    }

    /// Refuses new work from now on; what is attached stays.
    pub fn stop(&self) {
        self.inner.stopping.store(true, Ordering::Relaxed);
    }

    /// Runs work on a task of its own, so that a caller that goes away does not leave it half done.
    async fn run<T, F, W>(&self, work: W) -> Result<T, AttachError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, AttachError>> + Send + 'static,
        W: FnOnce(Arc<Inner>) -> F,
    {
        if self.inner.is_stopping() {
            return Err(AttachError::Stopping);
        }
        let task = tokio::spawn(work(Arc::clone(&self.inner)));
        task.await.unwrap_or_else(|ended| Err(error::ended(&ended)))
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was held is a bug, but the records it guards are written whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn commit(&self, change: Change) -> Result<(), AttachError> {
        self.store
            .commit(change)
            .map_err(|error| AttachError::Store(error::chain(&error)))
    }
}
