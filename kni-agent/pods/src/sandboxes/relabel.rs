//! Changes labels and named ports of a running pod.

use kni_model::{
    Phase, Sandbox, SandboxId,
    policy::{ContainerPort, Labels},
};

use super::Sandboxes;
use crate::error::{AttachError, Subject};

impl Sandboxes {
    /// Records the labels first: a restarted agent must know the current ones.
    pub(crate) async fn relabel(
        &self,
        id: &SandboxId,
        labels: Labels,
        ports: Vec<ContainerPort>,
    ) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let sandbox = {
            let mut state = self.registry.lock();
            let Some(known) = state.sandboxes.get(id).filter(|known| known.phase == Phase::Ready) else {
                return Ok(());
            };
            if known.labels == labels && known.container_ports == ports {
                return Ok(());
            }
            let relabelled = Sandbox {
                labels,
                container_ports: ports,
                ..Sandbox::clone(known)
            };
            state.put_sandbox_deferred(relabelled)?
        };
        self.gate.admit(&sandbox.policy_pod(), &Subject::from(&*sandbox))
    }
}
