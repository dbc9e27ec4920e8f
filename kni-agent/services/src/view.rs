//! Defines the operators' view of a frontend.

use std::net::{IpAddr, SocketAddr};

use kni_common::{
    address::to_ip,
    service::{BackendValue, ServiceKey},
};
use kni_model::{
    NetworkName,
    service::{ServicePort, ServiceRef},
};

use super::{choose::NoBackendReason, frontend::Frontend};

/// A service port at one virtual address, with its backends on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontendView {
    /// The Service.
    pub service: ServiceRef,
    /// Name, protocol and number of its port.
    pub port: ServicePort,
    /// Its network.
    pub network: NetworkName,
    /// Number of the network.
    pub network_id: u32,
    /// The virtual address.
    pub address: IpAddr,
    /// Backends for new flows; sorted.
    pub backends: Vec<SocketAddr>,
    /// Seconds for which a client keeps its backend.
    pub affinity_seconds: Option<u32>,
    /// The reason for an empty list of backends; `None` if there are backends.
    pub empty: Option<NoBackendReason>,
}

impl FrontendView {
    pub(super) fn new(key: &ServiceKey, frontend: &Frontend) -> Self {
        Self {
            service: frontend.service.clone(),
            port: frontend.port.clone(),
            network: frontend.network.clone(),
            network_id: key.network,
            address: frontend.address,
            backends: frontend.choice.backends.iter().map(socket_address).collect(),
            affinity_seconds: frontend.affinity_seconds,
            empty: frontend.choice.empty,
        }
    }
}

fn socket_address(backend: &BackendValue) -> SocketAddr {
    SocketAddr::new(to_ip(backend.address), u16::from_be_bytes(backend.port))
}
