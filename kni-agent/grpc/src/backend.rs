//! What the services need of the agent: the seam between wire and work.

use std::{path::PathBuf, sync::Arc};

use kni_model::{
    AttachRequest, PodRef, Sandbox, SandboxId,
    view::{
        DropEventView, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, RefusedManifest, StatusView,
    },
};
use kni_pods::{AttachError, DeleteRequest, Garbage, GarbageRequest};
use tokio::sync::broadcast;

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

    /// Takes the interfaces of a sandbox away if they are what one CNI call made, and does nothing else.
    fn undo(&self, sandbox: SandboxId, invocation: String) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Detaches what a CNI runtime no longer has.
    fn collect_garbage(&self, request: GarbageRequest) -> impl Future<Output = Result<Garbage, AttachError>> + Send;

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
