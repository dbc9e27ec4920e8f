//! Test double of the agent: serves `kni.runtime.v1` with prepared answers on a socket of its own.

use std::{
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex},
};

use kni_proto::runtime::{
    DropEvent, GetStatusRequest, GetStatusResponse, ListDropsRequest, ListDropsResponse, ListInterfacesRequest,
    ListInterfacesResponse, ListMapsRequest, ListMapsResponse, ListNetworksRequest, ListNetworksResponse,
    WatchDropsRequest,
    runtime_server::{Runtime, RuntimeServer},
};
use tempfile::TempDir;
use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, transport::Server};

/// What the stream of drops does after its events.
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
    /// With this, `ListMaps` is refused.
    pub(crate) maps_refusal: Option<Status>,
    pub(crate) maps: ListMapsResponse,
    pub(crate) events: Vec<DropEvent>,
    pub(crate) after: After,
}

/// A serving fake; stops, and removes its socket, when dropped.
pub(crate) struct Agent {
    folder: TempDir,
    server: JoinHandle<()>,
    asked: Arc<Mutex<Vec<ListInterfacesRequest>>>,
}

impl Agent {
    /// Serves `answers` on a fresh socket. Must be called within a runtime.
    pub(crate) fn serve(answers: Answers) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("kni.sock")).unwrap();
        let asked = Arc::default();
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

    /// The interface filters that clients sent.
    pub(crate) fn asked(&self) -> Vec<ListInterfacesRequest> {
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
    asked: Arc<Mutex<Vec<ListInterfacesRequest>>>,
}

#[tonic::async_trait]
impl Runtime for Service {
    type WatchDropsStream = Pin<Box<dyn Stream<Item = Result<DropEvent, Status>> + Send>>;

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
        self.asked.lock().unwrap().push(request.into_inner());
        Ok(Response::new(self.answers.interfaces.clone()))
    }

    async fn list_drops(&self, _: Request<ListDropsRequest>) -> Result<Response<ListDropsResponse>, Status> {
        Ok(Response::new(self.answers.drops.clone()))
    }

    async fn watch_drops(&self, _: Request<WatchDropsRequest>) -> Result<Response<Self::WatchDropsStream>, Status> {
        let events = tokio_stream::iter(self.answers.events.clone()).map(Ok);
        Ok(Response::new(match self.answers.after.clone() {
            After::Ends => Box::pin(events),
            After::Stays => Box::pin(events.chain(tokio_stream::pending())),
            After::Fails(status) => Box::pin(events.chain(tokio_stream::once(Err(status)))),
        }))
    }

    async fn list_maps(&self, _: Request<ListMapsRequest>) -> Result<Response<ListMapsResponse>, Status> {
        match &self.answers.maps_refusal {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(Response::new(self.answers.maps.clone())),
        }
    }
}
