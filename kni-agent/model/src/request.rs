//! What a client asks for when it attaches a pod sandbox.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use super::{
    Bandwidth, CniAttachment, IfName, MacAddr, NetworkName, NetworkSelection, PodRef, PortMapping, SandboxId,
    policy::ContainerPort,
};

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
    /// Name of the primary interface inside the pod; without it `eth0`.
    pub ifname: Option<IfName>,
    /// The CNI attachment it is, where a CNI runtime asks.
    pub cni: Option<CniAttachment>,
    /// Interfaces wanted beside the primary one, in order.
    pub networks: Vec<NetworkSelection>,
    /// Ports of the containers; host port 0 means none is mapped.
    pub port_mappings: Vec<PortMapping>,
    /// Named ports of the containers, which policies and services may refer to. No name occurs twice.
    pub container_ports: Vec<ContainerPort>,
    /// What bounds the rates of the primary interface.
    pub bandwidth: Bandwidth,
    /// Parameters for CNI plugins behind the agent only.
    pub hints: PluginHints,
    /// The sandbox of the same pod that this one is a further interface of.
    pub parent: Option<SandboxId>,
}

/// Parameters that a CNI plugin gets if its configuration declares the capability.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginHints {
    /// Annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Name servers of the pod.
    pub dns_servers: Vec<String>,
    /// Domains that names are searched in.
    pub dns_searches: Vec<String>,
    /// Options of the resolver.
    pub dns_options: Vec<String>,
}

/// What a pod wants of its primary interface; empty where it leaves the choice to the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrimarySelection {
    /// Network to join; without it the default one.
    pub network: Option<NetworkName>,
    /// There shall be no primary interface at all.
    pub none: bool,
    /// Addresses the pod wants in the network, without prefix, in the order it gave them.
    pub ips: Vec<IpAddr>,
    /// MAC address the pod wants.
    pub mac: Option<MacAddr>,
    /// Whether the default routes leave through it; without it they do unless another interface asks for them.
    pub default_route: Option<bool>,
}
