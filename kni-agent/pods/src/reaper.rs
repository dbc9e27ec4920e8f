//! Removes queued interfaces in the background and frees their endpoint numbers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kni_model::{NetnsIdentity, error_chain};
use kni_store::{Change, Removal};
use tokio::sync::futures::Notified;

use crate::{
    error::{AttachError, Subject},
    interfaces,
    kernel::Kernel,
    registry::Registry,
};

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// How long no client has been served before devices are deleted: `DeleteNetwork` follows a detach at once, and waits
/// for the same grace periods of the kernel.
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
            quiet(&self.registry).await;
            let queued: Vec<Removal> = self.registry.lock().removals.values().cloned().collect();
            kni_tasks::progress();
            if let Err(error) = self.remove(&queued).await {
                tracing::warn!(%error, "cannot remove interfaces, will try again");
                tokio::time::sleep(RETRY).await;
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

    /// Waits until no queued interface of a namespace exists: a new one of the same name cannot be made before.
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

    /// Waits until queued interfaces are gone and their endpoint numbers free, which `removed` is notified of: at most
    /// until this time, and not at all if none is queued. False if none went.
    pub(crate) async fn wait_for_removal(&self, removed: Notified<'_>, until: Instant) -> bool {
        let is_queued = !self.registry.lock().removals.is_empty();
        let left = if is_queued {
            until.saturating_duration_since(Instant::now())
        } else {
            // The last one may have ended just before.
            Duration::ZERO
        };
        tokio::time::timeout(left, removed).await.is_ok()
    }

    /// Whether an interface of a namespace is queued and still exists.
    pub(crate) fn is_queued(&self, netns: NetnsIdentity) -> bool {
        is_queued(&self.registry, netns, |removal| {
            interfaces::is_on_host(removal.host_ifname.as_str(), removal.host_ifindex)
        })
    }
}

/// Waits until no client is served, unless an attach waits for a removal.
async fn quiet(registry: &Registry) {
    let deadline = Instant::now() + LONGEST_WAIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let pause = left.min(QUIET.saturating_sub(registry.lock().last_call.elapsed()));
        if pause.is_zero() || tokio::time::timeout(pause, registry.awaited.notified()).await.is_ok() {
            return;
        }
    }
}

/// The interface of a namespace that is gone went with it, and the kernel gives the identity of such a namespace to a
/// new one: only interfaces that exist count.
fn is_queued(registry: &Registry, netns: NetnsIdentity, exists: impl Fn(&Removal) -> bool) -> bool {
    let state = registry.lock();
    let mut queued = state.removals.values();
    queued.any(|removal| removal.netns == Some(netns) && exists(removal))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use kni_model::EndpointId;
    use kni_store::Store;
    use tempfile::TempDir;

    use super::*;

    const NETNS: NetnsIdentity = NetnsIdentity { dev: 4, inode: 5 };
    const IFINDEX: u32 = 9;

    fn registry() -> (TempDir, Registry) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        (folder, Registry::new(store, 8, false))
    }

    /// Whether removals begin at once, without a pause.
    fn begins_at_once(registry: &Registry) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.unwrap();
        let _guard = runtime.enter();
        quiet(registry).now_or_never().is_some()
    }

    /// Clients are served from now on, without a pause.
    fn serve(registry: &Registry) {
        registry.lock().last_call = Instant::now() + Duration::from_hours(1);
    }

    fn queue(registry: &Registry) {
        registry.lock().queue([Removal {
            endpoint: EndpointId(7),
            host_ifname: "kni7".parse().unwrap(),
            host_ifindex: IFINDEX,
            netns: Some(NETNS),
        }]);
    }

    #[test]
    fn removals_wait_for_a_pause_between_calls() {
        let (_folder, registry) = registry();
        registry.lock().last_call = Instant::now().checked_sub(QUIET).unwrap();
        assert!(begins_at_once(&registry));
        serve(&registry);
        assert!(!begins_at_once(&registry));
    }

    #[test]
    fn removals_that_an_attach_needs_do_not_wait_for_a_pause() {
        let (_folder, registry) = registry();
        serve(&registry);
        assert!(!begins_at_once(&registry));
        registry.lock().hurry_removals();
        assert!(begins_at_once(&registry));
    }

    /// A request that comes when nothing waits shortens one later wait.
    #[test]
    fn requests_that_nothing_waits_for_do_not_add_up() {
        let (_folder, registry) = registry();
        serve(&registry);
        registry.hurry_removals();
        registry.hurry_removals();
        assert!(begins_at_once(&registry));
        assert!(!begins_at_once(&registry));
    }

    #[test]
    fn a_new_namespace_with_the_identity_of_a_deleted_one_need_not_wait() {
        let (_folder, registry) = registry();
        assert!(!is_queued(&registry, NETNS, |_| true));
        queue(&registry);
        assert!(is_queued(&registry, NETNS, |removal| removal.host_ifindex == IFINDEX));
        let other = NetnsIdentity { dev: 4, inode: 6 };
        assert!(!is_queued(&registry, other, |_| true));
        // The host end is gone.
        assert!(!is_queued(&registry, NETNS, |_| false));
    }
}
