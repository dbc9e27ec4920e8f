//! Policy at the host ends of veth pairs that CNI plugins made: programs, rows, and the end of both.

use std::sync::Arc;

use kni_dataplane::{Dataplane, DataplaneError, EndpointConfig};
use kni_model::{Attachment, InterfaceKind, Sandbox};

use crate::{
    AttachError, Inner,
    error::{Subject, chain, ended},
};

impl Inner {
    /// Judges what passes the host ends that plugins made from here on. To be called when the plugins are done: their
    /// addresses and host ends are known only now.
    pub(crate) async fn guard(&self, sandbox: &Sandbox, subject: &Subject) -> Result<(), AttachError> {
        let guarded = |attachment: &&Attachment| attachment.kind.is_plugins();
        if !sandbox.attachments.iter().any(|attachment| guarded(&attachment)) {
            return Ok(());
        }
        self.admit(sandbox, subject).await?;
        for attachment in sandbox.attachments.iter().filter(guarded) {
            let (dataplane, attachment) = (Arc::clone(&self.dataplane), attachment.clone());
            tokio::task::spawn_blocking(move || begin(&dataplane, &attachment))
                .await
                .map_err(|error| ended(&error))?
                .map_err(subject.failed("attaching the programs"))?;
        }
        Ok(())
    }

    /// Takes over what an earlier agent has begun; begins what it has not.
    pub(crate) fn adopt_guard(&self, attachment: &Attachment) -> Result<(), DataplaneError> {
        self.dataplane.republish(&EndpointConfig::from(attachment))?;
        self.dataplane
            .adopt(attachment.host_ifname.as_str(), attachment.endpoint)
    }

    /// Forgets the programs of an interface that is gone. Whether it had any is not asked: an agent that was killed may
    /// not have come to write it down.
    pub(super) fn end_guard(&self, attachment: &Attachment) -> Result<(), String> {
        match attachment.kind {
            InterfaceKind::Cni(_) => self.dataplane.unpin(attachment.endpoint).map_err(|error| chain(&error)),
            InterfaceKind::Veth | InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => {
                Ok(())
            }
        }
    }
}

/// Programs first: without a row they drop (I1). Waits for RCU grace periods.
fn begin(dataplane: &Dataplane, attachment: &Attachment) -> Result<(), DataplaneError> {
    dataplane.attach(attachment.host_ifname.as_str(), attachment.endpoint)?;
    dataplane.publish(&EndpointConfig::from(attachment))
}
