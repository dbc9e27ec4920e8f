//! Detaches one sandbox, also one whose attach failed.

use std::sync::Arc;

use kni_model::{Phase, Sandbox, SandboxId};
use kni_store::{Change, Removal};

use super::Sandboxes;
use crate::{
    error::{AttachError, ErrorKind, Subject},
    interfaces::{DismantleError, deferred_removal},
};

impl Sandboxes {
    /// Succeeds for unknown sandboxes.
    pub(crate) async fn detach(&self, id: &SandboxId) -> Result<(), AttachError> {
        self.registry.note_activity();
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        self.detach_if_known(id).await
    }

    pub(super) async fn detach_if_known(&self, id: &SandboxId) -> Result<(), AttachError> {
        let found = self.registry.lock().sandbox(id);
        match found {
            Some(sandbox) => self.detach_locked(&sandbox).await,
            None => Ok(()),
        }
    }

    /// Detaches the additional interfaces of a pod before the pod's own sandbox, all of them even if one fails.
    async fn detach_children(&self, id: &SandboxId) -> Result<(), AttachError> {
        let children: Vec<Arc<Sandbox>> = {
            let state = self.registry.lock();
            let all = state.sandboxes.values();
            all.filter(|found| found.parent.as_ref() == Some(id))
                .map(Arc::clone)
                .collect()
        };
        let mut ended = Ok(());
        for child in children {
            let _one_at_a_time = self.locks.lock(child.id.as_str()).await;
            // A concurrent call may have detached it.
            if self.registry.lock().sandboxes.contains_key(&child.id) {
                ended = ended.and(self.detach_locked(&child).await);
            }
        }
        ended
    }

    /// Stops the traffic, frees the addresses and leaves the devices to the reaper. Continues after errors and reports
    /// all of them; then the record stays and the call may be repeated.
    pub(crate) async fn detach_locked(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        // Boxed because of the recursion: children have no children, but the compiler cannot know.
        Box::pin(self.detach_children(&sandbox.id)).await?;
        // Traffic must stop even while the file cannot be written.
        self.registry.lock().put_sandbox_deferred(Sandbox {
            phase: Phase::Deleting,
            ..sandbox.clone()
        })?;
        let mut problems = Vec::new();
        for attachment in &sandbox.attachments {
            problems.extend(self.interfaces.dismantle(sandbox, attachment).await.err());
        }
        problems.extend(self.unroute_by_source(sandbox).await.err().map(DismantleError::from));
        // Its rows are withdrawn; where withdrawing failed, its policies stay in the kernel unchanged.
        self.gate.leave(&sandbox.id);
        if problems.is_empty() {
            return self.remove(sandbox);
        }
        let reasons: Vec<String> = problems.iter().map(ToString::to_string).collect();
        Err(Subject::from(sandbox).error(ErrorKind::Kernel {
            step: "detaching",
            reason: reasons.join("; "),
        }))
    }

    /// In one transaction: removes the record of the sandbox and queues the removals of its devices.
    fn remove(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        let removal = |attachment| deferred_removal(sandbox, attachment);
        let removals: Vec<Removal> = sandbox.attachments.iter().filter_map(removal).collect();
        let change = Change::new().remove_sandbox(&sandbox.id);
        let change = removals.iter().fold(change, Change::removal);
        let mut state = self.registry.lock();
        let rests = state.rests_after(sandbox);
        state.commit_deferred(rests.iter().fold(change, Change::rest))?;
        state.begin_rests(rests);
        for attachment in &sandbox.attachments {
            self.kernel.reopened(attachment.endpoint);
            if attachment.kind.is_leased() {
                // Those that rest have no lease any more.
                state.return_unused(&attachment.network, attachment.addresses());
            }
            if !removals.iter().any(|removal| removal.endpoint == attachment.endpoint) {
                state.slots.free(attachment.endpoint);
            }
        }
        state.sandboxes.remove(&sandbox.id);
        // Under constant load nothing else would take it out.
        state.provisional.retain(|waiting| *waiting != sandbox.id);
        state.announce();
        state.queue(removals);
        drop(state);
        // A detach may take long, and the deletion of the namespace follows its end.
        self.registry.note_activity();
        self.registry.reaper.notify_one();
        Ok(())
    }
}
