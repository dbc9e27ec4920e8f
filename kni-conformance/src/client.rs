//! Calls a KNI server as the kubelet does, with a time limit for every call.

use std::{path::Path, time::Duration};

use hyper_util::rt::TokioIo;
use kni_proto::kni::{
    AttachInterfaceRequest, AttachInterfaceResponse, CreateNetworkRequest, CreateNetworkResponse, DeleteNetworkRequest,
    DetachInterfaceRequest, Network, QueryNodeNetworksRequest, QueryPodNetworkRequest, QueryPodNetworkResponse,
    SetupNodeNetworkRequest, kni_client::KniClient,
};
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint, Uri},
};

use crate::{
    error::{Failure, Result},
    limits::scaled,
};

/// Limit of a query: the kubelet waits for it without a limit while it relists its pods.
pub(crate) const QUERY: Duration = Duration::from_secs(2);
/// Limit of the methods that make or remove a namespace.
pub(crate) const CREATE: Duration = Duration::from_secs(10);
/// Limit of attach and detach.
pub(crate) const ATTACH: Duration = Duration::from_secs(30);
/// The kubelet's limit of a response.
const MAX_RESPONSE: usize = 16 << 20;

/// A connection to the server.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    kni: KniClient<Channel>,
}

impl Client {
    /// A client that connects with its first call.
    pub(crate) fn new(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        // The name is the `:authority`; the connector determines the destination.
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect);
        Self {
            kni: KniClient::new(channel).max_decoding_message_size(MAX_RESPONSE),
        }
    }

    /// All methods, for those that this client does not wrap.
    pub(crate) fn kni(&self) -> KniClient<Channel> {
        self.kni.clone()
    }

    /// `CreateNetwork`.
    pub(crate) async fn create(&self, request: CreateNetworkRequest) -> Result<CreateNetworkResponse> {
        call("CreateNetwork", CREATE, self.kni().create_network(request)).await
    }

    /// `DeleteNetwork`.
    pub(crate) async fn delete(&self, request: DeleteNetworkRequest) -> Result<()> {
        call("DeleteNetwork", CREATE, self.kni().delete_network(request)).await?;
        Ok(())
    }

    /// `DeleteNetwork` by sandbox id alone.
    pub(crate) async fn delete_id(&self, id: &str) -> Result<()> {
        let request = DeleteNetworkRequest {
            id: id.to_owned(),
            ..DeleteNetworkRequest::default()
        };
        self.delete(request).await
    }

    /// `DeleteNetwork` by the path of the namespace alone.
    pub(crate) async fn delete_path(&self, path: &str) -> Result<()> {
        let request = DeleteNetworkRequest {
            netns_path: path.to_owned(),
            ..DeleteNetworkRequest::default()
        };
        self.delete(request).await
    }

    /// `AttachInterface`.
    pub(crate) async fn attach(&self, request: AttachInterfaceRequest) -> Result<AttachInterfaceResponse> {
        call("AttachInterface", ATTACH, self.kni().attach_interface(request)).await
    }

    /// `DetachInterface`.
    pub(crate) async fn detach(&self, request: DetachInterfaceRequest) -> Result<()> {
        call("DetachInterface", ATTACH, self.kni().detach_interface(request)).await?;
        Ok(())
    }

    /// `DetachInterface` by sandbox id alone.
    pub(crate) async fn detach_id(&self, id: &str) -> Result<()> {
        let request = DetachInterfaceRequest {
            id: id.to_owned(),
            ..DetachInterfaceRequest::default()
        };
        self.detach(request).await
    }

    /// `QueryPodNetwork` by sandbox id alone.
    pub(crate) async fn query(&self, id: &str) -> Result<QueryPodNetworkResponse> {
        let request = QueryPodNetworkRequest {
            id: id.to_owned(),
            ..QueryPodNetworkRequest::default()
        };
        call("QueryPodNetwork", QUERY, self.kni().query_pod_network(request)).await
    }

    /// `QueryNodeNetworks`.
    pub(crate) async fn networks(&self) -> Result<Vec<Network>> {
        let mut kni = self.kni();
        let answer = kni.query_node_networks(QueryNodeNetworksRequest {});
        Ok(call("QueryNodeNetworks", QUERY, answer).await?.networks)
    }

    /// `SetupNodeNetwork`.
    pub(crate) async fn set_up(&self) -> Result<()> {
        let mut kni = self.kni();
        let answer = kni.setup_node_network(SetupNodeNetworkRequest {});
        call("SetupNodeNetwork", ATTACH, answer).await?;
        Ok(())
    }
}

/// Waits for the answer to a call.
pub(crate) async fn call<T>(
    method: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T> {
    let limit = scaled(limit);
    match timeout(limit, answer).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Failure::Call {
            method,
            code: status.code(),
            message: status.message().to_owned(),
        }),
        Err(_elapsed) => Err(Failure::Late { method, limit }),
    }
}
