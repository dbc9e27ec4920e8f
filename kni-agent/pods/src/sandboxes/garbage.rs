//! Detaches sandboxes that a CNI runtime no longer has: those it does not list, and those that lost their namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_model::{CniAttachment, Phase, Sandbox, SandboxId};
use kni_netlink as netlink;

use super::Sandboxes;
use crate::{clock::since_boot, error::AttachError, namespaces};

/// How often namespaces are checked.
const ROUND: Duration = Duration::from_secs(5);
/// Number of consecutive rounds in which a namespace must be gone. A runtime that replaces a path takes less than one.
const ROUNDS: u32 = 2;

/// The attachments of a runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GarbageRequest {
    /// Name of the runtime's network configuration; attachments of others stay.
    pub network: String,
    /// The sandboxes of the attachments that the runtime still has.
    pub kept: BTreeSet<SandboxId>,
    /// When the runtime made the list, in nanoseconds since the node's boot; 0 for now. Attachments completed later
    /// stay.
    pub began_ns: u64,
}

/// The result of a garbage collection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Garbage {
    /// Detached attachments.
    pub detached: Vec<CniAttachment>,
    /// Failures, one sentence each.
    pub errors: Vec<String>,
}

impl Sandboxes {
    /// Continues after errors.
    pub(crate) async fn collect_for_runtime(&self, request: GarbageRequest) -> Garbage {
        let now = since_boot_ns();
        let began = if request.began_ns == 0 {
            now
        } else {
            request.began_ns.min(now)
        };
        let mut garbage = Garbage::default();
        for (sandbox, cni) in self.cni_sandboxes() {
            if cni.network != request.network || request.kept.contains(&sandbox.id) || cni.completed_ns >= began {
                continue;
            }
            match self.detach_unchanged(&sandbox).await {
                Ok(true) => garbage.detached.push(cni),
                Ok(false) => {}
                Err(error) => garbage.errors.push(error.to_string()),
            }
        }
        garbage
    }

    /// Detaches the sandboxes of CNI runtimes whose namespaces are gone: not every runtime lists its attachments.
    pub(crate) async fn watch_namespaces(self: Arc<Self>) {
        let mut gone: BTreeMap<SandboxId, u32> = BTreeMap::new();
        let mut ticks = tokio::time::interval(ROUND);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.registry.is_stopping() {
            kni_tasks::waiting(ticks.tick()).await;
            let mut now_gone = BTreeMap::new();
            for sandbox in self.watched_sandboxes() {
                if has_its_path(&sandbox) {
                    continue;
                }
                let rounds = gone.get(&sandbox.id).copied().unwrap_or(0) + 1;
                if rounds < ROUNDS || namespaces::in_use(sandbox.netns_identity).await {
                    now_gone.insert(sandbox.id.clone(), rounds);
                    continue;
                }
                kni_tasks::progress();
                match self.detach_unchanged(&sandbox).await {
                    Ok(true) => {
                        tracing::info!(pod = %sandbox.pod, sandbox = %sandbox.id, netns = %sandbox.netns.display(),
                        "detached: its namespace is gone, and its runtime did not detach it");
                    }
                    Ok(false) => {}
                    Err(error) => tracing::warn!(%error, "cannot detach a sandbox whose namespace is gone"),
                }
            }
            gone = now_gone;
        }
    }

    /// Undoes the call with this invocation id and no other.
    pub(crate) async fn undo_invocation(&self, id: &SandboxId, invocation: &str) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let found = self.registry.lock().sandbox(id);
        let made_it = |sandbox: &Arc<Sandbox>| sandbox.cni.as_ref().is_some_and(|cni| cni.invocation == invocation);
        match found.filter(made_it) {
            Some(sandbox) => self.detach_locked(&sandbox).await,
            None => Ok(()),
        }
    }

    /// Complete sandboxes, and those whose detach failed; not those whose attach is running.
    fn cni_sandboxes(&self) -> Vec<(Arc<Sandbox>, CniAttachment)> {
        let state = self.registry.lock();
        let settled = state.sandboxes.values().filter(|found| found.phase != Phase::Pending);
        settled
            .filter_map(|found| Some((Arc::clone(found), found.cni.clone()?)))
            .collect()
    }

    /// Those of CNI runtimes, and those whose id was lost, which no client can detach.
    fn watched_sandboxes(&self) -> Vec<Arc<Sandbox>> {
        let state = self.registry.lock();
        let settled = state.sandboxes.values().filter(|found| found.phase != Phase::Pending);
        let watched =
            settled.filter(|found| found.cni.is_some() || found.id.as_str().starts_with(namespaces::RECOVERED_PREFIX));
        watched.map(Arc::clone).collect()
    }

    /// Detaches a sandbox unless its id belongs to another attachment by now.
    async fn detach_unchanged(&self, seen: &Sandbox) -> Result<bool, AttachError> {
        let _one_at_a_time = self.locks.lock(seen.id.as_str()).await;
        let now = self.registry.lock().sandbox(&seen.id);
        let unchanged = now.filter(|now| {
            now.cni == seen.cni && now.netns_identity == seen.netns_identity && now.phase != Phase::Pending
        });
        match unchanged {
            Some(sandbox) => self.detach_locked(&sandbox).await.map(|()| true),
            None => Ok(false),
        }
    }
}

/// Whether the path still refers to the sandbox's namespace.
fn has_its_path(sandbox: &Sandbox) -> bool {
    netlink::netns::identity(&sandbox.netns).is_ok_and(|found| found == sandbox.netns_identity)
}

/// Nanoseconds since the node's boot.
pub(super) fn since_boot_ns() -> u64 {
    u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX)
}
