//! Defines a validated `PodNetwork`.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{Access, NetworkId, NetworkName, Provider};

/// A validated network, as in its manifest. Any number of networks may use the same subnets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredSpec")]
pub struct NetworkSpec {
    /// Name of the network, unique on the node.
    pub name: NetworkName,
    /// Whether a pod's primary interface joins this network by default. Exactly one network is the default. Its pods,
    /// and no others, can exchange packets with the node.
    pub default: bool,
    /// Whether it accepts new attachments; a disabled network keeps its existing ones.
    pub enabled: bool,
    /// Address ranges, IPv4 or IPv6, not overlapping each other; at least one if the provider is the dataplane. Host
    /// bits are zero.
    pub subnets: Vec<IpNet>,
    /// Ranges inside `subnets` that are never leased.
    pub exclude_subnets: Vec<IpNet>,
    /// MTU of both ends of the pod interfaces, in bytes of IP packet (1280 to 65535).
    pub mtu: u32,
    /// How packets of its pods leave the node. [`EgressMode::Route`] in the default network only.
    pub egress: EgressMode,
    /// Source addresses for [`EgressMode::Masquerade`], at most one per family, outside `subnets` and
    /// `service_subnets`; the node's address for a family without one. Empty in other modes.
    pub egress_addresses: Vec<IpAddr>,
    /// Ranges of the virtual addresses of its Services, overlapping neither each other nor `subnets`. Host bits are
    /// zero.
    pub service_subnets: Vec<IpNet>,
    /// Whether its pod interfaces run an XDP program.
    pub xdp: bool,
    /// The provider of its interfaces.
    pub provider: Provider,
    /// The parts of `subnets` that this node leases addresses from; `None` if the node is alone and uses all of them.
    pub blocks: Option<Vec<IpNet>>,
    /// Who may join.
    pub access: Access,
    /// The number of the network in the whole cluster (1 to 2^24 - 1); `None` while it has none, and on a node that is
    /// alone. Other than its [`NetworkId`], which is of one node.
    pub number: Option<u32>,
    /// How packets cross from node to node: the same on all nodes, as kni-controller decides it.
    pub fabric: Fabric,
}

/// Bytes of the outer headers of a packet in the tunnel over IPv4, from the outer IP header to the inner Ethernet
/// header.
pub const OVERHEAD_V4: u32 = 50;
/// The same over IPv6.
pub const OVERHEAD_V6: u32 = 70;

/// How packets between pods of one network cross from node to node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fabric {
    /// In UDP packets between the nodes (VXLAN), with the number of the network.
    Overlay,
    /// Without a tunnel, by routes to the address blocks of the nodes.
    Native,
    /// They do not: pods reach those of their own node.
    #[default]
    None,
}

/// How packets of a network's pods leave the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EgressMode {
    /// No egress.
    None,
    /// Through the node's stack, with the pod's address.
    Route,
    /// With an address of the node, or a dedicated one, instead of the pod's.
    Masquerade,
}

impl EgressMode {
    /// The default mode: `Route` for the default network, as no other network has its addresses; `None` for others.
    pub const fn implied(default: bool) -> Self {
        if default { Self::Route } else { Self::None }
    }
}

/// A network as recorded in the state, perhaps written by an older agent with fewer fields.
#[derive(Deserialize)]
struct StoredSpec {
    name: NetworkName,
    default: bool,
    enabled: bool,
    subnets: Vec<IpNet>,
    exclude_subnets: Vec<IpNet>,
    mtu: u32,
    /// Absent in older records: the default network was routed then, others had no egress.
    egress: Option<EgressMode>,
    #[serde(default)]
    egress_addresses: Vec<IpAddr>,
    #[serde(default)]
    service_subnets: Vec<IpNet>,
    #[serde(default)]
    xdp: bool,
    #[serde(default)]
    provider: Provider,
    #[serde(default)]
    blocks: Option<Vec<IpNet>>,
    /// Absent in older records: no pod joins until the network is read again.
    #[serde(default)]
    access: Access,
    #[serde(default)]
    number: Option<u32>,
    /// Absent in older records: no packet left the node then.
    #[serde(default)]
    fabric: Fabric,
}

impl From<StoredSpec> for NetworkSpec {
    fn from(stored: StoredSpec) -> Self {
        Self {
            name: stored.name,
            default: stored.default,
            enabled: stored.enabled,
            subnets: stored.subnets,
            exclude_subnets: stored.exclude_subnets,
            mtu: stored.mtu,
            egress: stored.egress.unwrap_or(EgressMode::implied(stored.default)),
            egress_addresses: stored.egress_addresses,
            service_subnets: stored.service_subnets,
            xdp: stored.xdp,
            provider: stored.provider,
            blocks: stored.blocks,
            access: stored.access,
            number: stored.number,
            fabric: stored.fabric,
        }
    }
}

impl NetworkSpec {
    /// The gateway address of a subnet: its first host address, never leased to a pod.
    pub fn gateway(subnet: &IpNet) -> IpAddr {
        match subnet {
            IpNet::V4(net) => IpAddr::V4((u32::from(net.network()).saturating_add(1)).into()),
            IpNet::V6(net) => IpAddr::V6((u128::from(net.network()).saturating_add(1)).into()),
        }
    }
}

/// A network with its number on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The number in every dataplane key.
    pub id: NetworkId,
    /// Its specification.
    pub spec: NetworkSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_an_earlier_agent_keeps_its_meaning() {
        for (default, egress) in [(true, EgressMode::Route), (false, EgressMode::None)] {
            let row = format!(
                r#"{{"name":"blue","default":{default},"enabled":true,"subnets":["10.0.0.0/16"],"exclude_subnets":[],"mtu":1500}}"#
            );
            let spec: NetworkSpec = serde_json::from_str(&row).unwrap();
            assert_eq!((spec.egress, spec.xdp, spec.number), (egress, false, None));
            assert_eq!(spec.fabric, Fabric::None);
            assert_eq!(spec.provider, Provider::Ebpf);
            assert_eq!((spec.egress_addresses.len(), spec.service_subnets.len()), (0, 0));
        }
    }

    #[test]
    fn every_field_survives_the_state() {
        let spec = NetworkSpec {
            name: "blue".parse().unwrap(),
            default: true,
            enabled: false,
            subnets: vec!["10.0.0.0/16".parse().unwrap()],
            exclude_subnets: vec!["10.0.1.0/24".parse().unwrap()],
            mtu: 9000,
            egress: EgressMode::Masquerade,
            egress_addresses: vec!["192.0.2.1".parse().unwrap()],
            service_subnets: vec!["10.96.0.0/16".parse().unwrap()],
            xdp: true,
            provider: Provider::Tap(crate::provider::Tap::default()),
            blocks: Some(vec!["10.0.2.0/24".parse().unwrap()]),
            access: Access {
                namespaces: crate::access::Admitted::All,
                addresses: crate::access::Choice::Within(vec!["10.0.3.0/24".parse().unwrap()]),
                revoke: true,
                ..Access::default()
            },
            number: Some(1 << 23),
            fabric: Fabric::Overlay,
        };
        let row = serde_json::to_vec(&spec).unwrap();
        assert_eq!(serde_json::from_slice::<NetworkSpec>(&row).unwrap(), spec);
    }
}
