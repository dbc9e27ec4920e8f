//! Defines the values of the metrics pages of the agent and of kni-controller, and the trait that provides the agent's.
//! Values are read on request.
//! Layer: model.

mod control_plane;
mod controller;
mod page;
mod text;
mod totals;

pub use control_plane::{ControlPlane, RequestUse, TaskUse, WatchUse};
pub use controller::{ControllerState, ControllerUse, FreeBlocks};
use kni_common::{Direction, Verdict};
use kni_model::durations::Durations;
pub use page::Page;

/// Provides the state of the node.
pub trait Source: Send + Sync + 'static {
    /// The current state. May block for some milliseconds; called at most five times a second, never concurrently.
    fn snapshot(&self) -> Snapshot;
}

/// A part of the page, or why it could not be read. The page omits the metrics of a part that could not be read.
pub type Part<T> = Result<T, String>;

/// All values of the page.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Counted packets and bytes, drops included; rows that are zero may be left out.
    pub traffic: Part<Vec<Traffic>>,
    /// Rows of the flow tables by family: IPv4, IPv6.
    pub flows: Part<(u64, u64)>,
    /// Flow and drop events that were never sent to the agent, summed over the existing endpoints.
    pub lost_events: Part<u64>,
    /// Policy.
    pub policy: Part<PolicyState>,
    /// Every map of the layout, those of an earlier agent included.
    pub maps: Part<Vec<MapUse>>,
    /// Ports in use for masquerading; empty where no pod is masqueraded.
    pub masquerade: Part<Vec<PortUse>>,
    /// The programs.
    pub programs: Part<Vec<ProgramUse>>,
    /// Endpoints of every configured network, including networks without endpoints.
    pub endpoints: Part<Vec<(String, u64)>>,
    /// How long attaching pods took, by step; empty where it is not measured.
    pub attach: Part<Vec<(&'static str, Durations)>>,
    /// The agent's own state, and what was repaired.
    pub state: StateUse,
    /// The control plane.
    pub control_plane: ControlPlane,
}

/// The agent's own state, and what was repaired.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StateUse {
    /// Current problems by kind; 0 where there is none.
    pub problems: Vec<(&'static str, u64)>,
    /// Repairs since the start, by the kind of object.
    pub repairs: Vec<(&'static str, u64)>,
    /// Ports for masquerading that the kernel gives to sockets of the node, too.
    pub shared_ports: u64,
    /// Pods that were attached before the node knew what other nodes have in their networks.
    pub early_attaches: u64,
    /// Entries of `extradata` with a key that the agent does not know, since the start, by the method of `kni.KNI`.
    pub unknown_extradata: Vec<(&'static str, u64)>,
}

/// A counter of one attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Distinguishes this attachment from every earlier and later one; never a label. The counters of a row restart
    /// from zero with its next owner, the page's continue.
    pub owner: String,
    /// Network, empty where the packet reached no endpoint. Must be one of the configured networks: it is a label.
    pub network: String,
    /// The program that counted.
    pub direction: Direction,
    /// The program's decision.
    pub verdict: Verdict,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The state of policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyState {
    /// Installed rows by table (`policy`, `ports`, `identities`).
    pub rows: Vec<(&'static str, u64)>,
    /// How long it took to apply changes.
    pub sync: Durations,
    /// Failed attempts, which are retried.
    pub failures: u64,
}

/// A map's use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapUse {
    /// Name.
    pub name: String,
    /// Rows in use.
    pub entries: u64,
    /// Capacity.
    pub max_entries: u64,
}

/// Ports of the node's addresses in use for masquerading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortUse {
    /// `ipv4` or `ipv6`.
    pub family: &'static str,
    /// `tcp`, `udp`, `icmp` and so on.
    pub protocol: &'static str,
    /// In use.
    pub used: u64,
}

/// A program's run time, as the kernel counts it while that is enabled (`BPF_ENABLE_STATS`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramUse {
    /// Name in the ELF.
    pub name: String,
    /// Runs.
    pub runs: u64,
    /// Nanoseconds in all runs.
    pub run_ns: u64,
}
