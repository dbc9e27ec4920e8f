//! What the agent promises to remember about a sandbox: enough to answer queries and to tear everything down.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use super::{EndpointId, IfName, MacAddr, NetworkId, NetworkName, PodRef, PortMapping, SandboxId};

/// The kernel's identity of a network namespace: device and inode of its nsfs file (stat(2)). Paths may be reused,
/// this is not, as long as the namespace lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetnsIdentity {
    /// `st_dev` of the nsfs file.
    pub dev: u64,
    /// `st_ino` of the nsfs file; `ip netns identify` and `lsns` show it.
    pub inode: u64,
}

/// Where an attachment or sandbox stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Recorded before its first effect; a restarted agent undoes it.
    Pending,
    /// Complete, traffic flows.
    Ready,
    /// Being torn down; a restarted agent goes on with that.
    Deleting,
}

/// One sandbox joined to one network: one interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The dataplane's number of it.
    pub endpoint: EndpointId,
    /// Name of the network.
    pub network: NetworkName,
    /// Number of the network.
    pub network_id: NetworkId,
    /// Name inside the pod.
    pub ifname: IfName,
    /// Interface index inside the pod; 0 until the interface exists.
    pub ifindex: u32,
    /// Name of the host end.
    pub host_ifname: IfName,
    /// Index of the host end; 0 until the interface exists.
    pub host_ifindex: u32,
    /// MAC address of the pod end.
    pub mac: MacAddr,
    /// MAC address of the host end, which is the gateway's for the pod.
    pub host_mac: MacAddr,
    /// Leased IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Leased IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether the pod's default routes leave through this interface.
    pub default_route: bool,
    /// Whether the node may talk with this endpoint (default network).
    pub host_access: bool,
}

/// A sandbox and all its attachments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The key.
    pub id: SandboxId,
    /// Whose it is.
    pub pod: PodRef,
    /// Where it stands.
    pub phase: Phase,
    /// Path of the namespace as the client gave it.
    pub netns: PathBuf,
    /// The namespace itself, whatever its path becomes.
    pub netns_identity: NetnsIdentity,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Port mappings asked for.
    pub port_mappings: Vec<PortMapping>,
    /// Interfaces, the primary one first.
    pub attachments: Vec<Attachment>,
}
