//! Defines the tables for traffic across the uplink: masquerade addresses, node ports of pods, denied sources.

use crate::map_types::map_types;

map_types! {
    /// Value of `MASQUERADE`, indexed by endpoint id: source address and port range of its packets outside the node.
    pub struct Masquerade {
        /// IPv4 address, network byte order, 0 for none.
        pub ipv4: [u8; 4],
        /// First port, host byte order.
        pub first: u16,
        /// Last port, 0 where no packet of the endpoint leaves the node.
        pub last: u16,
        /// IPv6 address, network byte order, 0 for none.
        pub ipv6: [u8; 16],
    }

    /// Key of `HOST_PORTS`, of packets from outside, and of `NODE_PORTS`, of the node's own sockets.
    pub struct HostPortKey {
        /// Address of the node, network byte order, IPv4 as `::ffff:a.b.c.d`. In `NODE_PORTS` also a loopback address;
        /// the unspecified address of a family stands for all its loopback addresses.
        pub address: [u8; 16],
        /// Port of the node, network byte order.
        pub port: [u8; 2],
        /// Transport protocol number.
        pub protocol: u16,
    }

    /// Value of `HOST_PORTS` and `NODE_PORTS`.
    pub struct HostPortValue {
        /// Endpoint that receives the packets.
        pub endpoint: u32,
        /// Its incarnation when the row was written.
        pub incarnation: u32,
        /// Port of the pod, network byte order.
        pub port: [u8; 2],
        /// Zero.
        pub zero: u16,
    }

    /// Key of `NODE_PEERS`: a socket of the node, and a pod that it sends datagrams to through a port of the node.
    pub struct NodePeerKey {
        /// Address of the pod, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// The kernel's cookie of the socket, no other socket's until the next boot: the low half, then the high half.
        pub socket: [u32; 2],
        /// Port of the pod, network byte order.
        pub port: [u8; 2],
        /// Zero.
        pub zero: u16,
    }

    /// Value of `NODE_PEERS`: where the socket sent the datagrams.
    pub struct NodePeerValue {
        /// Address of the node, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// The pod's endpoint.
        pub endpoint: u32,
        /// Its incarnation at that time: another pod's datagrams keep their source.
        pub incarnation: u32,
        /// Port of the node, network byte order.
        pub port: [u8; 2],
        /// Zero.
        pub zero: u16,
    }

    /// Data of a key of `SOURCES`, after the trie's own 32-bit prefix length.
    pub struct SourceData {
        /// Address prefix, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
    }

    /// The whole key of `SOURCES` as the kernel sees it.
    pub struct SourceKey {
        /// Significant bits of `data`.
        pub prefix_length: u32,
        /// Matched data.
        pub data: SourceData,
    }

    /// Value of `SOURCES`: the verdict on packets from outside with such a source.
    pub struct SourceValue {
        /// [`crate::Verdict::BogonSource`] or [`crate::Verdict::DenyListed`]; any other number accepts them.
        pub verdict: u32,
    }

    /// Data of a key of `EGRESS_SHARES`, after the trie's own 32-bit prefix length.
    pub struct EgressShareData {
        /// An egress address, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// A unit of its ports ([`unit_of`]) in network byte order, or 0: what leaves from this node.
        pub unit: [u8; 4],
    }

    /// The whole key of `EGRESS_SHARES` as the kernel sees it.
    pub struct EgressShareKey {
        /// Significant bits of `data`: [`SHARE_PREFIX`] or [`SHARE_ADDRESS`].
        pub prefix_length: u32,
        /// Matched data.
        pub data: EgressShareData,
    }

    /// Value of `EGRESS_SHARES`: the part that one node has in an egress address which pods of several nodes leave
    /// with.
    pub struct EgressShareValue {
        /// One of `SHARE_*`.
        pub role: u32,
        /// A node, key of `NODES`, which is reached through the tunnel. 0: this node; with [`SHARE_OTHER`] one without
        /// a known way, whose packets are dropped.
        pub node: u32,
        /// With [`SHARE_LEAVE`] the first port of this node's pods, host byte order. Otherwise 0.
        pub first: u16,
        /// With [`SHARE_LEAVE`] their last port. Otherwise 0.
        pub last: u16,
    }
}

/// Bits of a full match in `EGRESS_SHARES`: address and unit.
pub const SHARE_PREFIX: u32 = 128 + 32;

/// Bits of a match of the address alone: the row of all units that have none of their own.
pub const SHARE_ADDRESS: u32 = 128;

/// The row of unit 0: packets of this node's pods leave with the address from the row's ports, by the row's node.
pub const SHARE_LEAVE: u32 = 1;

/// The unit is this node's, and the row's node is responsible for the address: it sends the replies here.
pub const SHARE_OWN: u32 = 2;

/// This node is responsible for the address, and the unit is that of the row's node, for whose pods it forwards.
pub const SHARE_OTHER: u32 = 3;

/// Ports of a unit, and identifiers of ICMP echoes.
pub const UNIT_PORTS: u16 = 1024;

/// The units of an address: ports from 1024 on, by [`unit_of`].
pub const UNITS: core::ops::RangeInclusive<u8> = 1..=63;

/// The unit of a port, in host byte order; 0 for ports that no pod leaves with.
#[inline(always)]
#[must_use]
pub const fn unit_of(port: u16) -> u8 {
    (port / UNIT_PORTS) as u8
}

/// The first and the last port of a unit.
#[must_use]
pub const fn ports_of(unit: u8) -> (u16, u16) {
    let first = unit as u16 * UNIT_PORTS;
    (first, first + (UNIT_PORTS - 1))
}

/// Bits of a row of `SHARED_EGRESS`: the endpoint's IPv4 address outside of the node is one that several nodes share,
/// and has a row of [`SHARE_LEAVE`]. Without that row nothing leaves.
pub const SHARED_V4: u32 = 1;

/// The same for its IPv6 address.
pub const SHARED_V6: u32 = 2;

/// The number of the virtual network in which nodes send each other packets with egress addresses. No network of the
/// cluster has it.
pub const EGRESS_NUMBER: u32 = 0;

/// [`Masquerade::first`] of an endpoint that no packet of leaves the node because the address that it must leave with
/// may not be used here; `last` is 0.
pub const EGRESS_REFUSED: u16 = 1;

/// Network id of destinations outside the node: flows across the uplink have their outer row there.
pub const OUTSIDE: u32 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_that_pods_leave_with_is_in_one_unit() {
        assert_eq!(unit_of(1023), 0);
        assert_eq!(ports_of(1), (1024, 2047));
        assert_eq!(ports_of(63), (64_512, u16::MAX));
        for unit in UNITS {
            let (first, last) = ports_of(unit);
            assert_eq!((unit_of(first), unit_of(last)), (unit, unit));
        }
    }
}
