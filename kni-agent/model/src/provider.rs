//! Defines the providers of networks: their parameters, interfaces and features.

use std::{fmt, net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{IfName, MacAddr};

/// The component that creates the interfaces of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Provider {
    /// The agent: a veth pair with programs at its host end.
    #[default]
    Ebpf,
    /// The agent: a macvlan interface on an interface of the node.
    Macvlan(Macvlan),
    /// The agent: an interface of the node that is moved into the pod.
    HostDevice(HostDevices),
    /// The agent: a tap device for a virtual machine.
    Tap(Tap),
    /// CNI plugins.
    Cni(CniSource),
}

/// Parameters of [`Provider::Macvlan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Macvlan {
    /// Interface of the node that the pods share.
    pub parent: IfName,
    /// Whether the node itself may use the parent.
    pub allow_uplink: bool,
    /// The connectivity between pods.
    pub mode: MacvlanMode,
    /// Gateways of the link, at most one per family, inside the subnets.
    pub gateways: Vec<IpAddr>,
}

/// The connectivity between pods that share a parent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MacvlanMode {
    /// Pods reach each other directly, and the hosts on the parent's link.
    #[default]
    Bridge,
    /// Pods only reach the hosts on the parent's link.
    Private,
    /// Pods reach each other through a switch on the parent's link that reflects frames.
    Vepa,
    /// One pod uses the parent exclusively.
    Passthru,
}

/// Parameters of [`Provider::HostDevice`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevices {
    /// Interfaces of the node, each for one pod at a time; at least one.
    pub devices: Vec<IfName>,
    /// Gateways of the link, at most one per family, inside the subnets.
    pub gateways: Vec<IpAddr>,
}

/// Parameters of [`Provider::Tap`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// User that may open it; without one, a process with `CAP_NET_ADMIN` in the pod's namespace.
    pub owner: Option<u32>,
    /// Group that may open it.
    pub group: Option<u32>,
    /// Whether it has several queues.
    pub multi_queue: bool,
}

/// The reference to the configuration of [`Provider::Cni`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CniSource {
    /// By the `name` inside the file, regardless of the file name.
    Name(String),
    /// By file name in the configuration folder.
    File(String),
}

impl fmt::Display for CniSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "configuration {name:?}"),
            Self::File(file) => write!(f, "configuration file {file:?}"),
        }
    }
}

/// The kind of an attachment's interface, with everything that is needed to remove it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterfaceKind {
    /// A veth pair created by the agent. The only kind with a row in the dataplane.
    #[default]
    Veth,
    /// A macvlan interface, created in the pod's namespace.
    Macvlan(Macvlan),
    /// An interface of the node, moved into the pod.
    HostDevice(MovedDevice),
    /// A persistent tap device in the pod's namespace.
    Tap(Tap),
    /// An interface created by CNI plugins.
    Cni(CniInterface),
}

impl InterfaceKind {
    /// The name for operators.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Macvlan(_) => "macvlan",
            Self::HostDevice(_) => "host-device",
            Self::Tap(_) => "tap",
            Self::Cni(_) => "cni",
        }
    }

    /// Whether the dataplane has a row for it, and therefore policies and counters.
    pub const fn has_row(&self) -> bool {
        self.is_ebpf() || self.is_plugins()
    }

    /// Whether it is a veth pair created by the agent, with its own datapath.
    pub const fn is_ebpf(&self) -> bool {
        matches!(self, Self::Veth)
    }

    /// Whether it is a veth pair created by CNI plugins: its host end can carry programs.
    pub const fn is_plugins(&self) -> bool {
        matches!(self, Self::Cni(interface) if interface.veth)
    }

    /// Whether its addresses were leased by the agent.
    pub const fn is_leased(&self) -> bool {
        !matches!(self, Self::Cni(_))
    }
}

/// The properties of a node's device before it was moved into a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedDevice {
    /// Its name on the node.
    pub device: IfName,
    /// Its MAC address.
    pub mac: MacAddr,
    /// Its MTU.
    pub mtu: u32,
    /// Whether it was up.
    pub up: bool,
    /// Its alias.
    pub alias: Option<String>,
    /// Whether the kernel moves it back to the node when its namespace ends. Virtual devices are deleted with the
    /// namespace.
    pub physical: bool,
}

/// The result of CNI plugins, and the file with the data that is needed to remove it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniInterface {
    /// Name of the configuration.
    pub configuration: String,
    /// The file of the cached call: configuration, arguments and result.
    pub cached: PathBuf,
    /// Addresses of the interface with their prefixes, as the plugins reported them.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// Gateways that belong to the addresses.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    /// Routes that the plugins reported.
    #[serde(default)]
    pub routes: Vec<CniRoute>,
    /// Whether it is a veth whose host end is in the attachment.
    #[serde(default)]
    pub veth: bool,
}

