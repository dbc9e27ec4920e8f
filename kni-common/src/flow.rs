//! Defines the flow tables: one row per direction of a tracked 5-tuple within a network.

use crate::map_types::map_types;

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

    /// Two ports as they are in a packet. ICMP echo: the identifier takes the place of a request's source port and of a
    /// reply's destination port; the other one is 0. Both are 0 for protocols without ports.
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
        /// Generation of the endpoint that sends in this direction, 0 when it is not a local endpoint.
        pub source_generation: u32,
        /// Generation of the endpoint that receives in this direction, 0 when it is not a local endpoint.
        pub destination_generation: u32,
        /// Id of the receiving endpoint, 0 when it is not a local one.
        pub destination: u32,
        /// jiffies after `last_seen` at which the row expires.
        pub lifetime: u32,
        /// One of `KIND_*`.
        pub kind: u16,
        /// Bits `FLOW_*`.
        pub flags: u16,
        /// With [`FLOW_TO`] or [`FLOW_FROM`]: the packet's ports after translation, in its own direction.
        pub ports: Ports,
        /// With [`FLOW_TO`] the destination address, with [`FLOW_FROM`] the source address that the packet gets; with
        /// both the destination address, the new source being the packet's own destination. With both and
        /// [`KIND_UPLINK`] (IPv4 only: a service whose backend is outside the node) the source address in the first
        /// four bytes and the destination address in the next four.
        pub address: [u8; 16],
    }

    /// Key of `FRAGMENTS`: the datagram that a fragment belongs to (RFC 791, RFC 8200).
    pub struct FragmentKey {
        /// Network id.
        pub network: u32,
        /// Identification field as it is in the packet; IPv4's 16 bits in the first two bytes.
        pub identification: [u8; 4],
        /// Source address, IPv4 as `::ffff:a.b.c.d`.
        pub source: [u8; 16],
        /// Destination address, IPv4 as `::ffff:a.b.c.d`.
        pub destination: [u8; 16],
        /// Transport protocol number.
        pub protocol: u16,
        /// 1 for packets from the pod, 2 for packets to it; neither direction vouches for the other.
        pub direction: u16,
    }

    /// Value of `FRAGMENTS`.
    pub struct FragmentValue {
        /// The first fragment's ports.
        pub ports: Ports,
    }
}

/// From a pod directly to the local endpoint `destination`.
pub const KIND_LOCAL: u16 = 1;

/// From a pod into the node's stack, because the destination is not a local endpoint or because the other direction
/// came through the stack (a translation there must see the replies).
pub const KIND_TO_STACK: u16 = 2;

/// From the node's stack to a pod.
pub const KIND_FROM_STACK: u16 = 3;

/// From a pod out of the node with the node's address as source, or from outside to a pod.
pub const KIND_UPLINK: u16 = 4;

/// The row is of the reply direction; its reverse is the original one.
pub const FLOW_REPLY: u16 = 1;
/// A reply was seen.
pub const FLOW_CONFIRMED: u16 = 2;
/// TCP: this direction sent its FIN.
pub const FLOW_FIN: u16 = 4;
/// TCP: closed by FIN from both sides. RST removes both rows instead.
pub const FLOW_CLOSED: u16 = 8;
/// The destination is translated.
pub const FLOW_TO: u16 = 16;
/// The source is translated.
pub const FLOW_FROM: u16 = 32;
/// The pod reaches itself through a service: no policy applies between a pod and itself.
pub const FLOW_HAIRPIN: u16 = 64;
/// Opened by the node itself, which may always reach its pods: no policy applies.
pub const FLOW_NODE: u16 = 128;

impl Ports {
    /// Ports from the word that was read from a packet.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(word: u32) -> Self {
        let [a, b, c, d] = word.to_ne_bytes();
        Self {
            source: [a, b],
            destination: [c, d],
        }
    }

    /// The word as it lies in a packet.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        let ([a, b], [c, d]) = (self.source, self.destination);
        u32::from_ne_bytes([a, b, c, d])
    }
}

/// The ports of the opposite direction, as a word.
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
