//! Defines the views of the node for operators and clients: plain values without any wire type.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
};

use kni_common::{Direction, Verdict};

use super::{Attachment, Feature, Network, NetworkName, NetworkSpec, NumberProblem, PodRef, Sandbox, SandboxId};

/// A network and its state on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkView {
    /// The network.
    pub network: Network,
    /// Whether pods can be attached to it.
    pub ready: bool,
    /// Why not.
    pub reason: String,
    /// Attachments on this node.
    pub attachments: u32,
    /// Addresses that can be leased, in use or not, of both families.
    pub total_addresses: u128,
    /// Addresses in use.
    pub used_addresses: u128,
    /// IPv4 addresses.
    pub ipv4: AddressUse,
    /// IPv6 addresses.
    pub ipv6: AddressUse,
    /// Families that have no address left, as text for operators; empty if every family has one.
    pub exhausted: String,
    /// Its origin (file and line).
    pub origin: String,
    /// Its features.
    pub features: Vec<Feature>,
    /// The number that its packets between nodes may carry: of no other network of this node, and the same while pods
    /// are in the network. `None`: it exchanges none with other nodes.
    pub number: Option<u32>,
    /// Why it has none, or another one than the cluster has given it.
    pub number_problem: Option<NumberProblem>,
    /// Whether the cluster has given it another number, or none any more, which applies once no pod is in it.
    pub number_retained: bool,
}

/// The usage of one family of a network, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AddressUse {
    /// Addresses that can be leased, in use or not.
    pub total: u128,
    /// Addresses in use.
    pub used: u128,
    /// Addresses that can be leased now.
    pub free: u128,
    /// Addresses that can be leased again after a rest.
    pub resting: u128,
}

/// A manifest, or a part of one, that is not applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedManifest {
    /// File name.
    pub file: String,
    /// Line, from 1; 0 where none applies.
    pub line: u32,
    /// Path of the field (`spec.subnets[1]`), empty where none applies.
    pub field: String,
    /// The violated rule and a valid value.
    pub reason: String,
}

/// The desired networks according to the manifests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DesiredNetworks {
    /// Valid networks, each with its origin (file and line).
    pub networks: Vec<(NetworkSpec, String)>,
    /// The refused manifests.
    pub refused: Vec<RefusedManifest>,
    /// Networks that exist, but whose objects cannot be read: one that an earlier agent applied stays as it is.
    pub retained: BTreeSet<NetworkName>,
    /// Networks that have no number in the cluster, and why.
    pub number_problems: BTreeMap<NetworkName, NumberProblem>,
}

/// The owner of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Network it is attached to.
    pub network: NetworkName,
    /// The pod.
    pub pod: PodRef,
    /// Name of the interface in the pod.
    pub ifname: String,
    /// The sandbox.
    pub sandbox: SandboxId,
}

/// Packets and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Traffic counters of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndpointCounts {
    /// Sent by the pod and forwarded.
    pub from_pod: Count,
    /// Received by the pod.
    pub to_pod: Count,
    /// Dropped in both directions.
    pub dropped: Count,
}

/// A program at a host interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramView {
    /// Name in the ELF.
    pub name: String,
    /// The kernel's id of the program.
    pub id: u32,
    /// "tcx/ingress", "tcx/egress", "clsact/ingress", "clsact/egress" or "xdp/native".
    pub hook: String,
    /// The kernel's id of the link, 0 where the hook has none.
    pub link_id: u32,
}

/// One interface of one pod.
#[derive(Debug, Clone)]
pub struct InterfaceView {
    /// The sandbox it belongs to.
    pub sandbox: Arc<Sandbox>,
    /// The attachment; one of the sandbox's.
    pub attachment: Attachment,
    /// Programs at the host end.
    pub programs: Vec<ProgramView>,
    /// Whether the programs run on filters that links will replace once no client is served.
    pub provisional: bool,
    /// Counters.
    pub counts: EndpointCounts,
    /// Its problems; empty means healthy.
    pub problems: Vec<String>,
}

/// The requested interfaces; empty fields select all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InterfaceFilter {
    /// Namespace of the pod.
    pub pod_namespace: String,
    /// Name of the pod.
    pub pod_name: String,
    /// Network.
    pub network: String,
    /// Sandbox id.
    pub sandbox: String,
}

/// Drops of one endpoint, direction and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropView {
    /// Network; `None` where the packet met no endpoint.
    pub network: Option<NetworkName>,
    /// Pod.
    pub pod: PodRef,
    /// Interface name in the pod, empty where unknown.
    pub ifname: String,
    /// The direction of the program that dropped.
    pub direction: Direction,
    /// The reason.
    pub reason: Verdict,
    /// Packets and bytes.
    pub count: Count,
}

/// One dropped packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropEventView {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Network; `None` where the packet met no endpoint.
    pub network: Option<NetworkName>,
    /// Pod.
    pub pod: PodRef,
    /// Interface name in the pod, empty where unknown.
    pub ifname: String,
    /// The direction of the program that dropped.
    pub direction: Direction,
    /// The reason.
    pub reason: Verdict,
    /// Source address; `None` if it was not parsed.
    pub source: Option<IpAddr>,
    /// Destination address; `None` if it was not parsed.
    pub destination: Option<IpAddr>,
    /// Transport protocol number.
    pub protocol: u8,
    /// Source port, 0 for none.
    pub source_port: u16,
    /// Destination port, 0 for none.
    pub destination_port: u16,
    /// Bytes from the Ethernet header on.
    pub length: u32,
    /// EtherType.
    pub ethertype: u16,
}

/// A pinned map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapView {
    /// Name.
    pub name: String,
    /// The kernel's id.
    pub id: u32,
    /// Map type, as named by the kernel.
    pub kind: String,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Capacity.
    pub max_entries: u32,
    /// Rows in use; for arrays the rows that are set.
    pub entries: u32,
    /// Path of the pin.
    pub pin: PathBuf,
    /// Its purpose.
    pub purpose: String,
}

/// The state of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusView {
    /// Whether pods can be attached.
    pub ready: bool,
    /// Why pods cannot be attached, or what is degraded.
    pub reasons: Vec<String>,
    /// Why the state of an earlier agent was lost, and what became of its records; `None` if it was not.
    pub state_lost: Option<String>,
    /// "tcx" or "clsact".
    pub hook: String,
    /// Folder of the pins.
    pub pin_path: PathBuf,
    /// Sandboxes attached.
    pub sandboxes: u32,
    /// Interfaces attached.
    pub attachments: u32,
    /// Maximum number of endpoints.
    pub endpoints_capacity: u32,
    /// Prewarmed sandboxes.
    pub warm_sandboxes: u32,
    /// Interfaces whose removal is in progress.
    pub pending_removals: u32,
    /// Interfaces that wait for their TCX links.
    pub pending_links: u32,
    /// The uplink of the node.
    pub uplink: UplinkView,
}

/// The uplink of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UplinkView {
    /// Name of the interface; empty while there is none.
    pub ifname: String,
    /// Its index.
    pub ifindex: u32,
    /// Addresses that pods leave the node with by default; at most one per family.
    pub sources: Vec<IpAddr>,
    /// Dedicated egress addresses, which only pods use.
    pub dedicated: Vec<IpAddr>,
    /// Programs attached to it; none if no feature needs them.
    pub programs: Vec<ProgramView>,
    /// "native", "generic", or empty where no XDP program runs.
    pub xdp: String,
    /// Host ports that lead to pods, one for each address.
    pub host_ports: u32,
    /// What an operator should change, empty for nothing. The agent is ready nevertheless.
    pub warning: String,
}
