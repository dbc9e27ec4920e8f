//! Owns the state in memory and its store: one mutex, one transaction, and the signals between the owners of its parts.

mod slots;
mod state;

use std::{
    ops::{Deref, DerefMut},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kni_model::{Sandbox, error_chain};
use kni_store::{Change, NamespaceRecord, Removal, Store, StoreError};
use tokio::sync::{Notify, watch};

pub(crate) use self::{
    slots::Slots,
    state::{KnownNetwork, State},
};
use crate::error::{AttachError, ErrorKind, Subject};

/// How long changes are gathered before the file is written: its transaction takes longer than the rest of a call that
/// records something.
const FILE_GATHER: Duration = Duration::from_millis(20);

/// The state and its store.
pub(crate) struct Registry {
    /// Never held across an await. The state and the store change under this one lock, so that both change in one
    /// order.
    state: Mutex<State>,
    store: Store,
    changes: watch::Sender<u64>,
    stopping: AtomicBool,
    /// Wakes the reaper.
    pub(crate) reaper: Notify,
    /// Interfaces were removed.
    pub(crate) removed: Notify,
    /// Wakes the background work for later pods.
    pub(crate) background: Notify,
    /// A rest of an address has another end.
    pub(crate) rests: Notify,
    /// There is a change for the file.
    file: Notify,
    /// Removals that wait for a quiet moment must not.
    pub(crate) awaited: Notify,
}

impl Registry {
    /// The contents of the store enter the state when the caller adopts them.
    pub(crate) fn new(store: Store, capacity: u32, in_cluster: bool) -> Self {
        Self {
            state: Mutex::new(State::new(capacity, in_cluster)),
            store,
            changes: watch::Sender::new(0),
            stopping: AtomicBool::new(false),
            reaper: Notify::new(),
            removed: Notify::new(),
            background: Notify::new(),
            rests: Notify::new(),
            file: Notify::new(),
            awaited: Notify::new(),
        }
    }

    /// Why the state cannot be written.
    pub(crate) fn store_problem(&self) -> Option<String> {
        self.store.problem()
    }

    /// Looks after the state's file. Blocks.
    pub(crate) fn maintain_store(&self) {
        self.store.maintain();
    }

    /// Writes the file soon after each change: releases without the copy read the file alone. Never ends.
    pub(crate) async fn write_file_soon(self: Arc<Self>) {
        loop {
            kni_tasks::waiting(self.file.notified()).await;
            tokio::time::sleep(FILE_GATHER).await;
            let this = Arc::clone(&self);
            if let Err(ended) = tokio::task::spawn_blocking(move || this.store.write_file()).await {
                tracing::error!(%ended, "writing the state's file panicked");
            }
        }
    }

    /// The state, and the right to change it.
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked {
            // A panic while the lock was held is a bug, but the records it guards are complete.
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
            registry: self,
        }
    }

    /// Notes that a client is being served.
    pub(crate) fn note_activity(&self) {
        self.lock().last_call = Instant::now();
    }

    /// Notifies of every change of attachments and networks. Slow receivers see the last one only.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Has queued interfaces removed now, whether clients are served or not: their numbers or names are needed.
    pub(crate) fn hurry_removals(&self) {
        self.reaper.notify_one();
        self.awaited.notify_one();
    }

    /// Refuses new work from now on.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// The locked state. Commits go through it, so that the store changes under the lock too.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    registry: &'a Registry,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Locked<'_> {
    /// Writes a change to the store. The caller changes the state afterwards (I5).
    pub(crate) fn commit(&self, change: Change) -> Result<(), AttachError> {
        let committed = self.registry.store.commit(change);
        self.registry.file.notify_one();
        committed.map_err(|error| store_error(&error))
    }

    /// As [`Self::commit`], for changes that must not wait for the file: in memory at once, in the file when it can be
    /// written. For everything that ends or follows an effect.
    pub(crate) fn commit_deferred(&self, change: Change) -> Result<(), AttachError> {
        let committed = self.registry.store.commit_deferred(change);
        self.registry.file.notify_one();
        committed.map_err(|error| store_error(&error))
    }

    /// Writes a sandbox by a deferred commit.
    pub(crate) fn put_sandbox_deferred(&mut self, sandbox: Sandbox) -> Result<Arc<Sandbox>, AttachError> {
        self.commit_deferred(Change::new().sandbox(&sandbox))?;
        let sandbox = Arc::new(sandbox);
        self.sandboxes.insert(sandbox.id.clone(), Arc::clone(&sandbox));
        Ok(sandbox)
    }

    /// Writes a sandbox.
    pub(crate) fn put_sandbox(&mut self, sandbox: Sandbox) -> Result<Arc<Sandbox>, AttachError> {
        self.commit(Change::new().sandbox(&sandbox))?;
        let sandbox = Arc::new(sandbox);
        self.sandboxes.insert(sandbox.id.clone(), Arc::clone(&sandbox));
        Ok(sandbox)
    }

    /// Writes a namespace.
    pub(crate) fn put_namespace(&mut self, record: NamespaceRecord) -> Result<(), AttachError> {
        self.commit(Change::new().namespace(&record))?;
        self.namespaces.insert(record.path.clone(), record);
        Ok(())
    }

    /// Writes a namespace by a deferred commit.
    pub(crate) fn put_namespace_deferred(&mut self, record: NamespaceRecord) -> Result<(), AttachError> {
        self.commit_deferred(Change::new().namespace(&record))?;
        self.namespaces.insert(record.path.clone(), record);
        Ok(())
    }

    /// Removes the record of a namespace.
    pub(crate) fn remove_namespace(&mut self, path: &Path) -> Result<(), AttachError> {
        self.commit_deferred(Change::new().remove_namespace(path))?;
        self.namespaces.remove(path);
        Ok(())
    }

    /// Queues interfaces whose removal is already committed.
    pub(crate) fn queue(&mut self, removals: impl IntoIterator<Item = Removal>) {
        let removals = removals.into_iter().map(|removal| (removal.endpoint, removal));
        self.removals.extend(removals);
    }

    /// As [`Registry::hurry_removals`].
    pub(crate) fn hurry_removals(&self) {
        self.registry.hurry_removals();
    }

    /// Announces a change of attachments or networks.
    pub(crate) fn announce(&self) {
        self.registry
            .changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// The error of a store.
pub(crate) fn store_error(error: &StoreError) -> AttachError {
    Subject::node().error(match error {
        StoreError::Unwritable(reason) => ErrorKind::Unwritable(reason.clone()),
        StoreError::InUse(_) | StoreError::Path { .. } | StoreError::Database(_) | StoreError::Record { .. } => {
            ErrorKind::Store(error_chain(error))
        }
    })
}
