//! The flow table: one row per direction of a tracked 5-tuple within a network.

use crate::layout::map_types;

map_types! {
    /// Key of `FLOWS4`.
    pub struct FlowKey4 {
        /// Network id.
        pub network: u32,
        /// Source address, network byte order.
        pub source: [u8; 4],
        /// Destination address, network byte order.
        pub destination: [u8; 4],
        /// Ports.
        pub ports: Ports,
        /// IP protocol number.
        pub protocol: u32,
    }

    /// Key of `FLOWS6`; the fields are those of [`FlowKey4`].
    pub struct FlowKey6 {
        /// Network id.
        pub network: u32,
        /// Source address, network byte order.
        pub source: [u8; 16],
        /// Destination address, network byte order.
        pub destination: [u8; 16],
        /// Ports.
        pub ports: Ports,
        /// Transport protocol number.
        pub protocol: u32,
    }

    /// Two ports as they stand in a packet. ICMP echo: the identifier in the place of the source port of a request, and of
    /// the destination port of a reply, 0 in the other place. 0 for protocols without ports.
    pub struct Ports {
        /// Source port, network byte order.
        pub source: [u8; 2],
        /// Destination port, network byte order.
        pub destination: [u8; 2],
    }

    /// Value of both flow tables.
    pub struct FlowValue {
        /// jiffies of the last packet.
        pub last_seen: u64,
        /// Generation of the endpoint that sends in this direction; 0 when that is not a local endpoint.
        pub source_generation: u32,
        /// Generation of the endpoint that receives in this direction; 0 when that is not a local endpoint.
        pub destination_generation: u32,
        /// Id of the receiving endpoint, 0 where that is not a local one.
        pub destination: u32,
        /// jiffies after `last_seen` at which the row is worth nothing any more.
        pub lifetime: u32,
        /// One of `KIND_*`.
        pub kind: u16,
        /// Bits `FLOW_*`.
        pub flags: u16,
        /// With [`FLOW_TO`] or [`FLOW_FROM`]: ports of the packet behind the translation, in its own direction.
        pub ports: Ports,
        /// With [`FLOW_TO`] the destination address, with [`FLOW_FROM`] the source address that the packet gets; with
        /// both the destination address, the source being the packet's own destination. With both and [`KIND_UPLINK`] (IPv4
        /// only: a service whose backend is outside the node) the source address in the first four bytes and the
        /// destination address in the next four.
        pub address: [u8; 16],
    }

    /// Key of `FRAGMENTS`: which datagram a fragment belongs to (RFC 791, RFC 8200).
    pub struct FragmentKey {
        /// Network id.
        pub network: u32,
        /// Identification field as it stands in the packet; IPv4's 16 bits in the first two bytes.
        pub identification: [u8; 4],
        /// Source address, IPv4 as `::ffff:a.b.c.d`.
        pub source: [u8; 16],
        /// Destination address, IPv4 as `::ffff:a.b.c.d`.
        pub destination: [u8; 16],
        /// Transport protocol number.
        pub protocol: u16,
        /// 1 for packets that come from the pod, 2 for packets on their way to it; the two never vouch for each other.
        pub direction: u16,
    }

    /// Value of `FRAGMENTS`.
    pub struct FragmentValue {
        /// The first fragment's ports.
        pub ports: Ports,
    }
}

/// From a pod straight to the local endpoint `destination`.
pub const KIND_LOCAL: u16 = 1;

/// From a pod into the node's stack, because the destination is not a local endpoint or because the other direction
/// came through the stack (whoever translated it there must see the answer).
pub const KIND_TO_STACK: u16 = 2;

/// From the node's stack to a pod.
pub const KIND_FROM_STACK: u16 = 3;

/// From a pod out of the node with the node's address as its source, or from outside to a pod.
pub const KIND_UPLINK: u16 = 4;

/// The row is of the direction that answers; its reverse is the one that was asked for.
pub const FLOW_ANSWER: u16 = 1;
/// An answer was seen.
pub const FLOW_CONFIRMED: u16 = 2;
/// TCP: this direction sent its FIN.
pub const FLOW_FIN: u16 = 4;
/// TCP: over by FIN from both sides. RST removes both rows instead.
pub const FLOW_CLOSED: u16 = 8;
/// The destination is translated.
pub const FLOW_TO: u16 = 16;
/// The source is translated.
pub const FLOW_FROM: u16 = 32;
/// The pod reaches itself through a service: no policy stands between a pod and itself.
pub const FLOW_HAIRPIN: u16 = 64;
/// Opened by the node itself, which may always reach its pods: no policy judges it.
pub const FLOW_NODE: u16 = 128;

impl Ports {
    /// Ports from the word that was read from a packet.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(word: u32) -> Self {
        // SAFETY: `Ports` is `repr(C)`, four bytes without padding, and every bit pattern is valid.
        unsafe { core::mem::transmute(word) }
    }

    /// The word that stands in a packet.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        // SAFETY: as in `from_word`.
        unsafe { core::mem::transmute(self) }
    }
}

/// The word of the opposite direction's ports.
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
        let ports = Ports {
            source: [0x12, 0x34],
            destination: [0x00, 0x50],
        };
        let back = Ports {
            source: [0x00, 0x50],
            destination: [0x12, 0x34],
        };
        assert_eq!(Ports::from_word(swapped(ports.word())), back);
    }
}
