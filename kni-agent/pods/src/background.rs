//! Prepares later pods while no client is served: fills the pool, and completes provisional interfaces.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{error::AttachError, namespaces::NamespacePool, registry::Registry, sandboxes::Sandboxes};

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// How long no client has been served before the pool is filled. The kubelet attaches within some milliseconds after it
/// created; pods of a burst follow each other faster than this.
const FILL_AFTER: Duration = Duration::from_millis(50);
/// Likewise before a provisional interface is completed. That takes tens of milliseconds (the kernel waits for all CPUs
/// with its rtnl lock held), in which an attach would have to wait, and the interface is enforced before it too.
const UPGRADE_AFTER: Duration = Duration::from_millis(500);
/// Likewise before the pool shrinks.
const SHRINK_AFTER: Duration = Duration::from_secs(2);
/// The demand for namespaces decreases with time.
const REVIEW: Duration = Duration::from_mins(1);

/// Runs until the agent stops. The expensive steps hold the kernel's rtnl lock, which attaches need too.
pub(crate) async fn run(registry: Arc<Registry>, sandboxes: Arc<Sandboxes>, namespaces: Arc<NamespacePool>) {
    // Failures of the pool do not delay what attached pods need.
    let mut pool_waits_until: Option<Instant> = None;
    while !registry.is_stopping() {
        let now = Instant::now();
        let pause = pool_waits_until.and_then(|until| until.checked_duration_since(now));
        let fills = pause.is_none() && namespaces.needs_prewarming();
        let upgrades = sandboxes.has_provisional() || namespaces.has_provisional();
        let quiet = if fills {
            Some(FILL_AFTER)
        } else if upgrades {
            Some(UPGRADE_AFTER)
        } else {
            namespaces.is_too_large().then_some(SHRINK_AFTER)
        };
        let wait = match quiet {
            Some(quiet) => quiet.saturating_sub(registry.lock().last_call.elapsed()),
            None => pause.unwrap_or(REVIEW),
        };
        if !wait.is_zero() {
            // A client that is served meanwhile may leave something more urgent to do.
            let work = tokio::time::timeout(wait, registry.background.notified());
            kni_tasks::waiting(work).await.ok();
            continue;
        }
        if fills {
            let filled = namespaces.prewarm().await;
            pool_waits_until = (!matches!(filled, Ok(true))).then(|| Instant::now() + RETRY);
            report(filled.map(drop));
        } else if let Err(error) = upgrade_or_shrink(&sandboxes, &namespaces).await {
            report(Err(error));
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Interfaces of pods first.
async fn upgrade_or_shrink(sandboxes: &Sandboxes, namespaces: &NamespacePool) -> Result<(), AttachError> {
    if let Some(sandbox) = sandboxes.take_provisional() {
        sandboxes.upgrade(&sandbox).await
    } else if namespaces.has_provisional() {
        namespaces.upgrade().await
    } else if namespaces.is_too_large() {
        namespaces.shrink()
    } else {
        Ok(())
    }
}

fn report(done: Result<(), AttachError>) {
    if let Err(error) = done {
        tracing::warn!(%error, "cannot prepare for later pods");
    }
}
