//! What a `PodNetwork` means once it has been validated.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{NetworkId, NetworkName};

/// A validated network, as its manifest says it. Any number of networks may use the same subnets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// Name of the network, unique on the node.
    pub name: NetworkName,
    /// The network that a pod's primary interface joins when nothing else is asked for. Exactly one network is it.
    /// Its pods, and no others, reach the node and are reached by the node.
    pub default: bool,
    /// A disabled network keeps its attachments but takes no new ones.
    pub enabled: bool,
    /// Address ranges, at least one, IPv4 or IPv6, not overlapping each other. Host bits are zero.
    pub subnets: Vec<IpNet>,
    /// Ranges inside `subnets` that are never handed out.
    pub exclude_subnets: Vec<IpNet>,
    /// MTU of both ends of the pod interfaces, in bytes of IP packet (1280 to 65535).
    pub mtu: u32,
}

impl NetworkSpec {
    /// The gateway address of a subnet: its first host address, never handed out to a pod.
    pub fn gateway(subnet: &IpNet) -> IpAddr {
        match subnet {
            IpNet::V4(net) => IpAddr::V4((u32::from(net.network()).saturating_add(1)).into()),
            IpNet::V6(net) => IpAddr::V6((u128::from(net.network()).saturating_add(1)).into()),
        }
    }
}

/// A network with the number it has on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The number in every dataplane key.
    pub id: NetworkId,
    /// What was asked for.
    pub spec: NetworkSpec,
}
