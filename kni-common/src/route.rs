//! Defines the route table: the action for packets of a network whose destination is not a local endpoint.

use crate::map_types::map_types;

map_types! {
    /// Data of a key of `ROUTES`, after the trie's own 32-bit prefix length, which includes the network's 32 bits.
    pub struct RouteData {
        /// Network id in network byte order (the trie compares from the first byte).
        pub network: [u8; 4],
        /// Address prefix, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
    }

    /// The whole key as the kernel sees it (`struct bpf_lpm_trie_key`).
    pub struct RouteKey {
        /// Significant bits of `data`.
        pub prefix_length: u32,
        /// Matched data.
        pub data: RouteData,
    }

    /// Value of `ROUTES`.
    pub struct RouteValue {
        /// One of `ACTION_*`.
        pub action: u16,
        /// Bits `ROUTE_*`.
        pub flags: u16,
        /// With [`ACTION_REMOTE`]: the node, key of `NODES`. Otherwise 0.
        pub node: u32,
    }
}

/// Bits of a full match: network and address.
pub const FULL_PREFIX: u32 = 32 + 128;

/// Pass the packet to the node's stack.
pub const ACTION_STACK: u16 = 1;

/// In the network's own subnets, but no endpoint has the address: drop.
pub const ACTION_UNREACHABLE: u16 = 2;

/// In a range of virtual addresses, but no service has the address: drop.
pub const ACTION_SERVICE_RANGE: u16 = 3;

/// Send the packet out of the node with the node's address as source.
pub const ACTION_MASQUERADE: u16 = 4;

/// Send the packet to the node that has the pod, and accept packets from there with such a source.
pub const ACTION_REMOTE: u16 = 5;

/// With [`ACTION_REMOTE`]: through the tunnel, with the network's number as that of the virtual network. Without:
/// through the network that the nodes share, with the pods' addresses as they are.
pub const ROUTE_OVERLAY: u16 = 1;

/// The address is a node's own: with [`ACTION_REMOTE`] that of the row's node, with [`ACTION_STACK`] that of this one.
/// Only networks with host access have such rows. Between two nodes' addresses nothing goes through the tunnel.
pub const ROUTE_NODE: u16 = 2;

/// With [`ACTION_UNREACHABLE`]: only nodes of the cluster have addresses of the range, and none is known to have this
/// one. No host may send with it.
pub const ROUTE_OWNED: u16 = 4;
