//! Implements `kni.KNI`, the Kubernetes Networking Interface: all methods of all its published versions.

use std::sync::Arc;

use kni_model::PodRef;
use kni_proto::kni::{
    AttachInterfaceRequest, AttachInterfaceResponse, AttachNetworkRequest, CreateNetworkRequest, CreateNetworkResponse,
    DeleteNetworkRequest, DeleteNetworkResponse, DetachInterfaceRequest, DetachInterfaceResponse,
    QueryNodeNetworksRequest, QueryNodeNetworksResponse, QueryPodNetworkRequest, QueryPodNetworkResponse,
    SetupNodeNetworkRequest, SetupNodeNetworkResponse, kni_server::Kni,
};
use tonic::{Request, Response, Status};

use super::{
    backend::Backend,
    call::Call,
    convert::{self, Extradata as _, Identity, RequestError},
    features,
    services::Services,
    setup,
    status::{IntoStatus, one_line},
};

/// The service over the services of the node.
#[derive(Clone)]
pub(super) struct KniService<B> {
    node: Services<B>,
}

impl<B: Backend> KniService<B> {
    pub(super) fn new(node: Services<B>) -> Self {
        Self { node }
    }

    async fn create(
        &self,
        method: &'static str,
        request: Request<CreateNetworkRequest>,
    ) -> Result<Response<CreateNetworkResponse>, Status> {
        let call = Call::change(method, &request);
        let request = request.into_inner();
        let call = call.about(PodRef::named(&request.namespace, &request.name), "");
        self.node.unknown_keys.note(method, request.unknown_keys());
        let backend = self.node.backend.clone();
        call.run(async move {
            let (pod, prefix) = convert::create_request(request)?;
            let path = backend.create_namespace(pod, &prefix).await;
            convert::created(&path.map_err(IntoStatus::into_status)?)
        })
        .await
    }

    async fn delete(
        &self,
        method: &'static str,
        request: Request<DeleteNetworkRequest>,
    ) -> Result<Response<DeleteNetworkResponse>, Status> {
        let call = Call::change(method, &request);
        let request = request.into_inner();
        let call = call.about(PodRef::named(&request.namespace, &request.name), &request.id);
        self.node.unknown_keys.note(method, request.unknown_keys());
        let backend = self.node.backend.clone();
        call.run(async move {
            if let Some(request) = convert::delete_request(request) {
                backend.delete(request).await.map_err(IntoStatus::into_status)?;
            } else {
                tracing::debug!(method, "names nothing that can exist");
            }
            Ok(DeleteNetworkResponse {})
        })
        .await
    }

    /// Attaches what was read of a request.
    async fn attach(
        &self,
        method: &'static str,
        call: Call,
        request: Result<AttachInterfaceRequest, RequestError>,
    ) -> Result<Response<AttachInterfaceResponse>, Status> {
        let mut request = match request {
            Ok(request) => request,
            Err(refused) => return call.run(async move { Err(refused.into()) }).await,
        };
        request.merge_isolation();
        self.node.unknown_keys.note(method, request.unknown_keys());
        let identity = Identity::labelled(&request.name, &request.namespace, &request.labels);
        let call = call.about(identity.pod(), &request.id);
        let (backend, annotation) = (self.node.backend.clone(), self.node.netns_annotation());
        call.run(async move {
            let claim = convert::claim(&request, annotation);
            let request = match convert::attach_request(request, annotation) {
                Ok(request) => request,
                Err(refused) => {
                    // The client will delete the namespace by the sandbox's id alone.
                    if let Some((sandbox, netns)) = claim
                        && let Err(error) = backend.claim(sandbox, netns).await
                    {
                        tracing::warn!(method, %error, "namespace of a refused request is not bound");
                    }
                    return Err(refused.into());
                }
            };
            let sandbox = backend.attach(request).await.map_err(IntoStatus::into_status)?;
            let (ipconfigs, extradata) = convert::pod_network(&sandbox);
            Ok(AttachInterfaceResponse { ipconfigs, extradata })
        })
        .await
    }

    async fn detach(
        &self,
        method: &'static str,
        request: Request<DetachInterfaceRequest>,
    ) -> Result<Response<DetachInterfaceResponse>, Status> {
        let call = Call::change(method, &request);
        let mut request = request.into_inner();
        request.merge_isolation();
        self.node.unknown_keys.note(method, request.unknown_keys());
        let identity = Identity::labelled(&request.name, &request.namespace, &request.labels);
        let call = call.about(identity.pod(), &request.id);
        let backend = self.node.backend.clone();
        call.run(async move {
            let detached = match (
                convert::sandbox_id(&request.id),
                convert::invocation(&request.extradata),
            ) {
                (Some(sandbox), None) => backend.detach(sandbox).await,
                (Some(sandbox), Some(invocation)) => backend.undo(sandbox, invocation.to_owned()).await,
                (None, _) => {
                    tracing::debug!(method, "no sandbox can have this id");
                    Ok(())
                }
            };
            detached.map_err(IntoStatus::into_status)?;
            Ok(DetachInterfaceResponse {})
        })
        .await
    }
}

