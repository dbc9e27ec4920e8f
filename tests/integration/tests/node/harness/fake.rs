//! Fakes the KNI service of the agent with a plain tonic server that records its requests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use kni_proto::kni::{
    AttachInterfaceRequest, AttachInterfaceResponse, AttachNetworkRequest, CreateNetworkRequest, CreateNetworkResponse,
    DeleteNetworkRequest, DeleteNetworkResponse, DetachInterfaceRequest, DetachInterfaceResponse, IpConfig,
    QueryNodeNetworksRequest, QueryNodeNetworksResponse, QueryPodNetworkRequest, QueryPodNetworkResponse,
    SetupNodeNetworkRequest, SetupNodeNetworkResponse, kni_server::Kni,
};
use tonic::{Request, Response, Status};

type Answer<T> = Result<Response<T>, Status>;

/// A received request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Asked {
    Create(CreateNetworkRequest),
    Attach(AttachInterfaceRequest),
    Query(QueryPodNetworkRequest),
    Detach(DetachInterfaceRequest),
    Delete(DeleteNetworkRequest),
}

/// Answers attach with its request, create with `netns` if set, and query with `10.0.0.7` and `fd00::7`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fake {
    netns: Option<String>,
    requests: Arc<Mutex<Vec<Asked>>>,
}

impl Fake {
    pub(crate) fn in_netns(path: &str) -> Self {
        Self {
            netns: Some(path.into()),
            requests: Arc::default(),
        }
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.requests.lock().expect("no service panics").clone()
    }

    fn note(&self, asked: Asked) {
        self.requests.lock().expect("no service panics").push(asked);
    }
}

#[tonic::async_trait]
impl Kni for Fake {
    async fn create_network(&self, request: Request<CreateNetworkRequest>) -> Answer<CreateNetworkResponse> {
        self.note(Asked::Create(request.into_inner()));
        let netns_path = self
            .netns
            .clone()
            .ok_or_else(|| Status::resource_exhausted("network blue"))?;
        Ok(Response::new(CreateNetworkResponse {
            netns_path,
            ..Default::default()
        }))
    }

    async fn attach_interface(&self, request: Request<AttachInterfaceRequest>) -> Answer<AttachInterfaceResponse> {
        let request = request.into_inner();
        self.note(Asked::Attach(request.clone()));
        let config = IpConfig {
            ip: vec![request.name],
            mac: request.id,
            ..Default::default()
        };
        let ipconfigs = BTreeMap::from([("eth0".into(), config)]);
        Ok(Response::new(AttachInterfaceResponse {
            ipconfigs,
            extradata: request.extradata,
        }))
    }

    async fn query_pod_network(&self, request: Request<QueryPodNetworkRequest>) -> Answer<QueryPodNetworkResponse> {
        self.note(Asked::Query(request.into_inner()));
        let ip = ["10.0.0.7", "fd00::7"].map(str::to_owned).to_vec();
        let config = IpConfig {
            ip,
            mac: "02:00:00:00:00:07".into(),
            ..Default::default()
        };
        let ipconfigs = BTreeMap::from([("eth0".into(), config)]);
        Ok(Response::new(QueryPodNetworkResponse {
            ipconfigs,
            ..Default::default()
        }))
    }

    async fn detach_interface(&self, request: Request<DetachInterfaceRequest>) -> Answer<DetachInterfaceResponse> {
        self.note(Asked::Detach(request.into_inner()));
        Ok(Response::new(DetachInterfaceResponse {}))
    }

    async fn delete_network(&self, request: Request<DeleteNetworkRequest>) -> Answer<DeleteNetworkResponse> {
        self.note(Asked::Delete(request.into_inner()));
        Ok(Response::new(DeleteNetworkResponse {}))
    }

    async fn create_isolation_domain(&self, _: Request<CreateNetworkRequest>) -> Answer<CreateNetworkResponse> {
        Err(Status::unimplemented(""))
    }

    async fn delete_isolation_domain(&self, _: Request<DeleteNetworkRequest>) -> Answer<DeleteNetworkResponse> {
        Err(Status::unimplemented(""))
    }

    async fn attach_network(&self, _: Request<AttachNetworkRequest>) -> Answer<AttachInterfaceResponse> {
        Err(Status::unimplemented(""))
    }

    async fn detach_network(&self, _: Request<DetachInterfaceRequest>) -> Answer<DetachInterfaceResponse> {
        Err(Status::unimplemented(""))
    }

    async fn query_node_networks(&self, _: Request<QueryNodeNetworksRequest>) -> Answer<QueryNodeNetworksResponse> {
        Err(Status::unimplemented(""))
    }

    async fn setup_node_network(&self, _: Request<SetupNodeNetworkRequest>) -> Answer<SetupNodeNetworkResponse> {
        Err(Status::unimplemented(""))
    }
}
