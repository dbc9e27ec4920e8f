//! Holds a pod's traffic until the services that guard it are ready: policies and egress before it is published, host
//! ports after.

use std::sync::Arc;

use kni_enforcement::Enforcer;
use kni_model::{Sandbox, SandboxId, policy::PolicyPod};
use kni_uplink::Uplink;

use crate::error::{AttachError, GateError, Subject};

/// The services that guard the traffic of pods.
#[derive(Clone)]
pub(crate) struct Gate {
    policies: Arc<Enforcer>,
    uplink: Arc<Uplink>,
}

impl Gate {
    pub(crate) fn new(policies: Arc<Enforcer>, uplink: Arc<Uplink>) -> Self {
        Self { policies, uplink }
    }

    /// Enforces the policies of a sandbox before it is published, so that they apply to its first packet.
    pub(super) fn admit(&self, pod: &PolicyPod, subject: &Subject) -> Result<(), AttachError> {
        // After the policies, which may request an address.
        run(subject, || {
            self.policies.admit(pod).map_err(GateError::Policies)?;
            self.uplink.admit(pod).map_err(GateError::Egress)
        })
    }

    /// Opens the host ports of a sandbox whose interfaces are published.
    pub(super) fn open_host_ports(&self, sandbox: &Sandbox, subject: &Subject) -> Result<(), AttachError> {
        // Plugins open their ports themselves, and other kinds have none.
        let primary = sandbox.attachments.first();
        let ours = primary.is_some_and(|primary| primary.kind.is_ebpf());
        if !ours || sandbox.port_mappings.iter().all(|mapping| mapping.host_port == 0) {
            return Ok(());
        }
        run(subject, || self.uplink.published(sandbox).map_err(GateError::HostPorts))
    }

    /// Announces all adopted pods, then lets policies take effect (I3). The services retry failures later: until then
    /// the endpoints keep their current rules, and one without rules is not published.
    pub(super) async fn adopt(&self, sandboxes: &[Arc<Sandbox>]) -> Result<(), AttachError> {
        let (gate, sandboxes) = (self.clone(), sandboxes.to_vec());
        let adopted = tokio::task::spawn_blocking(move || {
            for sandbox in &sandboxes {
                if let Err(reason) = gate.note(sandbox) {
                    tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, %reason, "cannot take note of an adopted pod");
                }
            }
            gate.uplink.adopted();
            gate.policies.adopted()
        });
        if let Err(reason) = adopted.await.map_err(|ended| Subject::node().ended(&ended))? {
            tracing::error!(%reason, "cannot enforce the policies of adopted pods yet");
        }
        Ok(())
    }

    /// Until all pods are adopted, the services only record them.
    fn note(&self, sandbox: &Sandbox) -> Result<(), GateError> {
        let pod = sandbox.policy_pod();
        self.policies.admit(&pod).map_err(GateError::Policies)?;
        self.uplink.admit(&pod).map_err(GateError::Egress)?;
        self.uplink.published(sandbox).map_err(GateError::HostPorts)
    }

    /// Ends the enforcement for a pod whose traffic has ended. Its rows are removed in the background.
    pub(super) fn leave(&self, sandbox: &SandboxId) {
        self.policies.leave(sandbox);
        self.uplink.leave(sandbox);
    }
}

/// The services may block for some tens of milliseconds.
fn run(subject: &Subject, work: impl FnOnce() -> Result<(), GateError>) -> Result<(), AttachError> {
    let done = kni_tasks::in_place(work);
    done.map_err(|panicked| subject.ended(&panicked))?
        .map_err(|error| subject.error(error))
}
