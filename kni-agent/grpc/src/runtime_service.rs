//! Implements `kni.runtime.v1.Runtime`, the queries of operators and tools to the running agent.

use std::{path::PathBuf, pin::Pin, sync::Arc, time::Instant};

use futures::Stream;
use kni_model::{
    Feature,
    view::{InterfaceFilter, StatusView},
};
use kni_proto::runtime::{
    CollectGarbageRequest, CollectGarbageResponse, DropEvent, ExplainRequest, ExplainResponse, Flow, GetPolicyRequest,
    GetPolicyResponse, GetStatusRequest, GetStatusResponse, ListDropsRequest, ListDropsResponse, ListFlowsRequest,
    ListFlowsResponse, ListInterfacesRequest, ListInterfacesResponse, ListMapsRequest, ListMapsResponse,
    ListNetworksRequest, ListNetworksResponse, ListServicesRequest, ListServicesResponse, ProbeTunnelRequest,
    ProbeTunnelResponse, WatchDropsRequest, WatchFlowsRequest, runtime_server::Runtime,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{
    backend::Backend,
    call::Call,
    convert, drops, features, flow_answer, flows,
    inspect::Inspect,
    policy_answer, question, runtime_answer,
    services::Services,
    socket::BindError,
    status::{IntoStatus, one_line},
};

/// The service over the services of the node.
#[derive(Clone)]
pub(super) struct RuntimeService<B> {
    node: Services<B>,
    process: Arc<Process>,
    stopping: watch::Receiver<bool>,
}

/// What the server reports about its own process.
#[derive(Debug)]
struct Process {
    started: Instant,
    kernel_release: String,
    sockets: Vec<String>,
    /// Why other sockets could not be made.
    refused_sockets: Vec<String>,
}

impl<B: Backend> RuntimeService<B> {
    /// A service whose streams end when `stopping` becomes true. It reports the paths at which it is served, and why it
    /// is not at others.
    pub(super) fn new(
        node: Services<B>,
        sockets: &[PathBuf],
        refused: &[BindError],
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let process = Arc::new(Process {
            started: Instant::now(),
            kernel_release: kernel_release(),
            sockets: sockets.iter().map(|path| path.display().to_string()).collect(),
            refused_sockets: refused.iter().map(ToString::to_string).collect(),
        });
        Self {
            node,
            process,
            stopping,
        }
    }

    /// Runs a query that may block, on a task that outlives the connection.
    async fn ask<R, T: Send + 'static>(
        &self,
        method: &'static str,
        request: &Request<R>,
        question: impl FnOnce(&dyn Inspect) -> Result<T, Status> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let inspector = Arc::clone(&self.node.inspector);
        Call::query(method, request)
            .run(async move {
                let answer = tokio::task::spawn_blocking(move || question(&*inspector)).await;
                answer.unwrap_or_else(|error| Err(Status::internal(one_line(&format!("{method}: {error}")))))
            })
            .await
    }
}

impl Process {
    fn status(&self, view: StatusView) -> GetStatusResponse {
        GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ready: view.ready,
            reasons: [view.reasons, self.refused_sockets.clone()].concat(),
            kernel_release: self.kernel_release.clone(),
            hook: view.hook,
            layout_version: kni_common::layout::LAYOUT_VERSION,
            pin_path: view.pin_path.display().to_string(),
            sockets: self.sockets.clone(),
            sandboxes: view.sandboxes,
            attachments: view.attachments,
            endpoints_capacity: view.endpoints_capacity,
            warm_sandboxes: view.warm_sandboxes,
            pending_removals: view.pending_removals,
            pending_links: view.pending_links,
            uplink: Some(runtime_answer::uplink(view.uplink)),
            features_core: features::names(&Feature::CORE),
            features_extended: features::names(&Feature::EXTENDED),
            kni_methods: features::METHODS.map(str::to_owned).to_vec(),
        }
    }
}

fn kernel_release() -> String {
    match nix::sys::utsname::uname() {
        Ok(names) => names.release().to_string_lossy().into_owned(),
        Err(error) => {
            tracing::warn!(%error, "uname failed");
            String::new()
        }
    }
}

#[tonic::async_trait]
impl<B: Backend> Runtime for RuntimeService<B> {
    async fn get_status(&self, request: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let process = Arc::clone(&self.process);
        self.ask("GetStatus", &request, move |inspector| {
            Ok(process.status(inspector.status()))
        })
        .await
    }

    async fn list_networks(
        &self,
        request: Request<ListNetworksRequest>,
    ) -> Result<Response<ListNetworksResponse>, Status> {
        self.ask("ListNetworks", &request, move |inspector| {
            Ok(ListNetworksResponse {
                networks: inspector.networks().iter().map(runtime_answer::network).collect(),
                refused: inspector.refused().into_iter().map(runtime_answer::refused).collect(),
            })
        })
        .await
    }

