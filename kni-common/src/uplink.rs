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

    /// Key of `HOST_PORTS`.
    pub struct HostPortKey {
        /// Address of the node, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// Port of the node, network byte order.
        pub port: [u8; 2],
        /// Transport protocol number.
        pub protocol: u16,
    }

    /// Value of `HOST_PORTS`.
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
}

/// [`Masquerade::first`] of an endpoint that no packet of leaves the node because the address that it must leave with
/// may not be used here; `last` is 0.
pub const EGRESS_REFUSED: u16 = 1;

/// Network id of destinations outside the node: flows across the uplink have their outer row there.
pub const OUTSIDE: u32 = 0;
