//! Attaches and detaches pod sandboxes: owns the order of steps, the locks, the undo and the state in memory.
//! Layer: service.
//!
//! ```text
//! attach:  plan (pure) -> record Pending -> per interface: veth, programs, addresses, routes, dataplane row -> record Ready
//! detach:  record Deleting -> dataplane rows, host routes -> forget, release, queue the device -> (background) delete it
//! ```
//!
//! A failed attach is undone by the same code that detaches, driven by the record: whatever was done is in it (I5).

mod cleanup;
mod detach;
mod error;
mod events;
mod interface;
mod lock;
mod namespace;
mod networks;
mod plan;
mod reserve;
mod restore;
mod sandbox;
mod slots;
mod state;
mod views;
mod warm;

use std::{
    future::Future,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

pub use cleanup::cleanup;
pub use error::AttachError;
pub use namespace::DeleteRequest;
use tokio::sync::{Notify, broadcast};

use self::{lock::KeyedLocks, state::State};
use crate::{
    dataplane::{Dataplane, EventStream},
    model::{
        AttachRequest, NetnsIdentity, Phase, PodRef, Sandbox, SandboxId,
        view::{
            DropEventView, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, RefusedManifest, StatusView,
            WantedNetworks,
        },
    },
    netlink::{Netlink, Netns},
    store::{Change, Store},
};

/// Drop events that a slow subscriber may be behind before it loses some.
const DROP_EVENTS_BUFFERED: usize = 4096;

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// Where namespaces are mounted.
    pub netns_dir: PathBuf,
    /// Sandboxes kept ready ahead of `CreateNetwork`.
    pub warm_sandboxes: u32,
}

/// The attach service. Clones share it.
///
/// # Guarantees
/// - Idempotent by sandbox: a repeated attach gives the same answer, detach and delete of anything unknown succeed (I6).
/// - All or nothing: a failed attach leaves nothing behind, also when the agent is killed in its middle.
/// - When attach answers, traffic flows; when detach answers, none does, and the addresses are free.
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
    store: Store,
    /// Never held across an await. Changes to it and to the store happen under one lock, so that both have one order.
    state: Mutex<State>,
    locks: KeyedLocks,
    node_netns: NetnsIdentity,
    reaper_wanted: Notify,
    removed: Notify,
    warm_wanted: Notify,
    stopping: AtomicBool,
    drops: broadcast::Sender<DropEventView>,
}

impl Attacher {
    /// Takes over what an earlier agent left and begins the background work. Call it inside a tokio runtime, in the
    /// node's network namespace. Attaching begins to work with the first [`Self::apply_networks`].
    pub async fn start(
        options: AttachOptions,
        dataplane: Dataplane,
        events: EventStream,
        store: Store,
    ) -> Result<Self, AttachError> {
        let node = |error: crate::netlink::Error| error::kernel_of_node("connecting to rtnetlink", &error);
        let contents = store.load().map_err(|error| AttachError::Store(error::chain(&error)))?;
        let inner = Arc::new(Inner {
            state: Mutex::new(State::new(dataplane.capacity())),
            options,
            netlink: Netlink::new().map_err(node)?,
            teardown_netlink: Netlink::for_teardown().map_err(node)?,
            dataplane: Arc::new(dataplane),
            store,
            locks: KeyedLocks::default(),
            node_netns: Netns::current().map_err(node)?.id(),
            reaper_wanted: Notify::new(),
            removed: Notify::new(),
            warm_wanted: Notify::new(),
            stopping: AtomicBool::new(false),
            drops: broadcast::Sender::new(DROP_EVENTS_BUFFERED),
        });
        inner.restore(contents).await?;
        tokio::spawn(Arc::clone(&inner).reap());
        tokio::spawn(Arc::clone(&inner).keep_warm());
        tokio::spawn(Arc::clone(&inner).collect_garbage());
        tokio::spawn(Arc::clone(&inner).pass_events(events));
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

    /// An attached sandbox.
    pub fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        let state = self.inner.state();
        state
            .sandboxes
            .get(sandbox)
            .filter(|found| found.phase == Phase::Ready)
            .map(Arc::clone)
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

    /// Drop events from now on.
    pub fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.inner.drops.subscribe()
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

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn commit(&self, change: Change) -> Result<(), AttachError> {
        self.store
            .commit(change)
            .map_err(|error| AttachError::Store(error::chain(&error)))
    }
}