    async fn list_interfaces(
        &self,
        request: Request<ListInterfacesRequest>,
    ) -> Result<Response<ListInterfacesResponse>, Status> {
        let ListInterfacesRequest {
            pod_namespace,
            pod_name,
            network,
            sandbox_id,
        } = request.get_ref().clone();
        let filter = InterfaceFilter {
            pod_namespace,
            pod_name,
            network,
            sandbox: sandbox_id,
        };
        self.ask("ListInterfaces", &request, move |inspector| {
            Ok(ListInterfacesResponse {
                interfaces: inspector
                    .interfaces(&filter)
                    .into_iter()
                    .map(runtime_answer::interface)
                    .collect(),
            })
        })
        .await
    }

    async fn list_drops(&self, request: Request<ListDropsRequest>) -> Result<Response<ListDropsResponse>, Status> {
        self.ask("ListDrops", &request, |inspector| {
            Ok(ListDropsResponse {
                drops: inspector.drops().into_iter().map(runtime_answer::drop_count).collect(),
            })
        })
        .await
    }

    type WatchDropsStream = Pin<Box<dyn Stream<Item = Result<DropEvent, Status>> + Send>>;

    async fn watch_drops(
        &self,
        request: Request<WatchDropsRequest>,
    ) -> Result<Response<Self::WatchDropsStream>, Status> {
        let events = self.node.inspector.subscribe_drops();
        let stream: Self::WatchDropsStream = Box::pin(drops::watch(events, self.stopping.clone()));
        Call::query("WatchDrops", &request).run(async move { Ok(stream) }).await
    }

    async fn list_maps(&self, request: Request<ListMapsRequest>) -> Result<Response<ListMapsResponse>, Status> {
        self.ask("ListMaps", &request, |inspector| {
            Ok(ListMapsResponse {
                maps: inspector.maps().into_iter().map(runtime_answer::map).collect(),
            })
        })
        .await
    }

    async fn list_flows(&self, request: Request<ListFlowsRequest>) -> Result<Response<ListFlowsResponse>, Status> {
        let filter = question::flow_filter(request.get_ref().filter.clone());
        self.ask("ListFlows", &request, move |inspector| {
            let flows = inspector
                .flows(&filter)
                .iter()
                .map(|flow| flow_answer::flow(flow))
                .collect();
            Ok(ListFlowsResponse { flows })
        })
        .await
    }

    type WatchFlowsStream = Pin<Box<dyn Stream<Item = Result<Flow, Status>> + Send>>;

    async fn watch_flows(
        &self,
        request: Request<WatchFlowsRequest>,
    ) -> Result<Response<Self::WatchFlowsStream>, Status> {
        let filter = question::flow_filter(request.get_ref().filter.clone());
        let flows = self.node.inspector.subscribe_flows();
        let stream: Self::WatchFlowsStream = Box::pin(flows::watch(flows, filter, self.stopping.clone()));
        Call::query("WatchFlows", &request).run(async move { Ok(stream) }).await
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let wire = request.get_ref().clone();
        self.ask("Explain", &request, move |inspector| {
            let question = question::explain(wire).map_err(IntoStatus::into_status)?;
            let explanation = inspector.explain(&question).map_err(IntoStatus::into_status)?;
            Ok(flow_answer::explanation(explanation))
        })
        .await
    }

    async fn probe_tunnel(
        &self,
        request: Request<ProbeTunnelRequest>,
    ) -> Result<Response<ProbeTunnelResponse>, Status> {
        self.ask("ProbeTunnel", &request, |inspector| {
            let probe = inspector.probe_tunnel().map_err(IntoStatus::into_status)?;
            Ok(runtime_answer::tunnel_probe(probe))
        })
        .await
    }

    async fn get_policy(&self, request: Request<GetPolicyRequest>) -> Result<Response<GetPolicyResponse>, Status> {
        let wire = request.get_ref().clone();
        self.ask("GetPolicy", &request, move |inspector| {
            let pod = question::pod(wire).map_err(IntoStatus::into_status)?;
            let policy = inspector.policy(&pod).map_err(IntoStatus::into_status)?;
            let interfaces = policy.into_iter().map(policy_answer::interface_policy).collect();
            Ok(GetPolicyResponse { interfaces })
        })
        .await
    }

    async fn collect_garbage(
        &self,
        request: Request<CollectGarbageRequest>,
    ) -> Result<Response<CollectGarbageResponse>, Status> {
        let call = Call::change("CollectGarbage", &request);
        let (backend, request) = (
            self.node.backend.clone(),
            convert::garbage_request(request.into_inner()),
        );
        call.run(async move {
            let garbage = backend
                .collect_garbage(request)
                .await
                .map_err(IntoStatus::into_status)?;
            Ok(convert::garbage(garbage))
        })
        .await
    }

    async fn list_services(
        &self,
        request: Request<ListServicesRequest>,
    ) -> Result<Response<ListServicesResponse>, Status> {
        self.ask("ListServices", &request, |inspector| {
            let services = inspector
                .services()
                .into_iter()
                .map(policy_answer::service_port)
                .collect();
            Ok(ListServicesResponse { services })
        })
        .await
    }
}
