//! Defines the request of a client to attach a pod sandbox.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use super::{
    Bandwidth, CniAttachment, IfName, MacAddr, NetworkName, NetworkSelection, PodRef, PortMapping, SandboxId,
    policy::ContainerPort,
};

/// A request to attach a sandbox, independent of any wire type.
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
    /// Labels of the annotation `kni.dev/labels`, for requests without labels of the pod. Its author writes them, so
    /// they count without a cluster only.
    pub annotated_labels: BTreeMap<String, String>,
    /// The requested properties of the primary interface.
    pub primary: PrimarySelection,
    /// Name of the primary interface inside the pod; the default is `eth0`.
    pub ifname: Option<IfName>,
    /// The CNI attachment, if a CNI runtime sent the request.
    pub cni: Option<CniAttachment>,
    /// Requested interfaces beside the primary one, in order.
    pub networks: Vec<NetworkSelection>,
    /// Ports of the containers; host port 0 means none is mapped.
    pub port_mappings: Vec<PortMapping>,
    /// Named ports of the containers, which policies and services may refer to. No name occurs twice.
    pub container_ports: Vec<ContainerPort>,
    /// Rate limits of the primary interface.
    pub bandwidth: Bandwidth,
    /// Parameters for the CNI plugins that the agent runs.
    pub hints: PluginHints,
    /// The sandbox of the same pod, if this one is an additional interface of it.
    pub parent: Option<SandboxId>,
}

/// Parameters that a CNI plugin receives if its configuration declares the capability.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginHints {
    /// Annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Name servers of the pod.
    pub dns_servers: Vec<String>,
    /// Search domains of the resolver.
    pub dns_searches: Vec<String>,
    /// Options of the resolver.
    pub dns_options: Vec<String>,
}

/// The requested properties of a pod's primary interface; the agent chooses where a field is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrimarySelection {
    /// Network to join; by default the default network.
    pub network: Option<NetworkName>,
    /// The selection of the annotation that named `network`. In a cluster a definition of its name comes first.
    pub selection: Option<NetworkSelection>,
    /// Whether the pod named none, and the network is that of its namespace.
    pub by_namespace: bool,
    /// Whether the pod has no primary interface at all.
    pub none: bool,
    /// Requested addresses in the network, without prefix, in the given order.
    pub ips: Vec<IpAddr>,
    /// Requested MAC address.
    pub mac: Option<MacAddr>,
    /// Whether the default routes use it; by default they do, unless another interface requests them.
    pub default_route: Option<bool>,
}
