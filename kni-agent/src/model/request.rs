//! What a client asks for when it attaches a pod sandbox.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::{MacAddr, NetworkName, NetworkSelection, PodRef, SandboxId};

/// A request to attach a sandbox, already free of any wire type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachRequest {
    /// The sandbox; the key of the attachment.
    pub sandbox: SandboxId,
    /// The pod the sandbox belongs to.
    pub pod: PodRef,
    /// Path of the network namespace.
    pub netns: PathBuf,
    /// Labels of the pod (for policy in standalone mode).
    pub labels: BTreeMap<String, String>,
    /// What is wanted of the primary interface.
    pub primary: PrimarySelection,
    /// Interfaces wanted beside the primary one, in order.
    pub networks: Vec<NetworkSelection>,
    /// Ports of the containers; host port 0 means none is mapped.
    pub port_mappings: Vec<PortMapping>,
}

/// What a pod wants of its primary interface; empty where it leaves the choice to the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrimarySelection {
    /// Network to join; without it the default one.
    pub network: Option<NetworkName>,
    /// Addresses the pod wants in the network, without prefix, in the order it gave them.
    pub ips: Vec<IpAddr>,
    /// MAC address the pod wants.
    pub mac: Option<MacAddr>,
}

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
