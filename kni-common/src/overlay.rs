//! Defines the settings of the tunnel between nodes: the node's own ends, the port, the network of the nodes' stacks.

use crate::map_types::map_types;

map_types! {
    /// Value of `OVERLAY`, one row. No address: there is no tunnel.
    pub struct Overlay {
        /// The node's IPv4 address in the underlay, network byte order, all 0 for none: the outer source of packets to
        /// nodes that are reached by IPv4, by which these know the sender.
        pub ipv4: [u8; 4],
        /// The same for IPv6.
        pub ipv6: [u8; 16],
        /// UDP port of all nodes' tunnels, network byte order, also where this node has none; 0 on a node of no
        /// cluster.
        pub port: [u8; 2],
        /// 1 where `EGRESS_SHARES` has rows by which this node forwards replies to other nodes, otherwise 0.
        pub forwards_egress: u16,
        /// Id of the network whose pods exchange packets with the stacks of all nodes, 0 for none.
        pub host_network: u32,
    }
}
