//! Implements `containerd.services.networking.v1`, containerd's draft of a pod network service, over the attach of
//! `kni.KNI`.

use std::sync::Arc;

use kni_model::{PodRef, Sandbox};
use kni_proto::networking::{
    CheckHealthRequest, CheckHealthResponse, GetPodIPsRequest, GetPodIPsResponse, GetPodNetworkRequest,
    GetPodNetworkResponse, GetPodResourcesRequest, GetPodResourcesResponse, SetupPodNetworkRequest,
    SetupPodNetworkResponse, TeardownPodNetworkRequest, TeardownPodNetworkResponse,
    pod_network_lifecycle_server::PodNetworkLifecycle, pod_network_management_server::PodNetworkManagement,
};
use tonic::{Request, Response, Status};

use super::{
    backend::Backend,
    call::Call,
    convert,
    services::Services,
    status::{IntoStatus, one_line},
};

/// Both services over those of the node.
#[derive(Clone)]
pub(super) struct PodNetworkService<B> {
    node: Services<B>,
}

impl<B: Backend> PodNetworkService<B> {
    pub(super) fn new(node: Services<B>) -> Self {
        Self { node }
    }

    async fn ask<T: Send + 'static, A: Send + 'static>(
        &self,
        method: &'static str,
        request: Request<T>,
        sandbox: impl FnOnce(&T) -> &str,
        answer: impl FnOnce(&Sandbox) -> A + Send + 'static,
    ) -> Result<Response<A>, Status> {
        let call = Call::query(method, &request);
        let request = request.into_inner();
        let id = sandbox(&request).to_owned();
        let backend = self.node.backend.clone();
        call.about("", &id)
            .run(async move {
                let found = convert::sandbox_id(&id).and_then(|id| backend.query(&id));
                let sandbox = found.ok_or_else(|| unknown(&id))?;
                Ok(answer(&sandbox))
            })
            .await
    }
}

fn unknown(id: &str) -> Status {
    Status::not_found(one_line(&format!("sandbox {id:?} is not attached")))
}

#[tonic::async_trait]
impl<B: Backend> PodNetworkLifecycle for PodNetworkService<B> {
    async fn setup_pod_network(
        &self,
        request: Request<SetupPodNetworkRequest>,
    ) -> Result<Response<SetupPodNetworkResponse>, Status> {
        let call = Call::change("SetupPodNetwork", &request);
        let request = request.into_inner();
        let pod = PodRef::named(&request.pod_namespace, &request.pod_name);
        let call = call.about(pod, &request.sandbox_id);
        let (backend, annotation) = (self.node.backend.clone(), self.node.netns_annotation());
        call.run(async move {
            let (request, before) = convert::pod_network::setup_request(request)?;
            let request = convert::attach_request(request, annotation)?;
            let sandbox: Arc<Sandbox> = backend.attach(request).await.map_err(IntoStatus::into_status)?;
            Ok(convert::pod_network::setup_answer(&sandbox, before))
        })
        .await
    }

    /// Never fails for an id that cannot exist: a runtime repeats a failed teardown indefinitely.
    async fn teardown_pod_network(
        &self,
        request: Request<TeardownPodNetworkRequest>,
    ) -> Result<Response<TeardownPodNetworkResponse>, Status> {
        let call = Call::change("TeardownPodNetwork", &request);
        let request = request.into_inner();
        let pod = PodRef::named(&request.pod_namespace, &request.pod_name);
        let call = call.about(pod, &request.sandbox_id);
        let backend = self.node.backend.clone();
        call.run(async move {
            if let Some(sandbox) = convert::sandbox_id(&request.sandbox_id) {
                backend.detach(sandbox).await.map_err(IntoStatus::into_status)?;
            }
            Ok(TeardownPodNetworkResponse {})
        })
        .await
    }

    async fn check_health(
        &self,
        request: Request<CheckHealthRequest>,
    ) -> Result<Response<CheckHealthResponse>, Status> {
        let inspector = Arc::clone(&self.node.inspector);
        Call::query("CheckHealth", &request)
            .run(async move {
                // Reads maps and links.
                let status = tokio::task::spawn_blocking(move || inspector.status()).await;
                let status = status.map_err(|ended| Status::internal(ended.to_string()))?;
                Ok(CheckHealthResponse {
                    ready: status.ready,
                    message: one_line(&status.reasons.join("; ")),
                })
            })
            .await
    }
}

#[tonic::async_trait]
impl<B: Backend> PodNetworkManagement for PodNetworkService<B> {
    async fn get_pod_resources(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.ask(
            "GetPodResources",
            request,
            |request| &request.sandbox_id,
            |sandbox| GetPodResourcesResponse {
                pod_netns_path: sandbox.netns.display().to_string(),
            },
        )
        .await
    }

    async fn get_pod_i_ps(&self, request: Request<GetPodIPsRequest>) -> Result<Response<GetPodIPsResponse>, Status> {
        self.ask(
            "GetPodIPs",
            request,
            |request| &request.sandbox_id,
            |sandbox| GetPodIPsResponse {
                interface_ips: convert::pod_network::interface_ips(sandbox),
                routes: convert::pod_network::routes(sandbox),
            },
        )
        .await
    }

    async fn get_pod_network(
        &self,
        request: Request<GetPodNetworkRequest>,
    ) -> Result<Response<GetPodNetworkResponse>, Status> {
        self.ask(
            "GetPodNetwork",
            request,
            |request| &request.sandbox_id,
            |sandbox| GetPodNetworkResponse {
                interfaces: convert::pod_network::interfaces(sandbox),
                routes: convert::pod_network::routes(sandbox),
            },
        )
        .await
    }
}
