//! Removes queued interfaces in the background and frees their endpoint numbers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kni_model::{NetnsIdentity, error_chain};
use kni_store::{Change, Removal};

use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
    registry::Registry,
};

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// How long no client has been served before devices are deleted: `DeleteNetwork` follows a detach at once, and waits for
/// the same grace periods of the kernel.
const QUIET: Duration = Duration::from_millis(10);
/// Clients that call without a pause do not hold up deletions for longer than this.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// How long an attach waits until an earlier interface of the same namespace is gone.
const REMOVAL_WAIT: Duration = Duration::from_secs(10);

/// The queue of removals.
pub(crate) struct Reaper {
    registry: Arc<Registry>,
    kernel: Arc<Kernel>,
}

impl Reaper {
    pub(crate) fn new(registry: &Arc<Registry>, kernel: &Arc<Kernel>) -> Self {
        Self {
            registry: Arc::clone(registry),
            kernel: Arc::clone(kernel),
        }
    }

    /// Deletes queued devices, many in one request: each request waits for the same grace periods. Never ends.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            if self.registry.lock().removals.is_empty() {
                kni_tasks::waiting(self.registry.reaper.notified()).await;
                continue;
            }
            self.quiet().await;
            let queued: Vec<Removal> = self.registry.lock().removals.values().cloned().collect();
            kni_tasks::progress();
            if let Err(error) = self.remove(&queued).await {
                tracing::warn!(%error, "cannot remove interfaces, will try again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    /// Waits until no client is served, unless an attach waits for a removal.
    async fn quiet(&self) {
        let deadline = Instant::now() + LONGEST_WAIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let pause = left.min(QUIET.saturating_sub(self.registry.lock().last_call.elapsed()));
            if pause.is_zero() {
                return;
            }
            if tokio::time::timeout(pause, self.registry.awaited.notified())
                .await
                .is_ok()
            {
                return;
            }
        }
    }

    async fn remove(&self, queued: &[Removal]) -> Result<(), AttachError> {
        let links: Vec<(u32, &str)> = queued
            .iter()
            .map(|removal| (removal.host_ifindex, removal.host_ifname.as_str()))
            .collect();
        let deleted = self.kernel.teardown.delete_links(&links).await;
        deleted.map_err(Subject::node().failed("deleting interfaces"))?;
        let mut gone = Vec::new();
        for removal in queued {
            let dataplane = &self.kernel.dataplane;
            let withdrawn = dataplane.withdraw(removal.endpoint);
            match withdrawn.and_then(|()| dataplane.unpin(removal.endpoint)) {
                Ok(()) => gone.push(removal),
                Err(error) => {
                    tracing::warn!(ifname = %removal.host_ifname, error = error_chain(&error), "cannot unpin it yet");
                }
            }
        }
        let left = gone.len() < queued.len();
        self.release(&gone)?;
        if left {
            tokio::time::sleep(RETRY).await;
        }
        self.registry.removed.notify_waiters();
        self.registry.background.notify_one();
        Ok(())
    }

    /// Frees the endpoint numbers.
    fn release(&self, gone: &[&Removal]) -> Result<(), AttachError> {
        let mut state = self.registry.lock();
        state.commit_deferred(gone.iter().copied().fold(Change::new(), Change::remove_removal))?;
        for removal in gone {
            state.removals.remove(&removal.endpoint);
            state.slots.free(removal.endpoint);
        }
        Ok(())
    }

    /// Waits until no interface of a namespace is queued: a new one of the same name cannot be made before.
    pub(crate) async fn wait(&self, netns: NetnsIdentity, subject: &Subject) -> Result<(), AttachError> {
        let deadline = Instant::now() + REMOVAL_WAIT;
        loop {
            let removed = self.registry.removed.notified();
            if !self.is_queued(netns) {
                return Ok(());
            }
            self.registry.hurry_removals();
            let left = deadline.saturating_duration_since(Instant::now());
            let waited = tokio::time::timeout(left.min(Duration::from_millis(100)), removed).await;
            if waited.is_err() && left.is_zero() {
                return Err(subject.timeout("removing earlier interfaces", REMOVAL_WAIT));
            }
        }
    }

    /// Whether an interface of a namespace is queued and still exists. That of a namespace that is gone went with it, and
    /// the kernel gives the identity of such a namespace to a new one.
    pub(crate) fn is_queued(&self, netns: NetnsIdentity) -> bool {
        let state = self.registry.lock();
        let mut queued = state.removals.values().filter(|removal| removal.netns == Some(netns));
        queued.any(|removal| nix::net::if_::if_indextoname(removal.host_ifindex).is_ok())
    }
}
