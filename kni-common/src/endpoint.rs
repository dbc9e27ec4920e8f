//! Defines the endpoint table: one row per attachment, found by the index of its host interface.

use crate::map_types::map_types;

map_types! {
    /// Value of `ENDPOINTS`, indexed by endpoint id (host ifindex minus [`crate::IFINDEX_BASE`]).
    pub struct EndpointRow {
        /// Network id, 0 when the row is free.
        pub network: u32,
        /// Increases whenever the row gets a new owner, another policy or another identity; flows with another
        /// generation are re-evaluated. Unique across rows, and kept while the row is free: neither a reused row nor an
        /// address that moves to another row revives old flows. Written after the data that it covers.
        pub generation: u32,
        /// The generation at which the row got its present owner. Flows with an older one belong to an earlier owner
        /// and are ignored.
        pub incarnation: u32,
        /// Bits `FLAG_*`.
        pub flags: u32,
        /// Active policy set, key of `POLICY`; 0 when no policy selects the endpoint.
        pub policy: u32,
        /// Identity of the endpoint's IPv4 address as a peer of others, 0 when no policy distinguishes it.
        pub identity4: u32,
        /// The same for its IPv6 address.
        pub identity6: u32,
        /// The endpoint's IPv4 address in network byte order, all 0 for none.
        pub ipv4: [u8; 4],
        /// The endpoint's IPv6 address in network byte order, all 0 for none.
        pub ipv6: [u8; 16],
        /// MAC address of the pod end.
        pub mac: [u8; 6],
        /// MAC address of the host end: the gateway's, seen from the pod.
        pub host_mac: [u8; 6],
        /// Index of the host interface: [`crate::IFINDEX_BASE`] plus the endpoint id, unless a CNI plugin created it.
        pub ifindex: u32,
    }
}

/// Traffic may flow. Without this flag everything is dropped, in both directions.
pub const FLAG_READY: u32 = 1;

/// The node's stack may exchange packets with the endpoint (default network).
pub const FLAG_HOST_ACCESS: u32 = 2;

/// Packets may leave the node with the endpoint's own address as source (egress mode `Route`).
pub const FLAG_ROUTED: u32 = 4;

/// Another copy of the programs runs after these at the host interface and is about to be detached. It must not see a
/// packet that these let through, which would be evaluated and translated twice.
pub const FLAG_HANDOVER: u32 = 16;

/// The host interface runs `xdp_pod`, and the pod's end accepts the frames that such a program of another endpoint
/// sends.
pub const FLAG_XDP: u32 = 8;

/// A CNI plugin created the interface, and its datapath forwards the packets: the programs enforce policy and let
/// packets continue; they neither answer for a gateway nor redirect. The row of `INTERFACES` maps the interface to the
/// endpoint.
pub const FLAG_PLUGIN: u32 = 32;

/// A queueing discipline at the host end limits the rate towards the pod: packets must pass it.
pub const FLAG_SHAPED: u32 = 64;

/// Mark of a packet that has passed policy and is on its way through the host end of an endpoint with [`FLAG_SHAPED`].
/// No pod can set it: a mark does not leave its network namespace.
pub const JUDGED_MARK: u32 = 0x4b4e_494a;
