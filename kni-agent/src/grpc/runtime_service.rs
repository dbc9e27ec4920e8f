//! `kni.runtime.v1.Runtime`: what operators and tools ask of the running agent.

use std::{path::PathBuf, pin::Pin, sync::Arc, time::Instant};

use futures::Stream;
use kni_proto::runtime::{
    DropEvent, GetStatusRequest, GetStatusResponse, ListDropsRequest, ListDropsResponse, ListInterfacesRequest,
    ListInterfacesResponse, ListMapsRequest, ListMapsResponse, ListNetworksRequest, ListNetworksResponse,
    WatchDropsRequest, runtime_server::Runtime,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{backend::Backend, call::Call, drops, runtime_answer, status::one_line};
use crate::model::view::{InterfaceFilter, StatusView};

/// The service over a backend.
#[derive(Debug, Clone)]
pub(super) struct RuntimeService<B> {
    backend: B,
    process: Arc<Process>,
    stopping: watch::Receiver<bool>,
}

/// What the server knows of its own process.
#[derive(Debug)]
struct Process {
    started: Instant,
    kernel_release: String,
    sockets: Vec<String>,
}

impl<B: Backend> RuntimeService<B> {
    /// A service whose streams end when `stopping` becomes true.
    pub(super) fn new(backend: B, sockets: &[PathBuf], stopping: watch::Receiver<bool>) -> Self {
        let process = Arc::new(Process {
            started: Instant::now(),
            kernel_release: kernel_release(),
            sockets: sockets.iter().map(|path| path.display().to_string()).collect(),
        });
        Self {
            backend,
            process,
            stopping,
        }
    }

    /// Runs a question to the backend that may block.
    async fn ask<R, T: Send + 'static>(
        &self,
        method: &'static str,
        request: &Request<R>,
        question: impl FnOnce(&B) -> T + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let backend = self.backend.clone();
        Call::query(method, request)
            .run(async move {
                let answer = tokio::task::spawn_blocking(move || question(&backend)).await;
                answer.map_err(|error| Status::internal(one_line(&format!("{method}: {error}"))))
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
            reasons: view.reasons,
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
        self.ask("GetStatus", &request, move |backend| process.status(backend.status()))
            .await
    }

    async fn list_networks(
        &self,
        request: Request<ListNetworksRequest>,
    ) -> Result<Response<ListNetworksResponse>, Status> {
        self.ask("ListNetworks", &request, |backend| ListNetworksResponse {
            networks: backend.networks().iter().map(runtime_answer::network).collect(),
            refused: backend.refused().into_iter().map(runtime_answer::refused).collect(),
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
        self.ask("ListInterfaces", &request, move |backend| ListInterfacesResponse {
            interfaces: backend
                .interfaces(&filter)
                .into_iter()
                .map(runtime_answer::interface)
                .collect(),
        })
        .await
    }

    async fn list_drops(&self, request: Request<ListDropsRequest>) -> Result<Response<ListDropsResponse>, Status> {
        self.ask("ListDrops", &request, |backend| ListDropsResponse {
            drops: backend.drops().into_iter().map(runtime_answer::drop_count).collect(),
        })
        .await
    }

    type WatchDropsStream = Pin<Box<dyn Stream<Item = Result<DropEvent, Status>> + Send>>;

    async fn watch_drops(
        &self,
        request: Request<WatchDropsRequest>,
    ) -> Result<Response<Self::WatchDropsStream>, Status> {
        let events = self.backend.subscribe_drops();
        let stream: Self::WatchDropsStream = Box::pin(drops::watch(events, self.stopping.clone()));
        Call::query("WatchDrops", &request).run(async move { Ok(stream) }).await
    }

    async fn list_maps(&self, request: Request<ListMapsRequest>) -> Result<Response<ListMapsResponse>, Status> {
        self.ask("ListMaps", &request, |backend| ListMapsResponse {
            maps: backend.maps().into_iter().map(runtime_answer::map).collect(),
        })
        .await
    }
}
