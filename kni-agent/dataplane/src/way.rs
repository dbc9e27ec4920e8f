//! Names a way to another node.

use std::net::IpAddr;

/// A way to another node: its address in the underlay, as the other end of the tunnel or as the next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Way {
    /// The node's address.
    pub underlay: IpAddr,
    /// Through the tunnel.
    pub overlay: bool,
}
