//! Defines the flow tables: the rows of tracked 5-tuples within a network.
//!
//! A flow has two *ends*. The key sorts them by address ([`is_second`]), so that packets of both directions find the
//! same row. An untranslated flow has one row. A translated flow has one for each direction, keyed by that direction's
//! packets before translation ([`FLOW_TRANSLATED`]).

use crate::map_types::map_types;

map_types! {
    /// Key of `FLOWS4`. The first end is the one with the smaller address ([`is_second`]).
    pub struct FlowKey4 {
        /// Network id in the upper 24 bits, IP protocol number in the lower 8 ([`scope`]).
        pub scope: u32,
        /// Address of the first end, network byte order.
        pub first: [u8; 4],
        /// Address of the second end, network byte order.
        pub second: [u8; 4],
        /// Ports of the ends.
        pub ports: EndPorts,
    }

    /// Key of `FLOWS6`; the fields are those of [`FlowKey4`].
    pub struct FlowKey6 {
        /// Network id and protocol number.
        pub scope: u32,
        /// Address of the first end, network byte order.
        pub first: [u8; 16],
        /// Address of the second end, network byte order.
        pub second: [u8; 16],
        /// Ports of the ends.
        pub ports: EndPorts,
    }

    /// The ports of a flow's ends.
    pub struct EndPorts {
        /// Port of the first end, network byte order.
        pub first: [u8; 2],
        /// Port of the second end, network byte order.
        pub second: [u8; 2],
    }

    /// Two ports as they are in a packet. ICMP echo: the identifier takes the place of a request's source port and of a
    /// reply's destination port; the other one is 0. Both are 0 for protocols without ports.
    pub struct Ports {
        /// Source port, network byte order.
        pub source: [u8; 2],
        /// Destination port, network byte order.
        pub destination: [u8; 2],
    }

    /// What a flow's row knows about one end.
    pub struct FlowEnd {
        /// With [`END_LOCAL`] the endpoint id, with [`END_OUTSIDE`] the index of the uplink, with [`END_REMOTE`] and
        /// [`END_ROUTED`] the node (key of `NODES`), with [`END_STACK`] that of a pod of another node the index of the
        /// interface by which alone its packets come, otherwise 0.
        pub id: u32,
        /// With [`END_LOCAL`] the endpoint's generation at the last evaluation, with [`END_REMOTE`] and [`END_ROUTED`]
        /// the sum of the other end's epoch and the node's generation ([`remote_generation`]), otherwise the epoch of
        /// the other end.
        pub generation: u32,
    }

    /// Value of both flow tables: one cache line.
    pub struct FlowValue {
        /// jiffies of the last packet, low 32 bits.
        pub last_seen: u32,
        /// jiffies after `last_seen` at which the row expires.
        pub lifetime: u32,
        /// Kind of the first end, one of `END_*`.
        pub first_kind: u8,
        /// Kind of the second end.
        pub second_kind: u8,
        /// Bits `FLOW_*`.
        pub flags: u16,
        /// With [`FLOW_TRANSLATED`]: the packet's ports after translation, in its own direction.
        pub ports: Ports,
        /// The first end.
        pub first: FlowEnd,
        /// The second end.
        pub second: FlowEnd,
        /// With [`FLOW_TRANSLATED`]: the packet's source address after translation, IPv4 as `::ffff:a.b.c.d`.
        pub source: [u8; 16],
        /// With [`FLOW_TRANSLATED`]: the packet's destination address after translation.
        pub destination: [u8; 16],
    }

    /// Value of `NODES`: a way to another node of the cluster. A node that is reached in two ways, by tunnel and
    /// without or by addresses of both families, has a row for each.
    pub struct NodeRow {
        /// The node's address in the underlay, IPv4 as `::ffff:a.b.c.d`, network byte order: the other end of the
        /// tunnel, or the next hop. IPv6 packets have no next hop with an IPv4 address.
        pub underlay: [u8; 16],
        /// Changes when the number gets another node or the node another address, after what is known about its pods.
        /// Only ever steps forward, also when the number is given to another node.
        pub generation: u32,
        /// Largest IP packet towards the node, in bytes, before any outer header.
        pub mtu: u32,
        /// Index of the interface that leads there: the tunnel device, or the interface of the route. 0: no such node.
        pub ifindex: u32,
        /// Unused, zero.
        pub reserved: u32,
    }

    /// Key of `FRAGMENTS` and `FRAGMENTS_OUTSIDE`: the datagram that a fragment belongs to (RFC 791, RFC 8200).
    pub struct FragmentKey {
        /// Network id.
        pub network: u32,
        /// Identification field as it is in the packet; IPv4's 16 bits in the first two bytes.
        pub identification: [u8; 4],
        /// Source address, IPv4 as `::ffff:a.b.c.d`.
        pub source: [u8; 16],
        /// Destination address, IPv4 as `::ffff:a.b.c.d`.
        pub destination: [u8; 16],
        /// Protocol number of IPv4; 0 for IPv6, where each fragment may name another header.
        pub protocol: u16,
        /// A [`crate::Direction`] plus 1; no direction vouches for another.
        pub direction: u16,
    }

    /// Value of `FRAGMENTS` and `FRAGMENTS_OUTSIDE`: a first fragment that was let through.
    pub struct FragmentValue {
        /// jiffies when it was.
        pub seen: u64,
        /// Its ports.
        pub ports: Ports,
        /// Its transport protocol number, behind all extension headers.
        pub protocol: u32,
    }
}

