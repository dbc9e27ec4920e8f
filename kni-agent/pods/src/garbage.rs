//! Detaches what a CNI runtime no longer has: what it says itself, and what lost its namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_model::{CniAttachment, Phase, Sandbox, SandboxId};
use kni_netlink as netlink;
use nix::time::{ClockId, clock_gettime};

use super::{AttachError, Inner, warm};

/// How often namespaces are looked at.
const ROUND: Duration = Duration::from_secs(5);
/// In how many rounds in a row a namespace must be gone. A runtime that replaces a path takes less than one.
const ROUNDS: u32 = 2;

/// What a runtime has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GarbageRequest {
    /// Name of the runtime's network configuration; attachments of others stay.
    pub network: String,
    /// The sandboxes that stand for the attachments which the runtime has.
    pub kept: BTreeSet<SandboxId>,
    /// When the runtime made the list, in nanoseconds since the node's boot; 0 for now. What was completed later stays.
    pub began_ns: u64,
}

/// What became of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Garbage {
    /// What was detached.
    pub detached: Vec<CniAttachment>,
    /// What could not be, one sentence each.
    pub errors: Vec<String>,
}

impl Inner {
    /// Goes on after errors.
    pub(super) async fn collect_for_runtime(&self, request: GarbageRequest) -> Garbage {
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

    /// Detaches the sandboxes of CNI runtimes whose namespaces are gone. Not every runtime ever says what it has.
    pub(super) async fn watch_namespaces(self: Arc<Self>) {
        let mut gone: BTreeMap<SandboxId, u32> = BTreeMap::new();
        let mut ticks = tokio::time::interval(ROUND);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.is_stopping() {
            ticks.tick().await;
            let mut now_gone = BTreeMap::new();
            for (sandbox, _) in self.cni_sandboxes() {
                if has_its_path(&sandbox) {
                    continue;
                }
                let rounds = gone.get(&sandbox.id).copied().unwrap_or(0) + 1;
                if rounds < ROUNDS || warm::in_use(sandbox.netns_identity).await {
                    now_gone.insert(sandbox.id.clone(), rounds);
                    continue;
                }
                match self.detach_unchanged(&sandbox).await {
                    Ok(true) => {
                        tracing::info!(pod = %sandbox.pod, sandbox = %sandbox.id, netns = %sandbox.netns.display(),
                        "detached: its namespace is gone, and its runtime did not say so");
                    }
                    Ok(false) => {}
                    Err(error) => tracing::warn!(%error, "cannot detach a sandbox whose namespace is gone"),
                }
            }
            gone = now_gone;
        }
    }

    /// Takes one call back, and no other: that of the same invocation.
    pub(super) async fn undo_invocation(&self, id: &SandboxId, invocation: &str) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let found = self.state().sandboxes.get(id).map(Arc::clone);
        let made_it = |sandbox: &Arc<Sandbox>| sandbox.cni.as_ref().is_some_and(|cni| cni.invocation == invocation);
        match found.filter(made_it) {
            Some(sandbox) => self.detach_locked(&sandbox).await,
            None => Ok(()),
        }
    }

    /// Complete ones, and those whose detach failed; an attach that runs is none of them.
    fn cni_sandboxes(&self) -> Vec<(Arc<Sandbox>, CniAttachment)> {
        let state = self.state();
        let settled = state.sandboxes.values().filter(|found| found.phase != Phase::Pending);
        settled
            .filter_map(|found| Some((Arc::clone(found), found.cni.clone()?)))
            .collect()
    }

    /// Detaches a sandbox unless its id belongs to another attachment by now.
    async fn detach_unchanged(&self, seen: &Sandbox) -> Result<bool, AttachError> {
        let _one_at_a_time = self.locks.lock(seen.id.as_str()).await;
        let now = self.state().sandboxes.get(&seen.id).map(Arc::clone);
        let unchanged = now.filter(|now| {
            now.cni == seen.cni && now.netns_identity == seen.netns_identity && now.phase != Phase::Pending
        });
        match unchanged {
            Some(sandbox) => self.detach_locked(&sandbox).await.map(|()| true),
            None => Ok(false),
        }
    }
}

/// Whether the path still leads to the sandbox's namespace.
fn has_its_path(sandbox: &Sandbox) -> bool {
    netlink::netns::identity(&sandbox.netns).is_ok_and(|found| found == sandbox.netns_identity)
}

/// Nanoseconds since the node's boot, also while it slept; every process of the node reads the same clock.
pub(super) fn since_boot_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
