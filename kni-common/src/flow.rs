//! The flow table: one row per direction of a tracked 5-tuple within a network.

use crate::layout::map_types;

map_types! {
    /// Key of `FLOWS4`.
    pub struct FlowKey4 {
        /// Network id in the upper 24 bits, IP protocol number in the low 8.
        pub network_protocol: u32,
        /// Source address, network byte order.
        pub source: u32,
        /// Destination address, network byte order.
        pub destination: u32,
        /// Source and destination port as they stand in the packet (4 bytes, network byte order each). ICMP echo: the
        /// identifier twice. 0 for protocols without ports.
        pub ports: u32,
    }

    /// Key of `FLOWS6`; the fields are those of [`FlowKey4`].
    pub struct FlowKey6 {
        /// Network id in the upper 24 bits, transport protocol number in the low 8.
        pub network_protocol: u32,
        /// Source and destination port, as in [`FlowKey4`].
        pub ports: u32,
        /// Source address, network byte order.
        pub source: [u32; 4],
        /// Destination address, network byte order.
        pub destination: [u32; 4],
    }

    /// Value of both flow tables.
    pub struct FlowValue {
        /// jiffies of the last packet.
        pub last_seen: u64,
        /// Generation of the endpoint that sends in this direction; 0 when that is not a local endpoint.
        pub source_generation: u32,
        /// Generation of the endpoint that receives in this direction; 0 when that is not a local endpoint.
        pub destination_generation: u32,
        /// Id of the receiving endpoint for `KIND_LOCAL`, else 0.
        pub destination: u32,
        /// One of `KIND_*`.
        pub kind: u32,
    }

    /// Key of `FRAGMENTS`: which datagram a fragment belongs to (RFC 791, RFC 8200).
    pub struct FragmentKey {
        /// Network id in the upper 24 bits, transport protocol number in the low 8.
        pub network_protocol: u32,
        /// Identification field as it stands in the packet; IPv4's 16 bits in the first two bytes.
        pub identification: u32,
        /// Source address, IPv4 as `::ffff:a.b.c.d`.
        pub source: [u32; 4],
        /// Destination address, IPv4 as `::ffff:a.b.c.d`.
        pub destination: [u32; 4],
        /// 1 for packets that come from the pod, 2 for packets on their way to it; the two never vouch for each other.
        pub direction: u32,
    }

    /// Value of `FRAGMENTS`.
    pub struct FragmentValue {
        /// The first fragment's ports, as in [`FlowKey4`].
        pub ports: u32,
    }
}

/// From a pod straight to the local endpoint `destination`.
pub const KIND_LOCAL: u32 = 1;

/// From a pod into the node's stack, because the destination is not a local endpoint or because the other direction
/// came through the stack (whoever translated it there must see the answer).
pub const KIND_TO_STACK: u32 = 2;

/// From the node's stack to a pod.
pub const KIND_FROM_STACK: u32 = 3;

/// Network and protocol in one word.
#[inline(always)]
#[must_use]
pub const fn network_protocol(network: u32, protocol: u8) -> u32 {
    network << 8 | protocol as u32
}

/// The ports of the opposite direction.
#[inline(always)]
#[must_use]
pub const fn swapped(ports: u32) -> u32 {
    ports.rotate_left(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_swap() {
        let ports = u32::from_ne_bytes([0x12, 0x34, 0x00, 0x50]);
        assert_eq!(swapped(ports).to_ne_bytes(), [0x00, 0x50, 0x12, 0x34]);
    }
}
