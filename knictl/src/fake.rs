//! Test double of the agent: serves `kni.runtime.v1` with prepared answers on its own socket.

use std::{
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex},
};

use kni_proto::runtime::{
    DropEvent, ExplainRequest, ExplainResponse, Flow, FlowFilter, GetPolicyRequest, GetPolicyResponse,
    GetStatusRequest, GetStatusResponse, ListDropsRequest, ListDropsResponse, ListFlowsRequest, ListFlowsResponse,
    ListInterfacesRequest, ListInterfacesResponse, ListMapsRequest, ListMapsResponse, ListNetworksRequest,
    ListNetworksResponse, ListServicesRequest, ListServicesResponse, ProbeTunnelRequest, ProbeTunnelResponse,
    WatchDropsRequest, WatchFlowsRequest,
    runtime_server::{Runtime, RuntimeServer},
};
use tempfile::TempDir;
use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, transport::Server};

/// What a stream does after its events.
#[derive(Clone, Debug, Default)]
pub(crate) enum After {
    /// It ends.
    #[default]
    Ends,
    /// It stays open and silent.
    Stays,
    /// It fails.
    Fails(Status),
}

/// The answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    pub(crate) status: GetStatusResponse,
    pub(crate) networks: ListNetworksResponse,
    pub(crate) interfaces: ListInterfacesResponse,
    pub(crate) drops: ListDropsResponse,
    /// If set, `ListMaps` is refused.
    pub(crate) maps_refusal: Option<Status>,
    pub(crate) maps: ListMapsResponse,
    pub(crate) events: Vec<DropEvent>,
    pub(crate) flows: Vec<Flow>,
    pub(crate) explanation: ExplainResponse,
    pub(crate) policy: GetPolicyResponse,
    pub(crate) services: ListServicesResponse,
    pub(crate) after: After,
}

/// A serving fake; stops, and removes its socket, when dropped.
pub(crate) struct Agent {
    folder: TempDir,
    server: JoinHandle<()>,
    asked: Arc<Mutex<Asked>>,
}

/// What clients sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Asked {
    pub(crate) interfaces: Vec<ListInterfacesRequest>,
    pub(crate) flows: Vec<FlowFilter>,
    pub(crate) questions: Vec<ExplainRequest>,
    pub(crate) pods: Vec<GetPolicyRequest>,
}

impl Agent {
    /// Serves `answers` on a fresh socket. Must be called within a runtime.
    pub(crate) fn serve(answers: Answers) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("kni.sock")).unwrap();
        let asked = Arc::<Mutex<Asked>>::default();
        let service = RuntimeServer::new(Service {
            answers,
            asked: Arc::clone(&asked),
        });
        let server = tokio::spawn(async move {
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self { folder, server, asked }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("kni.sock")
    }

    /// What clients sent until now.
    pub(crate) fn asked(&self) -> Asked {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Service {
    answers: Answers,
    asked: Arc<Mutex<Asked>>,
}

impl Service {
    /// The items, followed by the configured end of the stream.
    fn stream<T: Send + 'static>(&self, items: Vec<T>) -> Items<T> {
        let items = tokio_stream::iter(items).map(Ok);
        match self.answers.after.clone() {
            After::Ends => Box::pin(items),
            After::Stays => Box::pin(items.chain(tokio_stream::pending())),
            After::Fails(status) => Box::pin(items.chain(tokio_stream::once(Err(status)))),
        }
    }
}

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Runtime for Service {
    async fn collect_garbage(
        &self,
        _request: Request<kni_proto::runtime::CollectGarbageRequest>,
    ) -> Result<Response<kni_proto::runtime::CollectGarbageResponse>, Status> {
        Err(Status::unimplemented("knictl never asks for it"))
    }

    type WatchDropsStream = Items<DropEvent>;
    type WatchFlowsStream = Items<Flow>;

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        Ok(Response::new(self.answers.status.clone()))
    }

    async fn list_networks(&self, _: Request<ListNetworksRequest>) -> Result<Response<ListNetworksResponse>, Status> {
        Ok(Response::new(self.answers.networks.clone()))
    }

    async fn list_interfaces(
        &self,
        request: Request<ListInterfacesRequest>,
    ) -> Result<Response<ListInterfacesResponse>, Status> {
        self.asked.lock().unwrap().interfaces.push(request.into_inner());
        Ok(Response::new(self.answers.interfaces.clone()))
    }

    async fn list_drops(&self, _: Request<ListDropsRequest>) -> Result<Response<ListDropsResponse>, Status> {
        Ok(Response::new(self.answers.drops.clone()))
    }

    async fn watch_drops(&self, _: Request<WatchDropsRequest>) -> Result<Response<Self::WatchDropsStream>, Status> {
        Ok(Response::new(self.stream(self.answers.events.clone())))
    }

    async fn list_flows(&self, request: Request<ListFlowsRequest>) -> Result<Response<ListFlowsResponse>, Status> {
        let filter = request.into_inner().filter.unwrap();
        self.asked.lock().unwrap().flows.push(filter);
        let flows = self.answers.flows.clone();
        Ok(Response::new(ListFlowsResponse { flows }))
    }

    async fn watch_flows(
        &self,
        request: Request<WatchFlowsRequest>,
    ) -> Result<Response<Self::WatchFlowsStream>, Status> {
        let filter = request.into_inner().filter.unwrap();
        self.asked.lock().unwrap().flows.push(filter);
        Ok(Response::new(self.stream(self.answers.flows.clone())))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        self.asked.lock().unwrap().questions.push(request.into_inner());
        Ok(Response::new(self.answers.explanation.clone()))
    }

    async fn probe_tunnel(&self, _: Request<ProbeTunnelRequest>) -> Result<Response<ProbeTunnelResponse>, Status> {
        Ok(Response::new(ProbeTunnelResponse::default()))
    }

    async fn get_policy(&self, request: Request<GetPolicyRequest>) -> Result<Response<GetPolicyResponse>, Status> {
        self.asked.lock().unwrap().pods.push(request.into_inner());
        Ok(Response::new(self.answers.policy.clone()))
    }

    async fn list_services(&self, _: Request<ListServicesRequest>) -> Result<Response<ListServicesResponse>, Status> {
        Ok(Response::new(self.answers.services.clone()))
    }

    async fn list_maps(&self, _: Request<ListMapsRequest>) -> Result<Response<ListMapsResponse>, Status> {
        match &self.answers.maps_refusal {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(Response::new(self.answers.maps.clone())),
        }
    }
}
