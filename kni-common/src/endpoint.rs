//! The endpoint table: one row per attachment, found by the index of its host interface.

use crate::layout::map_types;

map_types! {
    /// Value of `ENDPOINTS`, indexed by endpoint id (host ifindex minus [`crate::IFINDEX_BASE`]).
    pub struct EndpointRow {
        /// Network id; 0 when the row is free.
        pub network: u32,
        /// Grows each time the row gets a new owner or its policy changes; flows that carry another one are stale.
        /// No two rows ever have the same one, and it survives while the row is free: neither a reused row nor an
        /// address that moves to another row revives old flows.
        pub generation: u32,
        /// Bits `FLAG_*`.
        pub flags: u32,
        /// The endpoint's IPv4 address in network byte order, all 0 for none.
        pub ipv4: [u8; 4],
        /// The endpoint's IPv6 address in network byte order, all 0 for none.
        pub ipv6: [u8; 16],
        /// MAC address of the pod end.
        pub mac: [u8; 6],
        /// MAC address of the host end: the gateway's, seen from the pod.
        pub host_mac: [u8; 6],
        /// Index of the host interface.
        pub ifindex: u32,
    }
}

/// Traffic may flow. Without it everything is dropped, in both directions.
pub const FLAG_READY: u32 = 1;

/// The node's stack may exchange packets with the endpoint (default network).
pub const FLAG_HOST_ACCESS: u32 = 2;
