//! Prepares later pods while no client is served: completes provisional interfaces and fills the pool.

use std::{sync::Arc, time::Duration};

use crate::{namespaces::NamespacePool, registry::Registry, sandboxes::Sandboxes};

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// How long no client has been served before preparation begins. The kubelet attaches within some milliseconds after it
/// created; pods of a burst follow each other faster than this.
const QUIET: Duration = Duration::from_millis(150);

/// Runs until the agent stops. The expensive steps hold the kernel's rtnl lock, which attaches need too.
pub(crate) async fn run(registry: Arc<Registry>, sandboxes: Arc<Sandboxes>, namespaces: Arc<NamespacePool>) {
    while !registry.is_stopping() {
        if !sandboxes.has_provisional() && !namespaces.needs_prewarming() {
            kni_tasks::waiting(registry.background.notified()).await;
            continue;
        }
        kni_tasks::waiting(wait_for_quiet(&registry)).await;
        let done = match sandboxes.take_provisional() {
            Some(sandbox) => sandboxes.upgrade(&sandbox).await,
            None => namespaces.prewarm().await,
        };
        if let Err(error) = done {
            tracing::warn!(%error, "cannot prepare for later pods");
            tokio::time::sleep(RETRY).await;
        }
    }
}

async fn wait_for_quiet(registry: &Registry) {
    loop {
        let idle = registry.lock().last_call.elapsed();
        if idle >= QUIET {
            return;
        }
        tokio::time::sleep(QUIET.saturating_sub(idle)).await;
    }
}
