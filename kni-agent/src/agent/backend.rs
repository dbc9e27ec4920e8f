//! What the gRPC services ask for, from whoever has it.

use std::{path::PathBuf, sync::Arc};

use kni_controllers::Cluster;
use kni_grpc::Backend;
use kni_model::{
    AttachRequest, PodRef, Sandbox, SandboxId,
    view::{
        DropEventView, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, RefusedManifest, StatusView,
    },
};
use kni_pods::{AttachError, DeleteRequest, Garbage, GarbageRequest};
use tokio::sync::broadcast;

use super::Node;

impl Backend for Node {
    async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        self.attacher.create_namespace(pod, path_prefix).await
    }

    async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.attacher.delete(request).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        if request.cni.is_some() {
            self.journal.settle(&request.sandbox).await?;
        }
        let Some(cluster) = &self.cluster else {
            return self.attacher.attach(request).await;
        };
        let prepared = cluster.prepare(request).await?;
        let known = self.attacher.query(&prepared.request.sandbox).is_some();
        let sandbox = self.attacher.attach(prepared.request).await?;
        for further in prepared.further {
            let Err(error) = self.attacher.attach(further).await else {
                continue;
            };
            // What a pod has that runs already is put right in the background.
            if known {
                tracing::warn!(%error, "a further interface of an attached pod cannot be made");
                continue;
            }
            // All or nothing; what cannot be undone now is told, and stays recorded.
            if let Err(undone) = self.attacher.detach(sandbox.id.clone()).await {
                tracing::error!(%undone, "undo is not complete");
            }
            return Err(error);
        }
        Ok(self.attacher.query(&sandbox.id).unwrap_or(sandbox))
    }

    async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        self.attacher.claim(sandbox, netns).await
    }

    async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        self.attacher.detach(sandbox).await
    }

    async fn undo(&self, sandbox: SandboxId, invocation: String) -> Result<(), AttachError> {
        self.attacher.undo(sandbox, invocation).await
    }

    async fn collect_garbage(&self, request: GarbageRequest) -> Result<Garbage, AttachError> {
        self.attacher.collect_garbage(request).await
    }

    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        self.attacher.query(sandbox)
    }

    fn networks(&self) -> Vec<NetworkView> {
        self.attacher.networks()
    }

    fn refused(&self) -> Vec<RefusedManifest> {
        self.attacher.refused()
    }

    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        self.inspector.interfaces(filter)
    }

    fn drops(&self) -> Vec<DropView> {
        self.inspector.drops()
    }

    fn maps(&self) -> Vec<MapView> {
        self.inspector.maps()
    }

    /// No pod can be attached while policies cannot be put into force; other problems do not stand in the way.
    fn status(&self) -> StatusView {
        let mut status = self.inspector.status();
        if let Some(reason) = self.sync.policy_problem() {
            status.ready = false;
            status.reasons.push(format!("policies are not in force: {reason}"));
        }
        let missing = self.cluster.as_ref().map(Cluster::missing).unwrap_or_default();
        if !missing.is_empty() {
            status.ready = false;
            status
                .reasons
                .push(format!("waiting for the API server: {}", missing.join(", ")));
        }
        status.reasons.extend(self.sync.other_problems());
        status.reasons.extend(self.uplink.problem());
        status.uplink = self.uplink.view();
        status
    }

    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.flows.subscribe_drops()
    }
}
