//! Holds the cached objects of all kinds, shared by attach and the controllers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{blocks::BlockDemand, networks::Networks, tables::Tables};

/// The cache. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClusterCache {
    tables: Arc<Mutex<Tables>>,
    changes: watch::Sender<()>,
    blocks: Arc<BlockDemand>,
}

impl ClusterCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// The cached objects. Held for microseconds, never across an await.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        // A panic while the lock was held is a bug; each row is complete.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The networks as the node sees them.
    pub fn networks(&self, tables: &Tables) -> Networks {
        Networks::of(tables, &self.blocks.held())
    }

    /// The node's demand for address blocks.
    pub fn blocks(&self) -> &BlockDemand {
        &self.blocks
    }
}
