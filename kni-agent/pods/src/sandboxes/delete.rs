//! Deletes the namespaces of a sandbox, after detaching it.

use std::path::{Path, PathBuf};

use kni_model::{PodRef, SandboxId};
use kni_store::{NamespaceRecord, NamespaceUse};

use super::Sandboxes;
use crate::error::AttachError;

/// Identifies a namespace that is to be deleted. The kubelet sends either the sandbox or the pod's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeleteRequest {
    /// The sandbox.
    pub sandbox: Option<SandboxId>,
    /// The pod.
    pub pod: PodRef,
    /// The namespace.
    pub netns: Option<PathBuf>,
}

impl Sandboxes {
    /// Succeeds for unknown sandboxes and namespaces.
    pub(crate) async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.registry.note_activity();
        let DeleteRequest { sandbox, pod, netns } = request;
        if let Some(id) = &sandbox {
            let _one_at_a_time = self.locks.lock(id.as_str()).await;
            self.detach_if_known(id).await?;
            let bound = self.registry.lock().namespaces_of(id);
            for record in bound {
                self.namespaces.remove(&record)?;
            }
        }
        for record in self.namespaces.unclaimed(sandbox.as_ref(), &pod, netns.as_deref()) {
            self.namespaces.remove(&record)?;
        }
        if let (None, Some(path)) = (&sandbox, &netns) {
            return self.delete_by_path(path).await;
        }
        Ok(())
    }

    /// Deletes without a sandbox id: the path identifies one namespace, and so its sandbox.
    async fn delete_by_path(&self, path: &Path) -> Result<(), AttachError> {
        let record = self.registry.lock().namespace_at(path);
        let Some(NamespaceRecord {
            used_by: NamespaceUse::Bound { sandbox },
            identity,
            ..
        }) = &record
        else {
            return Ok(());
        };
        let _one_at_a_time = self.locks.lock(sandbox.as_str()).await;
        let attached = self.registry.lock().sandbox(sandbox).map(|found| found.netns_identity);
        // A refused attach has bound the namespace to a sandbox that is attached in another one.
        if attached.is_some() && attached == *identity {
            self.detach_if_known(sandbox).await?;
        }
        let record = self.registry.lock().namespace_at(path);
        match record {
            Some(record) => self.namespaces.remove(&record),
            None => Ok(()),
        }
    }
}
