//! Defines the mapping of a port of the node to a port of a container.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Transport of a port mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A port of a container and the node port it is mapped to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// Transport.
    pub protocol: PortProtocol,
    /// Port in the pod.
    pub container_port: u16,
    /// Port on the node; 0 for none.
    pub host_port: u16,
    /// Node address the mapping is limited to.
    pub host_ip: Option<IpAddr>,
}
