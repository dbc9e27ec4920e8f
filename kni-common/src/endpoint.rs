//! Defines the endpoint tables: one row of each per attachment, found by the index of its host interface.

use crate::map_types::map_types;

map_types! {
    /// The first twelve bytes of an Ethernet frame.
    pub struct MacPair {
        /// Destination MAC address.
        pub destination: [u8; 6],
        /// Source MAC address.
        pub source: [u8; 6],
    }

    /// Value of `ENDPOINTS`, indexed by endpoint id (host ifindex minus [`crate::IFINDEX_BASE`]): what every packet
    /// needs, in one cache line.
    pub struct EndpointRow {
        /// The MAC addresses of a frame that the pod sends: the host end's, then the pod end's. First, so that it is
        /// aligned to eight bytes.
        pub from_pod: MacPair,
        /// Those of a frame that the pod receives: the pod end's, then the host end's.
        pub to_pod: MacPair,
        /// Network id, 0 when the row is free.
        pub network: u32,
        /// Changes whenever the row gets a new owner, another policy or another identity; flows with another generation
        /// are re-evaluated. Unique across rows, and kept while the row is free: neither a reused row nor an address
        /// that moves to another row revives old flows. Written after the data that it covers.
        pub generation: u32,
        /// The generation at which the row got its present owner. Flows with an older one ([`is_older`]) belong to an
        /// earlier owner and are ignored.
        pub incarnation: u32,
        /// Generation of what the node knows about peers of the network that are no endpoint of this node. Changes
        /// after their identities; flows to and from them carry it.
        pub epoch: u32,
        /// Bits `FLAG_*`.
        pub flags: u32,
        /// The endpoint's IPv4 address in network byte order, all 0 for none.
        pub ipv4: [u8; 4],
        /// The endpoint's IPv6 address in network byte order, all 0 for none.
        pub ipv6: [u8; 16],
    }

    /// Value of `ENDPOINT_POLICIES`, indexed like `ENDPOINTS`: what only packets without a current flow need. Written
    /// before the generation in `ENDPOINTS` that covers it.
    pub struct EndpointPolicy {
        /// Active policy set, key of `POLICY`; 0 when no policy selects the endpoint.
        pub policy: u32,
        /// Identity of the endpoint's IPv4 address as a peer of others, 0 when no policy distinguishes it.
        pub identity4: u32,
        /// The same for its IPv6 address.
        pub identity6: u32,
        /// Index of the host interface: [`crate::IFINDEX_BASE`] plus the endpoint id, unless a CNI plugin created it.
        pub ifindex: u32,
    }
}

/// Whether a generation is older than another one. Generations wrap after 2^32 steps: as with serial numbers (RFC
/// 1982), the result is right while the two are less than 2^31 steps apart. The agent moves incarnations forward before
/// they are that old.
#[inline(always)]
#[must_use]
pub const fn is_older(generation: u32, than: u32) -> bool {
    generation.wrapping_sub(than) & (1 << 31) != 0
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
/// packets continue; they neither reply for a gateway nor redirect. The row of `INTERFACES` maps the interface to the
/// endpoint.
pub const FLAG_PLUGIN: u32 = 32;

/// A queueing discipline at the host end limits the rate towards the pod: packets must pass it.
pub const FLAG_SHAPED: u32 = 64;

/// The agent has stopped the endpoint's traffic for a time: the row is not ready, also for the next agent. The programs
/// look at [`FLAG_READY`] only.
pub const FLAG_SUSPENDED: u32 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_compared_across_the_wrap() {
        assert!(is_older(1, 2));
        assert!(!is_older(2, 2));
        assert!(!is_older(3, 2));
        assert!(is_older(u32::MAX, 1));
        assert!(!is_older(1, u32::MAX));
    }
}
