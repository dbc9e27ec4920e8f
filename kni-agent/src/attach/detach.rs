//! The way back of one sandbox, also of one whose attach failed.

use std::sync::Arc;

use super::{AttachError, Inner};
use crate::{
    model::{Phase, Sandbox, SandboxId},
    store::{Change, Removal},
};

impl Inner {
    pub(super) async fn detach(&self, id: &SandboxId) -> Result<(), AttachError> {
        self.touch();
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        self.detach_if_known(id)
    }

    pub(super) fn detach_if_known(&self, id: &SandboxId) -> Result<(), AttachError> {
        let found = self.state().sandboxes.get(id).map(Arc::clone);
        match found {
            Some(sandbox) => self.detach_locked(&sandbox),
            None => Ok(()),
        }
    }

    /// Stops the traffic, frees the addresses and leaves the devices to the reaper. Goes on after errors and reports
    /// all of them; then the record stays and the call may be repeated.
    pub(super) fn detach_locked(&self, sandbox: &Sandbox) -> Result<(), AttachError> {
        self.mark_deleting(sandbox)?;
        let mut problems = Vec::new();
        for attachment in &sandbox.attachments {
            problems.extend(self.dismantle(attachment).err());
        }
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
            .map(|attachment| Removal {
                endpoint: attachment.endpoint,
                host_ifname: attachment.host_ifname.clone(),
                host_ifindex: attachment.host_ifindex,
                netns: Some(sandbox.netns_identity),
            })
            .collect();
        let change = removals
            .iter()
            .fold(Change::new().forget_sandbox(&sandbox.id), Change::removal);
        self.commit(change)?;
        for attachment in &sandbox.attachments {
            state
                .ipam
                .release(&attachment.network, attachment.ipv4, attachment.ipv6);
        }
        state.sandboxes.remove(&sandbox.id);
        state
            .removals
            .extend(removals.into_iter().map(|removal| (removal.endpoint, removal)));
        drop(state);
        self.reaper_wanted.notify_one();
        Ok(())
    }
}
