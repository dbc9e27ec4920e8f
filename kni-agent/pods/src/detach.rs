//! The way back of one sandbox, also of one whose attach failed.

use std::sync::Arc;

use kni_model::{Phase, Sandbox, SandboxId};
use kni_store::{Change, Removal};

use super::{AttachError, Inner};

impl Inner {
    pub(super) async fn detach(&self, id: &SandboxId) -> Result<(), AttachError> {
        self.touch();
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        self.detach_if_known(id).await
    }

    pub(super) async fn detach_if_known(&self, id: &SandboxId) -> Result<(), AttachError> {
        let found = self.state().sandboxes.get(id).map(Arc::clone);
        match found {
            Some(sandbox) => self.detach_locked(&sandbox).await,
            None => Ok(()),
        }
    }

    /// The further interfaces of a pod go before the pod's own sandbox, all of them even if one cannot.
    async fn detach_children(&self, id: &SandboxId) -> Result<(), AttachError> {
        let children: Vec<Arc<Sandbox>> = {
            let state = self.state();
            let all = state.sandboxes.values();
            all.filter(|found| found.parent.as_ref() == Some(id))
                .map(Arc::clone)
                .collect()
        };
        let mut ended = Ok(());
        for child in children {
            let _one_at_a_time = self.locks.lock(child.id.as_str()).await;
            // Another call may have been here first.
            if self.state().sandboxes.contains_key(&child.id) {
                ended = ended.and(self.detach_locked(&child).await);
            }
        }
        ended
    }

    /// Stops the traffic, frees the addresses and leaves the devices to the reaper. Goes on after errors and reports
    /// all of them; then the record stays and the call may be repeated.
    pub(super) async fn detach_locked(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        // A pod's sandbox has further ones, which have none: boxed, as the compiler cannot know.
        Box::pin(self.detach_children(&sandbox.id)).await?;
        self.mark_deleting(sandbox)?;
        let mut problems = Vec::new();
        for attachment in &sandbox.attachments {
            problems.extend(self.dismantle(sandbox, attachment).await.err());
        }
        // Its rows are withdrawn; where one could not be, what policy says of it stays as it is in the kernel.
        self.gate.leave(&sandbox.id);
        if let Some(first) = problems.into_iter().reduce(|all, next| format!("{all}; {next}")) {
            return Err(AttachError::Kernel {
                pod: sandbox.pod.clone(),
                sandbox: sandbox.id.to_string(),
                step: "detaching",
                reason: first,
            });
        }
        self.forget(sandbox)
    }

    fn mark_deleting(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        let deleting = Sandbox {
            phase: Phase::Deleting,
            ..sandbox.clone()
        };
        let mut state = self.state();
        self.commit(Change::new().sandbox(&deleting))?;
        state.sandboxes.insert(deleting.id.clone(), Arc::new(deleting));
        Ok(())
    }

    /// In one transaction: the sandbox is no longer there, its devices are to be removed.
    fn forget(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        let mut state = self.state();
        let removals: Vec<Removal> = sandbox
            .attachments
            .iter()
            // What is of another kind is gone already.
            .filter(|attachment| attachment.kind.is_ebpf())
            .map(|attachment| Removal {
                endpoint: attachment.endpoint,
                host_ifname: attachment.host_ifname.clone(),
                host_ifindex: attachment.host_ifindex,
                netns: Some(sandbox.netns_identity),
            })
            .collect();
        let change = removals
            .iter()
            .fold(Change::new().remove_sandbox(&sandbox.id), Change::removal);
        self.commit(change)?;
        for attachment in &sandbox.attachments {
            if attachment.kind.is_leased() {
                state
                    .ipam
                    .release(&attachment.network, attachment.ipv4, attachment.ipv6);
            }
            if !attachment.kind.is_ebpf() {
                state.slots.free(attachment.endpoint);
            }
        }
        state.sandboxes.remove(&sandbox.id);
        self.changed();
        state
            .removals
            .extend(removals.into_iter().map(|removal| (removal.endpoint, removal)));
        drop(state);
        self.reaper_wanted.notify_one();
        Ok(())
    }
}
