//! Holds the cached objects of all kinds, shared by attach and the controllers.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Duration,
};

use kni_api::NodeEndpoint;
use kni_model::NetworkName;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::watch,
    time::timeout,
};

use super::{
    blocks::{BlockDemand, HeldBlocks},
    networks::{Networks, own_endpoint},
    others::{Following, Others},
    table::Written,
    tables::Tables,
};

/// The cache. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClusterCache {
    node: Arc<str>,
    tables: Arc<Mutex<Tables>>,
    changes: watch::Sender<()>,
    restores: watch::Sender<()>,
    blocks: Arc<BlockDemand>,
    others: Arc<Others>,
    derived: Arc<Mutex<Option<Derived>>>,
}

/// The networks that were derived last, and what they were derived from.
#[derive(Debug)]
struct Derived {
    versions: [u64; 3],
    numbers: (bool, bool),
    endpoint: Option<Arc<NodeEndpoint>>,
    /// Held here, so that a change of the blocks makes another value.
    blocks: Arc<HeldBlocks>,
    networks: Arc<Networks>,
}

impl ClusterCache {
    /// An empty cache of an agent.
    pub fn of_node(node: &str) -> Self {
        Self {
            node: node.into(),
            ..Self::new()
        }
    }

    /// An empty cache that is no node's.
    pub fn new() -> Self {
        Self {
            node: Arc::default(),
            tables: Arc::default(),
            changes: watch::Sender::new(()),
            restores: watch::Sender::new(()),
            blocks: Arc::default(),
            others: Arc::default(),
            derived: Arc::default(),
        }
    }

    /// The agent's node; empty in kni-controller.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// The cached objects. Never held across an await, and for long only by a thread that runs no tasks: a comparison
    /// of kni-controller reads all of them.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        // A panic while the lock was held is a bug; each row is complete.
        let lock = || self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        match self.tables.try_lock() {
            Ok(tables) => tables,
            Err(TryLockError::Poisoned(tables)) => tables.into_inner(),
            // The other tasks of this thread, such as one that waits for an answer of the API server, continue.
            Err(TryLockError::WouldBlock) if runs_tasks() => tokio::task::block_in_place(lock),
            Err(TryLockError::WouldBlock) => lock(),
        }
    }

    /// Changes the objects and notifies everything that waits for changes.
    pub fn change(&self, change: impl FnOnce(&mut Tables)) {
        let changed = {
            let mut tables = self.tables();
            let before = tables.version();
            change(&mut tables);
            tables.version() != before
        };
        if changed {
            self.changes.send_replace(());
        }
    }

    /// Notifies of every change from now on; the receiver compares versions to see which.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Records an object that the agent has written. If its resource version is lower than one that the watch of its
    /// kind has reported, the API server's storage was restored from a backup, and every watch lists again.
    pub fn change_written(&self, change: impl FnOnce(&mut Tables) -> Written) {
        let mut written = Written::Newest;
        self.change(|tables| written = change(tables));
        if written == Written::AfterRestore {
            self.note_restore();
        }
    }

    /// Has every watch list again, because the API server's storage was restored from a backup: a watch that resumes at
    /// a version of the former storage reports nothing until the restored one has passed it, and never what was lost.
    pub fn note_restore(&self) {
        tracing::warn!("the API server's storage was restored to an earlier state; every kind is read again");
        self.tables().set_restored();
        self.restores.send_replace(());
    }

    /// Has every watch begin again: connections to the API server may not be alive any more although nothing has ended
    /// them.
    pub fn begin_watches_again(&self) {
        self.restores.send_replace(());
    }

    /// Notifies of what makes every watch begin again, from now on: restores of the API server's storage, and
    /// [`Self::begin_watches_again`].
    pub fn restores(&self) -> watch::Receiver<()> {
        self.restores.subscribe()
    }

    /// The networks as the node sees them. They are derived anew only after a change of what they depend on: most
    /// changes of the cache concern no network.
    pub fn networks(&self, tables: &Tables) -> Arc<Networks> {
        let versions = [
            tables.networks.version(),
            tables.numbers.version(),
            tables.own_node.version(),
        ];
        let numbers = (tables.numbers.is_synced(), tables.numbers.is_absent());
        let endpoint = own_endpoint(tables).map(Arc::clone);
        let blocks = self.blocks.held();
        let mut derived = self.derived.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = derived.as_ref()
            && known.versions == versions
            && known.numbers == numbers
            && known.endpoint == endpoint
            && Arc::ptr_eq(&known.blocks, &blocks)
        {
            return Arc::clone(&known.networks);
        }
        let networks = Arc::new(Networks::of(tables, &blocks));
        *derived = Some(Derived {
            versions,
            numbers,
            endpoint,
            blocks,
            networks: Arc::clone(&networks),
        });
        networks
    }

    /// Sets the networks whose members and blocks the node has to know: those that it has pods in. Of those in
    /// `counting` it has to know the blocks only.
    pub fn join(&self, networks: BTreeSet<NetworkName>, counting: impl IntoIterator<Item = NetworkName>) {
        self.others.join(networks, counting);
    }

    /// What the node knows of other nodes in its networks.
    pub fn others(&self) -> &Others {
        &self.others
    }

    /// Waits until the node knows what other nodes have in these networks. Whether it does: not if that takes longer
    /// than `limit`, or while the API server does not answer.
    pub async fn wait_for_others(&self, following: &Following<'_>, limit: Duration) -> bool {
        let mut changes = self.others.changes();
        let is_applied = || {
            let tables = self.tables();
            let mut networks = following.networks().iter();
            networks.all(|name| self.others.is_applied(&tables, name))
        };
        let known = async {
            while !is_applied() {
                if self.others.is_away() || changes.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        timeout(limit, known).await.unwrap_or(false)
    }

    /// The networks whose blocks the node has to know, from now on; `None` before the first call of [`Self::join`].
    pub fn counted(&self) -> watch::Receiver<Option<BTreeSet<NetworkName>>> {
        self.others.counted()
    }

    /// The networks whose members the node has to know, from now on; `None` before the first call of [`Self::join`].
    pub fn joined(&self) -> watch::Receiver<Option<BTreeSet<NetworkName>>> {
        self.others.joined()
    }

    /// The node's demand for address blocks.
    pub fn blocks(&self) -> &BlockDemand {
        &self.blocks
    }
}

/// Whether the calling thread is one of several that run tasks.
fn runs_tasks() -> bool {
    Handle::try_current().is_ok_and(|runtime| matches!(runtime.runtime_flavor(), RuntimeFlavor::MultiThread))
}
