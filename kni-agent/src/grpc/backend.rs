//! What the services need of the agent: the seam between wire and work.

use std::{path::PathBuf, sync::Arc};

use tokio::sync::broadcast;

use crate::{
    attach::{AttachError, Attacher, DeleteRequest},
    model::{
        AttachRequest, PodRef, Sandbox, SandboxId,
        view::{
            DropEventView, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, RefusedManifest, StatusView,
        },
    },
};

/// Does the work behind the services. Cheap to clone. Methods that change something finish what they began even when
/// the returned future is dropped, and bound their own time.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Makes a fresh network namespace and answers its path; each call makes another one.
    fn create_namespace(
        &self,
        pod: PodRef,
        path_prefix: &str,
    ) -> impl Future<Output = Result<PathBuf, AttachError>> + Send;

    /// Detaches what is attached and removes the namespace if it is the agent's. Succeeds if there is nothing.
    fn delete(&self, request: DeleteRequest) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Gives a sandbox its interfaces; the same request again answers the same.
    fn attach(&self, request: AttachRequest) -> impl Future<Output = Result<Arc<Sandbox>, AttachError>> + Send;

    /// Ties a namespace to a sandbox whose attach was refused, so that deleting the sandbox removes it. Does nothing for
    /// namespaces that the agent did not make.
    fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Takes all interfaces of a sandbox away. Succeeds if there are none.
    fn detach(&self, sandbox: SandboxId) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// A sandbox that is completely attached. Does not block.
    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>>;

    /// The networks, the default one first. Does not block.
    fn networks(&self) -> Vec<NetworkView>;

    /// What was refused of the manifests. Does not block.
    fn refused(&self) -> Vec<RefusedManifest>;

    /// The interfaces that the filter selects. May block for some milliseconds.
    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView>;

    /// Counted drops. May block for some milliseconds.
    fn drops(&self) -> Vec<DropView>;

    /// The pinned maps. May block for some milliseconds.
    fn maps(&self) -> Vec<MapView>;

    /// How the agent stands. May block for some milliseconds.
    fn status(&self) -> StatusView;

    /// Drop events from now on. A receiver that lags is told how many it lost.
    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView>;
}

/// The agent's own attach service.
impl Backend for Attacher {
    async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        self.create_namespace(pod, path_prefix).await
    }

    async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.delete(request).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        self.attach(request).await
    }

    async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        self.claim(sandbox, netns).await
    }

    async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        self.detach(sandbox).await
    }

    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        self.query(sandbox)
    }

    fn networks(&self) -> Vec<NetworkView> {
        self.networks()
    }

    fn refused(&self) -> Vec<RefusedManifest> {
        self.refused()
    }

    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        self.interfaces(filter)
    }

    fn drops(&self) -> Vec<DropView> {
        self.drops()
    }

    fn maps(&self) -> Vec<MapView> {
        self.maps()
    }

    fn status(&self) -> StatusView {
        self.status()
    }

    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.subscribe_drops()
    }
}