#[tonic::async_trait]
impl<B: Backend> Kni for KniService<B> {
    async fn create_network(
        &self,
        request: Request<CreateNetworkRequest>,
    ) -> Result<Response<CreateNetworkResponse>, Status> {
        self.create("CreateNetwork", request).await
    }

    async fn delete_network(
        &self,
        request: Request<DeleteNetworkRequest>,
    ) -> Result<Response<DeleteNetworkResponse>, Status> {
        self.delete("DeleteNetwork", request).await
    }

    async fn create_isolation_domain(
        &self,
        request: Request<CreateNetworkRequest>,
    ) -> Result<Response<CreateNetworkResponse>, Status> {
        self.create("CreateIsolationDomain", request).await
    }

    async fn delete_isolation_domain(
        &self,
        request: Request<DeleteNetworkRequest>,
    ) -> Result<Response<DeleteNetworkResponse>, Status> {
        self.delete("DeleteIsolationDomain", request).await
    }

    async fn attach_interface(
        &self,
        request: Request<AttachInterfaceRequest>,
    ) -> Result<Response<AttachInterfaceResponse>, Status> {
        let call = Call::change("AttachInterface", &request);
        self.attach("AttachInterface", call, Ok(request.into_inner())).await
    }

    async fn detach_interface(
        &self,
        request: Request<DetachInterfaceRequest>,
    ) -> Result<Response<DetachInterfaceResponse>, Status> {
        self.detach("DetachInterface", request).await
    }

    async fn attach_network(
        &self,
        request: Request<AttachNetworkRequest>,
    ) -> Result<Response<AttachInterfaceResponse>, Status> {
        let call = Call::change("AttachNetwork", &request);
        let request = convert::attach_network(request.into_inner());
        self.attach("AttachNetwork", call, request).await
    }

    async fn detach_network(
        &self,
        request: Request<DetachInterfaceRequest>,
    ) -> Result<Response<DetachInterfaceResponse>, Status> {
        self.detach("DetachNetwork", request).await
    }

    /// Never fails: the kubelet queries every sandbox a pod ever had, and one error fails the pod's whole status.
    async fn query_pod_network(
        &self,
        request: Request<QueryPodNetworkRequest>,
    ) -> Result<Response<QueryPodNetworkResponse>, Status> {
        let call = Call::query("QueryPodNetwork", &request);
        let request = request.into_inner();
        let call = call.about(PodRef::named(&request.namespace, &request.name), &request.id);
        let backend = self.node.backend.clone();
        call.run(async move {
            let sandbox = convert::sandbox_id(&request.id).and_then(|id| backend.query(&id));
            let (ipconfigs, extradata) = sandbox
                .map(|sandbox| convert::pod_network(&sandbox))
                .unwrap_or_default();
            Ok(QueryPodNetworkResponse { ipconfigs, extradata })
        })
        .await
    }

    async fn query_node_networks(
        &self,
        request: Request<QueryNodeNetworksRequest>,
    ) -> Result<Response<QueryNodeNetworksResponse>, Status> {
        let inspector = Arc::clone(&self.node.inspector);
        Call::query("QueryNodeNetworks", &request)
            .run(async move {
                let views = tokio::task::spawn_blocking(move || inspector.networks()).await;
                let views =
                    views.map_err(|error| Status::internal(one_line(&format!("QueryNodeNetworks: {error}"))))?;
                Ok(QueryNodeNetworksResponse {
                    networks: convert::node_networks(&views),
                    extradata: features::extradata(),
                })
            })
            .await
    }

    async fn setup_node_network(
        &self,
        request: Request<SetupNodeNetworkRequest>,
    ) -> Result<Response<SetupNodeNetworkResponse>, Status> {
        let setup = Arc::clone(&self.node.setup);
        let parts = Call::change("SetupNodeNetwork", &request)
            .run(async move {
                let parts = tokio::task::spawn_blocking(move || setup.prepare()).await;
                let parts = parts.map_err(|error| Status::internal(one_line(&format!("SetupNodeNetwork: {error}"))))?;
                tracing::info!(parts = setup::summary(&parts), "the node is prepared");
                Ok(parts)
            })
            .await?;
        let mut response = Response::new(SetupNodeNetworkResponse {});
        setup::report(parts.get_ref(), response.metadata_mut());
        Ok(response)
    }
}
