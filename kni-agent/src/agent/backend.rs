//! Implements the gRPC backend with the services of the agent.

use std::{path::PathBuf, sync::Arc};

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
        self.attacher.attach(request).await
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

    fn status(&self) -> StatusView {
        self.inspector.status()
    }

    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.flows.subscribe_drops()
    }
}
