//! Defines who uses which addresses outside of the cluster, and why one may not be used.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use super::{
    MacAddr, NetworkName,
    policy::{PolicyRef, Selector},
};

/// Who requests an egress address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EgressUser {
    /// A network, in `spec.egress.addresses`. It needs no pool: networks belong to the administrator.
    Network(NetworkName),
    /// An EgressPolicy, in `spec.egressAddresses`.
    Policy(PolicyRef),
}

impl EgressUser {
    /// Whether both may use one address: the same network, or policies of the same namespace.
    pub fn shares_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Network(one), Self::Network(other)) => one == other,
            (Self::Policy(one), Self::Policy(other)) => one.namespace == other.namespace,
            (Self::Network(_), Self::Policy(_)) | (Self::Policy(_), Self::Network(_)) => false,
        }
    }
}

impl fmt::Display for EgressUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(name) => write!(f, "PodNetwork {name}"),
            Self::Policy(policy) => write!(f, "{policy}"),
        }
    }
}

/// How packets of this node's pods leave with an address that they may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EgressWay {
    /// By this node, which has all ports of the address.
    Alone,
    /// By this node, which answers for the address, from a unit of its ports. Other nodes have other units.
    Shared,
    /// By the node that answers for the address, from this node's unit of its ports.
    Through,
}

impl EgressWay {
    /// Whether this node answers for the address.
    pub const fn is_here(self) -> bool {
        matches!(self, Self::Alone | Self::Shared)
    }

    /// Whether several nodes share the ports of the address.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Shared | Self::Through)
    }
}

/// A valid pool of egress addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPool {
    /// Its name.
    pub name: String,
    /// When it was created, in seconds; 0 where that is not known. Of two pools that overlap, the older one counts.
    pub created: i64,
    /// Its ranges.
    pub ranges: Vec<IpNet>,
    /// The namespaces whose policies may use it.
    pub namespaces: PoolNamespaces,
}

/// The namespaces whose policies may use a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolNamespaces {
    /// All.
    All,
    /// Those that the selector selects.
    Selected(Selector),
    /// None.
    None,
}

/// Why an address may not be used on this node, so that the pods that would leave with it do not leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressRefusal {
    /// No pool has the address.
    NotInPool,
    /// Its pool does not admit the namespace.
    PoolNotAllowed {
        /// The pool.
        pool: String,
        /// The namespace of the policy.
        namespace: String,
    },
    /// It is the address of something else; the text continues "is".
    Reserved(String),
    /// Another namespace or network uses it.
    InUse(String),
    /// No node owns it yet.
    Unassigned,
    /// The node that is to answer for it cannot.
    NotAnswered {
        /// The node.
        node: String,
        /// Why it cannot.
        message: String,
    },
    /// This node has no ports of it.
    NoPorts {
        /// The nodes that have ports of it.
        nodes: usize,
        /// Whether they have all of them.
        exhausted: bool,
    },
    /// It has not been looked for on the link yet.
    Unverified,
    /// This node does not know yet which nodes share it.
    Unforwarded,
    /// A host on the link has it.
    Conflict {
        /// The MAC address of the host.
        mac: MacAddr,
    },
    /// It cannot be added to the uplink.
    NotAdded(String),
}

impl EgressRefusal {
    /// The reason of a condition.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NotInPool => "AddressNotInPool",
            Self::PoolNotAllowed { .. } => "PoolNotAllowed",
            Self::Reserved(_) => "AddressReserved",
            Self::InUse(_) => "AddressInUse",
            Self::Unassigned => "AddressNotAssigned",
            Self::NotAnswered { .. } => "AddressNotReady",
            Self::NoPorts { exhausted: false, .. } => "PortsNotAssigned",
            Self::NoPorts { exhausted: true, .. } => "PortsExhausted",
            Self::Unverified => "AddressNotVerified",
            Self::Unforwarded => "AddressNotForwarded",
            Self::Conflict { .. } => "AddressConflict",
            Self::NotAdded(_) => "AddressNotAdded",
        }
    }

    /// Whether the objects themselves exclude it, on every node and until one of them changes.
    pub const fn is_of_objects(&self) -> bool {
        matches!(
            self,
            Self::NotInPool | Self::PoolNotAllowed { .. } | Self::Reserved(_) | Self::InUse(_)
        )
    }

    /// The message for operators about an address.
    pub fn message(&self, address: IpAddr) -> String {
        match self {
            Self::NotInPool => {
                format!(
                    "{address} is in no EgressAddressPool: add it to a pool that admits the namespace, or remove it"
                )
            }
            Self::PoolNotAllowed { pool, namespace } => {
                format!("{address} is in EgressAddressPool {pool}, which does not admit namespace {namespace}")
            }
            Self::Reserved(what) => format!("{address} is {what}"),
            Self::InUse(user) => format!("{address} is in use by {user}"),
            Self::Unassigned => format!("no node owns {address} yet"),
            Self::NotAnswered { node, message } => format!("node {node} cannot use {address}: {message}"),
            Self::NoPorts { exhausted: false, .. } => format!("this node has no ports of {address} yet"),
            Self::NoPorts { nodes, .. } => {
                format!("all ports of {address} belong to {nodes} other nodes")
            }
            Self::Unverified => format!("the link has not been searched for another host with {address} yet"),
            Self::Unforwarded => format!("this node does not know yet which nodes share {address}"),
            Self::Conflict { mac } => format!("{address} is in use on the link, by the host with MAC address {mac}"),
            Self::NotAdded(error) => format!("{address} cannot be added to the uplink: {error}"),
        }
    }
}

/// An address that an interface would leave with, and why it may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedAddress {
    /// The address.
    pub address: IpAddr,
    /// Who requests it.
    pub user: EgressUser,
    /// Why it may not be used.
    pub refusal: EgressRefusal,
}

impl fmt::Display for RefusedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.user, self.refusal.message(self.address))
    }
}
