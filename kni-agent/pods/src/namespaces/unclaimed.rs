//! Removes namespaces that clients requested and never attached.

use std::{path::Path, sync::Arc, time::Duration};

use kni_model::{NetnsIdentity, PodRef, SandboxId, error_chain};
use kni_netlink as netlink;
use kni_store::{NamespaceRecord, NamespaceUse};

use super::{NamespacePool, now};

/// A namespace that was given to a client, is not attached for this long and is used by no process, is removed.
const UNCLAIMED_FOR: Duration = Duration::from_mins(15);
const INTERVAL: Duration = Duration::from_mins(1);

impl NamespacePool {
    /// Never ends.
    pub(crate) async fn collect_unclaimed(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.tick().await;
        loop {
            kni_tasks::waiting(ticks.tick()).await;
            self.date_given();
            for record in self.unclaimed_for_long() {
                let Some(identity) = record.identity else { continue };
                if in_use(identity).await {
                    continue;
                }
                match self.remove(&record) {
                    Ok(()) => tracing::info!(path = %record.path.display(), "removed an unclaimed namespace"),
                    Err(error) => tracing::warn!(%error, "cannot remove an unclaimed namespace"),
                }
            }
        }
    }

    /// Earlier agents recorded wall-clock times, which are later than any time since the boot: their namespaces count
    /// as given now.
    fn date_given(&self) {
        let now = now();
        let mut state = self.registry.lock();
        let later =
            |record: &&NamespaceRecord| matches!(&record.used_by, NamespaceUse::Given { since, .. } if *since > now);
        let records: Vec<NamespaceRecord> = state.namespaces.values().filter(later).cloned().collect();
        for record in records {
            let NamespaceUse::Given { pod, .. } = record.used_by else {
                continue;
            };
            let used_by = NamespaceUse::Given { pod, since: now };
            if let Err(error) = state.put_namespace(NamespaceRecord { used_by, ..record }) {
                tracing::warn!(%error, "cannot record the time at which a namespace was given");
            }
        }
    }

    fn unclaimed_for_long(&self) -> Vec<NamespaceRecord> {
        let now = now();
        let old = |record: &&NamespaceRecord| {
            matches!(&record.used_by, NamespaceUse::Given { since, .. }
                if now.saturating_sub(*since) > UNCLAIMED_FOR.as_secs())
        };
        self.registry.lock().namespaces.values().filter(old).cloned().collect()
    }

    /// Namespaces that were given to a client and never attached. By path, for every caller; by the pod's name alone
    /// only if no sandbox is named, so that deleting an old sandbox never touches a newer one's namespace.
    pub(crate) fn unclaimed(
        &self,
        sandbox: Option<&SandboxId>,
        pod: &PodRef,
        netns: Option<&Path>,
    ) -> Vec<NamespaceRecord> {
        let state = self.registry.lock();
        let by_name = sandbox.is_none() && netns.is_none() && !pod.name.is_empty();
        // A later pod may have the name of an earlier one. Not every client sends the UID.
        let is_other = |given: &PodRef| !given.uid.is_empty() && !pod.uid.is_empty() && given.uid != pod.uid;
        let selected = |record: &&NamespaceRecord| match &record.used_by {
            NamespaceUse::Given { pod: given, .. } => {
                netns == Some(record.path.as_path())
                    || (by_name && given.name == pod.name && given.namespace == pod.namespace && !is_other(given))
            }
            NamespaceUse::Making | NamespaceUse::Warm | NamespaceUse::Bound { .. } => false,
        };
        state.namespaces.values().filter(selected).cloned().collect()
    }
}

/// Whether a process lives in the namespace; also where that is unknown.
pub(crate) async fn in_use(identity: NetnsIdentity) -> bool {
    let looked = tokio::task::spawn_blocking(move || {
        let processes = std::fs::read_dir("/proc")?;
        let lives_there = |entry: std::fs::DirEntry| {
            netlink::netns::identity(&entry.path().join("ns/net")).is_ok_and(|found| found == identity)
        };
        Ok::<bool, std::io::Error>(processes.filter_map(Result::ok).any(lives_there))
    });
    match looked.await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            tracing::debug!(error = error_chain(&error), "cannot look at processes");
            true
        }
        Err(_ended) => true,
    }
}
