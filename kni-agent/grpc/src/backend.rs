//! Defines [`Backend`], the operations of the attach service that clients may call, so that tests can observe them.

use std::{path::PathBuf, sync::Arc};

use kni_model::{AttachRequest, PodRef, Sandbox, SandboxId};
use kni_pods::{AttachError, DeleteRequest, Garbage, GarbageRequest, Pods};

/// The operations behind the services. Cheap to clone. Methods that change state run to completion even when the
/// returned future is dropped, and limit their own duration.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Makes a new network namespace and returns its path; each call makes another one.
    fn create_namespace(
        &self,
        pod: PodRef,
        path_prefix: &str,
    ) -> impl Future<Output = Result<PathBuf, AttachError>> + Send;

    /// Detaches the sandbox and removes the namespace if the agent made it. Succeeds if there is nothing to remove.
    fn delete(&self, request: DeleteRequest) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Attaches the interfaces of a sandbox; a repeated request returns the same result.
    fn attach(&self, request: AttachRequest) -> impl Future<Output = Result<Arc<Sandbox>, AttachError>> + Send;

    /// Binds a namespace to a sandbox whose attach was refused, so that deleting the sandbox removes it. Does nothing
    /// for namespaces that the agent did not make.
    fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Removes all interfaces of a sandbox. Succeeds if there are none.
    fn detach(&self, sandbox: SandboxId) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Removes the interfaces of a sandbox if the given CNI call made them; does nothing otherwise.
    fn undo(&self, sandbox: SandboxId, invocation: String) -> impl Future<Output = Result<(), AttachError>> + Send;

    /// Detaches the attachments that a CNI runtime no longer has.
    fn collect_garbage(&self, request: GarbageRequest) -> impl Future<Output = Result<Garbage, AttachError>> + Send;

    /// A sandbox that is completely attached. Does not block.
    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>>;
}

impl Backend for Pods {
    async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        Self::create_namespace(self, pod, path_prefix).await
    }

    async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        Self::delete(self, request).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        Self::attach(self, request).await
    }

    async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        Self::claim(self, sandbox, netns).await
    }

    async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        Self::detach(self, sandbox).await
    }

    async fn undo(&self, sandbox: SandboxId, invocation: String) -> Result<(), AttachError> {
        Self::undo(self, sandbox, invocation).await
    }

    async fn collect_garbage(&self, request: GarbageRequest) -> Result<Garbage, AttachError> {
        Self::collect_garbage(self, request).await
    }

    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        Self::query(self, sandbox)
    }
}
