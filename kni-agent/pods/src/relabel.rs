//! Labels and named ports of a pod that change while it runs.

use std::sync::Arc;

use kni_model::{
    Phase, Sandbox, SandboxId,
    policy::{ContainerPort, Labels},
};
use kni_store::Change;

use super::{AttachError, Inner, error::Subject};

impl Inner {
    /// Recorded first: an agent that starts again must not take the pod for what it was.
    pub(super) async fn relabel(
        &self,
        id: &SandboxId,
        labels: Labels,
        ports: Vec<ContainerPort>,
    ) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let sandbox = {
            let mut state = self.state();
            let Some(known) = state.sandboxes.get(id).filter(|known| known.phase == Phase::Ready) else {
                return Ok(());
            };
            if known.labels == labels && known.container_ports == ports {
                return Ok(());
            }
            let sandbox = Sandbox {
                labels,
                container_ports: ports,
                ..Sandbox::clone(known)
            };
            self.commit(Change::new().sandbox(&sandbox))?;
            state.sandboxes.insert(id.clone(), Arc::new(sandbox.clone()));
            sandbox
        };
        let subject = Subject {
            pod: sandbox.pod.clone(),
            sandbox: sandbox.id.to_string(),
        };
        self.admit(&sandbox, &subject).await
    }
}
