//! Defines the persistent record of a sandbox: enough to answer queries and to tear everything down.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::{
    Bandwidth, EndpointId, IfName, InterfaceKind, MacAddr, NetworkId, NetworkName, PodRef, PortMapping, SandboxId,
    policy::{ContainerPort, PolicyInterface, PolicyPod},
    selection::PRIMARY_IFNAME,
};

/// The kernel's identity of a network namespace: device and inode of its nsfs file (stat(2)). Paths may be reused; the
/// identity is unique as long as the namespace lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetnsIdentity {
    /// `st_dev` of the nsfs file.
    pub dev: u64,
    /// `st_ino` of the nsfs file; `ip netns identify` and `lsns` show it.
    pub inode: u64,
}

/// The phase of an attachment or sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Recorded before its first effect; a restarted agent undoes it.
    Pending,
    /// Complete, traffic flows.
    Ready,
    /// Being torn down; a restarted agent continues with that.
    Deleting,
}

/// One sandbox joined to one network: one interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Number of the endpoint in the dataplane.
    pub endpoint: EndpointId,
    /// Name of the network.
    pub network: NetworkName,
    /// The definition of another tool by which the pod named the network, as `namespace/name`.
    #[serde(default)]
    pub definition: Option<String>,
    /// Number of the network.
    pub network_id: NetworkId,
    /// Name inside the pod.
    pub ifname: IfName,
    /// Interface index inside the pod; 0 until the interface exists.
    pub ifindex: u32,
    /// Name of the host end; for kinds without one, the device that the interface was created from.
    pub host_ifname: IfName,
    /// Index of the host end; 0 until the interface exists, and for kinds that have no host end.
    pub host_ifindex: u32,
    /// MAC address of the pod end.
    pub mac: MacAddr,
    /// MAC address of the host end, which is the gateway's MAC address for the pod.
    pub host_mac: MacAddr,
    /// Leased IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Leased IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether the pod's default routes leave through this interface.
    pub default_route: bool,
    /// Whether the node may exchange packets with this endpoint (default network).
    pub host_access: bool,
    /// The routes through it beside the default routes, as its network specified when the pod was attached. Records of
    /// older agents have none.
    #[serde(default)]
    pub routes: Vec<IpNet>,
    /// Whether its host end runs `xdp_pod`, as the network specified when the pod was attached. Absent in records of
    /// agents without this program.
    #[serde(default)]
    pub xdp: bool,
    /// The kind of the interface. Absent in records of agents that only supported veth pairs.
    #[serde(default)]
    pub kind: InterfaceKind,
    /// Its rate limits.
    #[serde(default)]
    pub bandwidth: Bandwidth,
}

impl Attachment {
    /// Its addresses, IPv4 first: clients use the first one as the pod's address.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// The prefix length that one of its addresses has inside the pod. A veth pair routes every packet to its gateway,
    /// so its addresses are whole: 32 or 128 bits. On a shared link it is that of the network's subnet, and plugins
    /// report theirs.
    pub fn prefix_len(&self, address: IpAddr) -> u8 {
        let whole = IpNet::from(address).prefix_len();
        let found = match &self.kind {
            InterfaceKind::Veth => None,
            InterfaceKind::Cni(interface) => interface.addresses.iter().find(|net| net.addr() == address),
            InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => {
                self.routes.iter().find(|subnet| subnet.contains(&address))
            }
        };
        found.map_or(whole, IpNet::prefix_len)
    }

    /// The gateways that the pod uses on it, at most one per family it has.
    pub fn gateways(&self) -> Vec<IpAddr> {
        let link_local: [IpAddr; 2] = [kni_common::GATEWAY_V4.into(), kni_common::GATEWAY_V6.into()];
        let all: &[IpAddr] = match &self.kind {
            InterfaceKind::Veth => &link_local,
            InterfaceKind::Macvlan(macvlan) => &macvlan.gateways,
            InterfaceKind::Cni(interface) => &interface.gateways,
            InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => &[],
        };
        let has = |gateway: &&IpAddr| match gateway {
            IpAddr::V4(_) => self.ipv4.is_some(),
            IpAddr::V6(_) => self.ipv6.is_some(),
        };
        all.iter().filter(has).copied().collect()
    }

    /// The routes inside the pod through it, each with its gateway; `None` for destinations on the link.
    pub fn pod_routes(&self) -> Vec<(IpNet, Option<IpAddr>)> {
        if let InterfaceKind::Cni(interface) = &self.kind {
            let told = interface.routes.iter();
            return told.map(|route| (route.destination, route.gateway)).collect();
        }
        let gateways = self.gateways();
        let gateway_of = |net: &IpNet| gateways.iter().copied().find(|ip| ip.is_ipv4() == net.addr().is_ipv4());
        let any = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        let default = any.iter().filter(|net| self.default_route && gateway_of(net).is_some());
        let default = default.map(|net| (*net, gateway_of(net)));
        let routed = self.kind.is_ebpf();
        let reached = self.routes.iter().map(|net| (*net, gateway_of(net).filter(|_| routed)));
        let mut all: Vec<_> = default.chain(reached).collect();
        all.sort_by_key(|(net, _)| net.addr().is_ipv6());
        all
    }
}