/// A route in the pod that CNI plugins created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniRoute {
    /// The destination range.
    pub destination: IpNet,
    /// The gateway; `None` for the gateway of the address.
    pub gateway: Option<IpAddr>,
}

/// A feature of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// Interfaces have addresses that no other interface of the network has.
    Addresses,
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// The MTU can be configured or is reported.
    Mtu,
    /// The MAC address can be chosen and is reported.
    Mac,
    /// Interfaces are listed with their problems.
    Status,
    /// It can be the default network.
    DefaultNetwork,
    /// Policies are enforced; with CNI plugins, where the interface is a veth pair.
    Policy,
    /// Services of the network are served.
    Services,
    /// Pods leave the node with an address of the node.
    Egress,
    /// Ports of the node are forwarded to pods.
    HostPorts,
    /// Its traffic is separated from other networks with the same addresses.
    Isolation,
    /// The host ends run XDP.
    Xdp,
    /// The bandwidth annotations of Kubernetes are honoured.
    Bandwidth,
}

impl Feature {
    /// The features of every network.
    pub const CORE: [Self; 6] = [
        Self::Addresses,
        Self::Ipv4,
        Self::Ipv6,
        Self::Mtu,
        Self::Mac,
        Self::Status,
    ];

    /// The features that depend on the provider of the network ([`Provider::extended`]).
    pub const EXTENDED: [Self; 8] = [
        Self::DefaultNetwork,
        Self::Policy,
        Self::Services,
        Self::Egress,
        Self::HostPorts,
        Self::Isolation,
        Self::Xdp,
        Self::Bandwidth,
    ];

    /// The name for operators.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Addresses => "addresses",
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Mtu => "mtu",
            Self::Mac => "mac",
            Self::Status => "status",
            Self::DefaultNetwork => "default-network",
            Self::Policy => "policy",
            Self::Services => "services",
            Self::Egress => "egress",
            Self::HostPorts => "host-ports",
            Self::Isolation => "isolation",
            Self::Xdp => "xdp",
            Self::Bandwidth => "bandwidth",
        }
    }
}

impl Provider {
    /// The name in the manifest.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Ebpf => "Ebpf",
            Self::Macvlan(_) => "Macvlan",
            Self::HostDevice(_) => "HostDevice",
            Self::Tap(_) => "Tap",
            Self::Cni(_) => "CNI",
        }
    }

    /// The features of each provider in addition to [`Feature::CORE`]; this is their only definition. The features of
    /// CNI plugins depend on what their configuration declares; this is the maximum.
    pub const fn extended(&self) -> &'static [Feature] {
        match self {
            Self::Ebpf => &Feature::EXTENDED,
            Self::Macvlan(_) | Self::HostDevice(_) | Self::Tap(_) => &[],
            Self::Cni(_) => &[
                Feature::DefaultNetwork,
                Feature::Policy,
                Feature::HostPorts,
                Feature::Bandwidth,
            ],
        }
    }

    /// All features, core features first.
    pub fn features(&self) -> Vec<Feature> {
        Feature::CORE.iter().chain(self.extended()).copied().collect()
    }

    /// Whether the agent's own dataplane carries the network.
    pub const fn is_ebpf(&self) -> bool {
        matches!(self, Self::Ebpf)
    }

    /// Gateways on the link that the network shares with others.
    pub fn gateways(&self) -> &[IpAddr] {
        match self {
            Self::Macvlan(macvlan) => &macvlan.gateways,
            Self::HostDevice(devices) => &devices.gateways,
            Self::Ebpf | Self::Tap(_) | Self::Cni(_) => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_network_has_the_core_and_those_with_host_ends_have_policy() {
        let tap = Provider::Tap(Tap::default());
        let cni = Provider::Cni(CniSource::Name("bridge".to_owned()));
        for provider in [&Provider::Ebpf, &tap, &cni] {
            assert!(provider.features().starts_with(&Feature::CORE));
            assert_eq!(provider.features().contains(&Feature::Policy), *provider != tap);
        }
        assert!(cni.features().contains(&Feature::DefaultNetwork));
        assert_eq!(tap.features(), Feature::CORE);
        assert!(Feature::EXTENDED.iter().all(|feature| !Feature::CORE.contains(feature)));
        assert!(cni.extended().iter().all(|feature| Feature::EXTENDED.contains(feature)));
    }

    #[test]
    fn interfaces_of_older_records_are_veth_pairs() {
        assert!(InterfaceKind::default().is_ebpf());
        let kind = InterfaceKind::Tap(Tap::default());
        let row = serde_json::to_string(&kind).unwrap();
        assert_eq!(serde_json::from_str::<InterfaceKind>(&row).unwrap(), kind);
        assert!(kind.is_leased() && !kind.is_ebpf());
    }
}