/// Seconds for which a first fragment vouches for later ones: as long as a receiver waits for them (RFC 791, RFC 8200
/// has 60).
pub const FRAGMENT_SECONDS: u32 = 30;

/// An endpoint of this node.
pub const END_LOCAL: u8 = 1;
/// Whatever the node's stack leads to: the node itself, hosts, pods of other nodes.
pub const END_STACK: u8 = 2;
/// An external host behind the uplink, which knows the pod by an address of the node.
pub const END_OUTSIDE: u8 = 3;
/// A pod of another node, through a tunnel.
pub const END_REMOTE: u8 = 4;
/// A pod of another node, through the network that the nodes share.
pub const END_ROUTED: u8 = 5;

/// The second end opened the flow.
pub const FLOW_OPENED_BY_SECOND: u16 = 1;
/// A reply was seen.
pub const FLOW_REPLIED: u16 = 1 << 1;
/// The flow is established. TCP and SCTP: the opener continued after the reply. UDP: a stream, see [`FLOW_AGED`]. Other
/// protocols: with the first reply.
pub const FLOW_CONFIRMED: u16 = 1 << 2;
/// UDP: the opener has sent a packet after the reply in a later window of 2^[`WINDOW_SHIFT`] jiffies than the packet
/// before; a second time makes the flow a stream. One request and its reply never do.
pub const FLOW_AGED: u16 = 1 << 3;
/// TCP: the first end sent its FIN.
pub const FLOW_FIN_FIRST: u16 = 1 << 4;
/// TCP: the second end sent its FIN.
pub const FLOW_FIN_SECOND: u16 = 1 << 5;
/// TCP: closed by FIN from both sides.
pub const FLOW_CLOSED: u16 = 1 << 6;
/// TCP: an RST came from outside of the node. The next packet of the pod clears the flag: the RST was forged or stale.
pub const FLOW_RESET: u16 = 1 << 7;
/// The row is of one direction only, and its packets are translated.
pub const FLOW_TRANSLATED: u16 = 1 << 8;
/// With [`FLOW_TRANSLATED`]: the row is of packets of the second end.
pub const FLOW_FROM_SECOND: u16 = 1 << 9;
/// Opened through a Service or a host port: the original destination is translated.
pub const FLOW_SERVICE: u16 = 1 << 10;
/// The pod reaches itself through a service: no policy applies between a pod and itself.
pub const FLOW_HAIRPIN: u16 = 1 << 11;
/// Opened by the node itself, which may always reach its pods: no policy applies.
pub const FLOW_NODE: u16 = 1 << 12;

/// A window is 2^8 jiffies: 1 s at HZ=250, 0.26 s at HZ=1000.
pub const WINDOW_SHIFT: u32 = 8;

/// [`FlowEnd::generation`] of a pod of another node. Neither number ever decreases, so that their sum changes when
/// either does.
#[inline(always)]
#[must_use]
pub const fn remote_generation(epoch: u32, node: u32) -> u32 {
    epoch.wrapping_add(node)
}

/// The first field of a flow key.
#[inline(always)]
#[must_use]
pub const fn scope(network: u32, protocol: u8) -> u32 {
    network << 8 | protocol as u32
}

/// The network of [`scope`].
#[must_use]
pub const fn network_of(scope: u32) -> u32 {
    scope >> 8
}

/// The protocol of [`scope`].
#[must_use]
pub const fn protocol_of(scope: u32) -> u8 {
    (scope & 0xff) as u8
}

/// Whether the sender of a packet is the second end in the key: it has the larger address, compared as words in memory
/// order, the last one first. Addresses as in `crate::address::words`.
#[inline(always)]
#[must_use]
pub const fn is_second(source: [u32; 4], destination: [u32; 4]) -> bool {
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (source, destination);
    if a3 != b3 {
        a3 > b3
    } else if a2 != b2 {
        a2 > b2
    } else if a1 != b1 {
        a1 > b1
    } else {
        a0 > b0
    }
}

impl FlowValue {
    /// Whether a packet is of the reply direction; `second`: its sender is the second end.
    #[inline(always)]
    #[must_use]
    pub const fn is_reply(&self, second: bool) -> bool {
        (self.flags & FLOW_OPENED_BY_SECOND != 0) != second
    }

    /// The sender of a packet, and its kind.
    #[inline(always)]
    #[must_use]
    pub const fn sender(&self, second: bool) -> (u8, FlowEnd) {
        if second {
            (self.second_kind, self.second)
        } else {
            (self.first_kind, self.first)
        }
    }

    /// The receiver of a packet, and its kind.
    #[inline(always)]
    #[must_use]
    pub const fn receiver(&self, second: bool) -> (u8, FlowEnd) {
        self.sender(!second)
    }

    /// jiffies since the last packet; 0 if another CPU has written a newer time than `now`, of which the low 32 bits
    /// count. Right for rows that are younger than 2^31 jiffies; the agent removes them long before.
    #[inline(always)]
    #[must_use]
    pub const fn age(&self, now: u32) -> u32 {
        let age = now.wrapping_sub(self.last_seen);
        if age & (1 << 31) != 0 { 0 } else { age }
    }

    /// Whether the row has not expired.
    #[inline(always)]
    #[must_use]
    pub const fn is_live(&self, now: u32) -> bool {
        self.age(now) <= self.lifetime
    }
}

impl EndPorts {
    /// From the word of a packet's [`Ports`]; `second`: the packet's sender is the second end.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(ports: u32, second: bool) -> Self {
        let ports = Ports::from_word(if second { swapped(ports) } else { ports });
        Self {
            first: ports.source,
            second: ports.destination,
        }
    }
}

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
