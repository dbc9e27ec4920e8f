//! The seam to whoever puts policies into force: asked before a pod's traffic begins, told when it is over.

use std::sync::Arc;

use kni_model::{Sandbox, SandboxId, policy::PolicyPod};

use super::{
    AttachError, Inner,
    error::{Subject, ended},
};

/// Puts the policies of pods into force. May be called from several threads at once.
pub trait PolicyGate: Send + Sync {
    /// Puts a pod's policies into force: when this answers, its interfaces may be published. Before [`Self::adopted`] it
    /// only takes note. May block for some milliseconds. The error says what is wrong, for people.
    fn admit(&self, pod: &PolicyPod) -> Result<(), String>;

    /// Every pod that an earlier agent attached has been admitted: from here on what the policies say is put into force.
    /// Until then endpoints keep what they have. May block for some milliseconds; an error says what is wrong.
    fn adopted(&self) -> Result<(), String>;

    /// A pod's interfaces are published, and its host ports may be opened. Only asked for pods that have some; before
    /// [`Self::adopted`] it only takes note. May block for some tens of milliseconds. The error says what is wrong.
    fn published(&self, sandbox: &Sandbox) -> Result<(), String>;

    /// A pod's traffic is over. Does not block; what is unknown is no error.
    fn leave(&self, sandbox: &SandboxId);
}

impl Inner {
    /// The policies of a sandbox that is about to be published. They count before its first packet does.
    pub(super) async fn admit(&self, sandbox: &Sandbox, subject: &Subject) -> Result<(), AttachError> {
        let (gate, pod) = (Arc::clone(&self.gate), sandbox.policy_pod());
        let admitted = tokio::task::spawn_blocking(move || gate.admit(&pod)).await;
        admitted
            .map_err(|error| ended(&error))?
            .map_err(|reason| AttachError::Policy {
                pod: subject.pod.clone(),
                sandbox: subject.sandbox.clone(),
                reason,
            })
    }

    /// The host ports of a sandbox whose interfaces are published.
    pub(super) async fn open_host_ports(&self, sandbox: &Sandbox, subject: &Subject) -> Result<(), AttachError> {
        // Plugins open their ports themselves, and nobody opens those of other kinds.
        let ours = sandbox
            .attachments
            .first()
            .is_some_and(|primary| primary.kind.is_ebpf());
        if !ours || sandbox.port_mappings.iter().all(|mapping| mapping.host_port == 0) {
            return Ok(());
        }
        let (gate, published) = (Arc::clone(&self.gate), sandbox.clone());
        let opened = tokio::task::spawn_blocking(move || gate.published(&published)).await;
        opened
            .map_err(|error| ended(&error))?
            .map_err(|reason| AttachError::HostPorts {
                pod: subject.pod.clone(),
                sandbox: subject.sandbox.clone(),
                reason,
            })
    }

    /// Tells of all adopted pods, then lets the policies come into force (I3). What fails is tried again later by the
    /// gate: until then the endpoints keep what they have, and one that has nothing is not published.
    pub(super) async fn admit_adopted(&self, sandboxes: &[Arc<Sandbox>]) -> Result<(), AttachError> {
        let sandboxes = sandboxes.to_vec();
        let gate = Arc::clone(&self.gate);
        let adopted = tokio::task::spawn_blocking(move || {
            for sandbox in &sandboxes {
                let noted = gate.admit(&sandbox.policy_pod()).and_then(|()| gate.published(sandbox));
                if let Err(reason) = noted {
                    tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, reason, "cannot take note of an adopted pod");
                }
            }
            gate.adopted()
        });
        if let Err(reason) = adopted.await.map_err(|error| ended(&error))? {
            tracing::error!(reason, "cannot put the policies of adopted pods into force yet");
        }
        Ok(())
    }
}
