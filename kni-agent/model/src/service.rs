//! Defines validated Services and their endpoints.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;

use super::{NetworkId, NetworkName, PodRef};

/// Names a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ServiceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The nodes whose endpoints a Service prefers (`spec.trafficDistribution`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TrafficDistribution {
    /// No preference.
    #[default]
    Any,
    /// Zone hints (`PreferClose`, `PreferSameZone`, or the annotation `service.kubernetes.io/topology-mode: Auto`).
    SameZone,
    /// Node hints, then zone hints (`PreferSameNode`).
    SameNode,
}

/// A Service with virtual addresses, so not a headless one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub reference: ServiceRef,
    /// Network it belongs to (label `kni.dev/network`); `None`: the default network.
    pub network: Option<NetworkName>,
    /// Virtual addresses, at most one per family.
    pub cluster_ips: Vec<IpAddr>,
    /// Whether another proxy on the node serves it. Then only its addresses are known, and there are no ports.
    pub foreign: bool,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// Seconds for which a client keeps its backend (`sessionAffinity: ClientIP`).
    pub affinity_seconds: Option<u32>,
    /// `internalTrafficPolicy: Local`.
    pub local_only: bool,
    /// Preference.
    pub distribution: TrafficDistribution,
    /// Its addresses beside the virtual ones.
    pub external: ExternalAddresses,
}

/// The addresses of a Service that are none of the cluster's own, in canonical form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExternalAddresses {
    /// Addresses that a load balancer assigned and whose packets it sends to the nodes unchanged
    /// (`status.loadBalancer.ingress` with `ipMode: VIP`).
    pub balanced: BTreeSet<IpAddr>,
    /// The clients that the load balancer admits (`spec.loadBalancerSourceRanges`); `None`: all.
    pub clients: Option<Vec<IpNet>>,
    /// Addresses that the writer of the Service chose (`spec.externalIPs`).
    pub chosen: BTreeSet<IpAddr>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServicePort {
    /// Its name, which EndpointSlices refer to; empty when it is the only port.
    pub name: String,
    /// IANA number of the transport: 6, 17 or 132.
    pub protocol: u8,
    /// The virtual port.
    pub port: u16,
}

/// An EndpointSlice that belongs to a Service (label `kubernetes.io/service-name`) that KNI serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Name of the Service, in the same namespace.
    pub service: String,
    /// Ports; those without a number are left out.
    pub ports: Vec<SlicePort>,
    /// Endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

/// A port of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlicePort {
    /// Name of the Service's port.
    pub name: String,
    /// IANA number of the transport.
    pub protocol: u8,
    /// The endpoint's port.
    pub port: u16,
}

/// An endpoint of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Addresses; all belong to the same endpoint, and the first one is used.
    pub addresses: Vec<IpAddr>,
    /// Takes new connections (absent means yes).
    pub ready: bool,
    /// Serves (absent means as `ready`).
    pub serving: bool,
    /// Is terminating (absent means no).
    pub terminating: bool,
    /// Its node.
    pub node: Option<String>,
    /// The pod that it stands for (`targetRef`); `None` for everything else, also for a pod with the addresses of its
    /// node.
    pub pod: Option<PodRef>,
    /// Zones that should use it (`hints.forZones`).
    pub for_zones: BTreeSet<String>,
    /// Nodes that should use it (`hints.forNodes`).
    pub for_nodes: BTreeSet<String>,
}

/// A network, with the properties that determine the endpoints of its Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceNetwork {
    /// Its number on this node.
    pub id: NetworkId,
    /// The address ranges of its pods.
    pub subnets: Vec<IpNet>,
    /// Whether packets to addresses outside of the pod networks take the node's stack, and so its own proxy.
    pub routed: bool,
}

/// The properties of the node that determine its choice of endpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePlace {
    /// Its name.
    pub name: String,
    /// Its zone (`topology.kubernetes.io/zone`).
    pub zone: Option<String>,
}
