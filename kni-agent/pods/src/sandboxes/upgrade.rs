//! Replaces provisional clsact filters of attached interfaces by TCX links.

use std::sync::Arc;

use kni_model::{Phase, SandboxId};

use super::Sandboxes;
use crate::error::{AttachError, Subject};

impl Sandboxes {
    /// The next sandbox whose programs are attached provisionally.
    pub(crate) fn take_provisional(&self) -> Option<SandboxId> {
        self.registry.lock().provisional.pop_front()
    }

    pub(crate) fn has_provisional(&self) -> bool {
        !self.registry.lock().provisional.is_empty()
    }

    /// Runs under the sandbox's lock, so that it is not detached meanwhile. An interface whose upgrade fails keeps
    /// working with the filters.
    pub(crate) async fn upgrade(&self, id: &SandboxId) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let found = self.registry.lock().sandbox(id);
        let Some(sandbox) = found.filter(|sandbox| sandbox.phase == Phase::Ready) else {
            return Ok(());
        };
        let subject = Subject::from(&*sandbox);
        for attachment in &sandbox.attachments {
            if !self.kernel.dataplane.is_provisional(attachment.endpoint) {
                continue;
            }
            let dataplane = Arc::clone(&self.kernel.dataplane);
            let (ifname, endpoint) = (attachment.host_ifname.clone(), attachment.endpoint);
            tokio::task::spawn_blocking(move || dataplane.upgrade(ifname.as_str(), endpoint))
                .await
                .map_err(|ended| subject.ended(&ended))?
                .map_err(subject.failed("replacing clsact filters by TCX links"))?;
        }
        Ok(())
    }
}
