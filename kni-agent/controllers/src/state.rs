//! Defines what the controllers of a node's objects read of the node, and ask it to do.
//!
//! Plain functions, as the node is not always this machine: the agent answers from its services
//! ([`super::Reflectors::controllers`]), a simulation of many nodes from memory. The controllers are the same code in
//! both.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use futures::future::BoxFuture;
use kni_fabric::Desired;
use kni_model::{
    EndpointId, IfName, NetworkName, PodRef, Sandbox, SandboxId,
    egress::RefusedAddress,
    policy::PolicyPod,
    view::{DesiredNetworks, InterfaceView, NetworkView, StatusView},
};
use kni_pods::LostRight;
use kni_uplink::UnderlayAddress;
use tokio::sync::watch;

/// Reads a part of the node.
pub type Read<T> = Arc<dyn Fn() -> T + Send + Sync>;

/// Asks the node to apply something.
pub type Act<T, R> = Arc<dyn Fn(T) -> BoxFuture<'static, R> + Send + Sync>;

/// Notes something about the node.
pub type Note<T> = Arc<dyn Fn(T) -> Result<(), String> + Send + Sync>;

/// Applies networks.
pub type Apply = Act<DesiredNetworks, Result<(), String>>;

/// The interfaces of the node's pods as they are reported.
#[derive(Debug, Default)]
pub struct Interfaces {
    /// The interfaces, as read from the kernel.
    pub views: Vec<InterfaceView>,
    /// Those that may not leave the node with an address that they would have to use.
    pub refused: BTreeMap<EndpointId, Vec<RefusedAddress>>,
    /// Those that lost the right to their network.
    pub lost: BTreeMap<(SandboxId, IfName), LostRight>,
    /// Those whose policies are enforced without rules, each with the reason.
    pub closed: BTreeMap<EndpointId, String>,
}

/// How far policies are enforced.
#[derive(Debug, Default)]
pub struct Enforcement {
    /// Why policies are not enforced; `None` if they are.
    pub problem: Option<String>,
    /// Namespaces whose policies exceed their quota, each with the reason.
    pub closed: BTreeMap<String, String>,
}

/// A pod of another node.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// Name of its node.
    pub node: String,
    /// The pod, with one interface.
    pub pod: PolicyPod,
}

/// What must be done so that the policy engine knows the pods of other nodes.
#[derive(Debug, Default, PartialEq)]
pub struct PeerChanges {
    /// New and changed pods.
    pub put: Vec<Peer>,
    /// Pods that are not known any more.
    pub gone: BTreeSet<SandboxId>,
}

impl PeerChanges {
    pub(super) fn is_empty(&self) -> bool {
        self.put.is_empty() && self.gone.is_empty()
    }
}

/// The node. Clones share it.
#[derive(Clone)]
pub struct NodeState {
    /// Notifies of every change of attachments and networks.
    pub changes: watch::Receiver<u64>,
    /// Every complete sandbox. Does not block.
    pub sandboxes: Read<Vec<Arc<Sandbox>>>,
    /// The networks, the default one first. Does not block.
    pub networks: Read<Vec<NetworkView>>,
    /// Every leased address, by network. Does not block.
    pub leases: Read<BTreeMap<NetworkName, Vec<IpAddr>>>,
    /// Every address that rests after its last pod, by network. Does not block.
    pub resting: Read<BTreeMap<NetworkName, Vec<IpAddr>>>,
    /// Notes which of the resting addresses no other node takes for their last owners any more; the others may be taken
    /// so.
    pub note_withdrawals: Note<BTreeSet<(NetworkName, IpAddr)>>,
    /// The pods and networks of the interfaces that pods have or are getting. Does not block.
    pub memberships: Read<Vec<(PodRef, NetworkName)>>,
    /// How far policies are enforced. Does not block.
    pub enforcement: Read<Enforcement>,
    /// The interfaces of the pods. May block for some milliseconds.
    pub interfaces: Read<Interfaces>,
    /// The state of the agent, and the networks with what their plugins report. May block for some milliseconds.
    pub status: Read<(StatusView, Vec<NetworkView>)>,
    /// Notifies of every change of the node's links and addresses.
    pub link_changes: watch::Receiver<()>,
    /// The addresses of the node's interfaces.
    pub addresses: Act<(), Result<Vec<UnderlayAddress>, String>>,
    /// Applies networks.
    pub apply_networks: Apply,
    /// Is called after networks were applied.
    pub networks_applied: Act<(), ()>,
    /// Updates the labels of the node's pods; returns whether that succeeded.
    pub relabel: Act<(), bool>,
    /// Applies changes of the pods of other nodes; returns whether that succeeded.
    pub apply_peers: Act<PeerChanges, bool>,
    /// Applies what this node knows of others; returns whether that succeeded.
    pub apply_fabric: Act<Arc<Desired>, bool>,
}
