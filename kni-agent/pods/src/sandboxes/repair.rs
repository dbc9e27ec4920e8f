//! Attaches the programs of a running pod's interface again.

use kni_model::{Attachment, Phase, Sandbox};

use super::Sandboxes;

impl Sandboxes {
    /// Returns whether the interface has its programs again. One that cannot get them is closed.
    pub(crate) async fn repair(&self, seen: &Sandbox, attachment: &Attachment) -> bool {
        let _one_at_a_time = self.locks.lock(seen.id.as_str()).await;
        let found = self.registry.lock().sandbox(&seen.id);
        let unchanged = found.is_some_and(|found| {
            found.phase == Phase::Ready && found.attachments.iter().any(|now| now.endpoint == attachment.endpoint)
        });
        unchanged && self.interfaces.repair(seen, attachment).await
    }
}