/// A CNI attachment: one interface that a runtime added to a container. The agent records each as a separate sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniAttachment {
    /// Name of the runtime's network configuration.
    pub network: String,
    /// The runtime's id of the container.
    pub container: String,
    /// Name of the interface inside the pod.
    pub ifname: IfName,
    /// Distinguishes ADD calls: a repeated call of the same invocation gets the same result, another one is refused.
    pub invocation: String,
    /// Time of its completion, in nanoseconds since the node's boot; 0 until then.
    #[serde(default)]
    pub completed_ns: u64,
}

impl CniAttachment {
    /// Whether it is an additional interface of the pod, requested by a delegating plugin.
    pub fn is_additional(&self) -> bool {
        self.ifname.as_str() != PRIMARY_IFNAME
    }
}

/// A sandbox and all its attachments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The key.
    pub id: SandboxId,
    /// The pod it belongs to.
    pub pod: PodRef,
    /// Its phase.
    pub phase: Phase,
    /// Path of the namespace as the client gave it.
    pub netns: PathBuf,
    /// The identity of the namespace, independent of its path.
    pub netns_identity: NetnsIdentity,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Requested port mappings.
    pub port_mappings: Vec<PortMapping>,
    /// Named ports of its containers. Absent in records of agents without policies.
    #[serde(default)]
    pub container_ports: Vec<ContainerPort>,
    /// Interfaces, the primary one first.
    pub attachments: Vec<Attachment>,
    /// The CNI attachment; `None` for clients of KNI.
    #[serde(default)]
    pub cni: Option<CniAttachment>,
    /// The pod's own sandbox, if this one is an additional interface with a life cycle of its own. It is removed with
    /// it.
    #[serde(default)]
    pub parent: Option<SandboxId>,
}

impl Sandbox {
    /// Whether it is the pod's own sandbox, and not an additional interface.
    pub fn is_primary(&self) -> bool {
        self.parent.is_none() && !self.cni.as_ref().is_some_and(CniAttachment::is_additional)
    }

    /// Whether it is the pod's own sandbox and has no primary interface, because the pod requested none.
    pub fn has_no_primary_interface(&self) -> bool {
        let mut names = self.attachments.iter().map(|attachment| attachment.ifname.as_str());
        self.is_primary() && names.all(|name| name != PRIMARY_IFNAME)
    }

    /// The sandbox with the properties that policies use.
    pub fn policy_pod(&self) -> PolicyPod {
        let interfaces = self.attachments.iter().enumerate();
        PolicyPod {
            sandbox: self.id.clone(),
            pod: self.pod.clone(),
            labels: self.labels.clone(),
            ports: self.container_ports.clone(),
            interfaces: interfaces
                .map(|(position, attachment)| PolicyInterface {
                    // Without a row no policies are enforced at it, but other policies may still select it.
                    endpoint: attachment.kind.has_row().then_some(attachment.endpoint),
                    ifname: attachment.ifname.clone(),
                    network: attachment.network.clone(),
                    definition: attachment.definition.clone(),
                    network_id: attachment.network_id,
                    // A pod may have no primary interface.
                    primary: position == 0 && self.is_primary() && attachment.ifname.as_str() == PRIMARY_IFNAME,
                    ipv4: attachment.ipv4,
                    ipv6: attachment.ipv6,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::{CniInterface, Tap};

    fn attachment(kind: InterfaceKind) -> Attachment {
        Attachment {
            endpoint: EndpointId(1),
            network: "pods".parse().unwrap(),
            definition: None,
            network_id: NetworkId::try_from(1).unwrap(),
            ifname: "eth0".parse().unwrap(),
            ifindex: 2,
            host_ifname: "kni1".parse().unwrap(),
            host_ifindex: 3,
            mac: "02:00:00:00:00:01".parse().unwrap(),
            host_mac: "02:00:00:00:00:02".parse().unwrap(),
            ipv4: Some("10.1.0.2".parse().unwrap()),
            ipv6: Some("fd00::2".parse().unwrap()),
            mtu: 1500,
            default_route: true,
            host_access: true,
            routes: vec!["10.1.0.0/24".parse().unwrap(), "10.0.0.0/8".parse().unwrap()],
            xdp: false,
            kind,
            bandwidth: Bandwidth::default(),
        }
    }

    #[test]
    fn prefix_lengths_are_those_inside_the_pod() {
        let plugins = InterfaceKind::Cni(CniInterface {
            configuration: "bridge".to_owned(),
            cached: PathBuf::new(),
            addresses: vec!["10.1.0.2/16".parse().unwrap()],
            gateways: Vec::new(),
            routes: Vec::new(),
            veth: true,
        });
        let tap = InterfaceKind::Tap(Tap::default());
        for (kind, expected) in [(InterfaceKind::Veth, [32, 128]), (tap, [24, 128]), (plugins, [16, 128])] {
            let attachment = attachment(kind);
            let found: Vec<u8> = attachment.addresses().map(|ip| attachment.prefix_len(ip)).collect();
            assert_eq!(found, expected, "{:?}", attachment.kind);
        }
    }
}
