//! Parses a packet's headers into a [`Packet`], or returns the reason to drop it.
//!
//! Order of checks (the tests' reference model follows it): length and version, header length, total length, options,
//! then transport. All reads stay within the length in the IP header: the rest of the frame is padding, which no
//! receiver reads. The programs check the addresses.

mod ipv4;
mod ipv6;
mod quoted;
mod transport;

use aya_ebpf::programs::TcContext;
use kni_common::Verdict;

pub use self::{
    ipv4::ipv4,
    ipv6::{FRAGMENT, ipv6, is_extension},
    quoted::quoted,
};
use crate::skb;

/// Transport protocol numbers (IANA).
pub const TCP: u8 = 6;
/// UDP.
pub const UDP: u8 = 17;
/// SCTP.
pub const SCTP: u8 = 132;
/// ICMP for IPv4.
pub const ICMP: u8 = 1;
/// ICMP for IPv6.
pub const ICMPV6: u8 = 58;

/// The role of a packet for the flow table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Belongs to a flow.
    Flow,
    /// Opens a flow (TCP SYN): permissions of an old flow with the same tuple do not apply.
    Open,
    /// An ICMP error; its flow is that of the quoted packet.
    IcmpError,
    /// IPv6 neighbour discovery or multicast listener report.
    LinkControl,
}

/// The part of a datagram that a packet carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// All of it.
    Whole,
    /// The first of several: it has the ports.
    First,
    /// A later one, without ports.
    Later,
}

/// The parsed headers of a packet.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Packet {
    /// Source address, IPv4 as `::ffff:a.b.c.d`.
    pub source: [u32; 4],
    /// Destination address, likewise.
    pub destination: [u32; 4],
    /// Ports as in `kni_common::flow::FlowKey4`.
    pub ports: u32,
    /// Fragment identification, network byte order.
    pub identification: u32,
    /// VERIFIER: offsets as short words, to save stack.
    pub(crate) transport: u32,
    pub(crate) end: u32,
    /// Transport protocol number.
    pub protocol: u8,
    /// Type of ICMP and ICMPv6.
    pub icmp_type: u8,
    /// Flags of TCP, else 0.
    pub tcp_flags: u8,
    /// Whether the transport header follows an IP header without options or extensions.
    pub plain: bool,
    /// IPv4, else IPv6.
    pub v4: bool,
    /// Role for the flow table.
    pub class: Class,
    /// Part of a datagram.
    pub fragment: Fragment,
}

impl Packet {
    /// Nothing is parsed yet.
    #[inline(always)]
    pub const fn unknown() -> Self {
        Self {
            source: [0; 4],
            destination: [0; 4],
            ports: 0,
            identification: 0,
            transport: 0,
            end: 0,
            protocol: 0,
            icmp_type: 0,
            tcp_flags: 0,
            plain: false,
            v4: true,
            class: Class::Flow,
            fragment: Fragment::Whole,
        }
    }

    /// Offset of the transport header.
    #[inline(always)]
    pub const fn transport(&self) -> usize {
        self.transport as usize
    }

    /// Offset of the first byte after the IP packet.
    #[inline(always)]
    pub const fn end(&self) -> usize {
        self.end as usize
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "an offset in a packet")]
    const fn set_transport(&mut self, offset: usize) {
        self.transport = offset as u32;
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "an offset in a packet")]
    const fn set_end(&mut self, offset: usize) {
        self.end = offset as u32;
    }

    /// Source and destination, as they are in an IPv6 header.
    #[inline(always)]
    pub const fn addresses(&self) -> &[[u32; 4]; 2] {
        // SAFETY: `repr(C)`: the two fields come first, one after the other, without padding.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Whether the destination is a multicast or broadcast address.
    #[inline(always)]
    pub fn is_multicast(&self) -> bool {
        let [first, _, _, last] = self.destination;
        if self.v4 {
            last & BYTE0_F0 == BYTE0_E0 || last == u32::MAX
        } else {
            first & BYTE0_FF == BYTE0_FF
        }
    }

    /// Whether the destination is a loopback address (127.0.0.0/8, `::1`).
    #[inline(always)]
    pub fn to_loopback(&self) -> bool {
        const ONE: u32 = u32::from_be(1);
        let [a, b, c, last] = self.destination;
        if self.v4 {
            last & BYTE0_FF == BYTE0_7F
        } else {
            a == 0 && b == 0 && c == 0 && last == ONE
        }
    }

    /// Protocol and destination port in the form of policy lookups: the port in its place on the wire, 0 for protocols
    /// without ports.
    #[inline(always)]
    pub fn policy_port(&self) -> u32 {
        let port = match self.protocol {
            TCP | UDP | SCTP => self.ports & DESTINATION_PORT,
            _ => 0,
        };
        port | u32::from_ne_bytes([self.protocol, 0, 0, 0])
    }

    /// The destination port as it is in the packet, of protocols with ports.
    #[inline(always)]
    #[must_use]
    pub const fn destination_port(&self) -> [u8; 2] {
        let [_, _, high, low] = self.ports.to_ne_bytes();
        [high, low]
    }

    /// [`Self::policy_port`] of the packet that this one replies to.
    #[inline(always)]
    pub fn reply_policy_port(&self) -> u32 {
        let port = match self.protocol {
            TCP | UDP | SCTP => self.ports.rotate_left(16) & DESTINATION_PORT,
            _ => 0,
        };
        port | u32::from_ne_bytes([self.protocol, 0, 0, 0])
    }

    /// Whether it is not a fragment.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        matches!(self.fragment, Fragment::Whole)
    }

    /// Whether it is the first of several fragments.
    #[inline(always)]
    pub fn is_first(&self) -> bool {
        matches!(self.fragment, Fragment::First)
    }

    /// Whether it is a fragment without a transport header.
    #[inline(always)]
    pub fn is_later(&self) -> bool {
        matches!(self.fragment, Fragment::Later)
    }

    /// Whether the destination is an IPv6 link-local address.
    #[inline(always)]
    pub fn to_link_local(&self) -> bool {
        !self.v4 && is_link_local(self.destination)
    }

    /// Whether the source is valid in neighbour discovery: link-local or unspecified (RFC 4861, RFC 4862).
    #[inline(always)]
    pub fn has_link_source(&self) -> bool {
        is_link_local(self.source) || self.source == [0; 4]
    }
}

/// The destination port's half of the word of ports.
const DESTINATION_PORT: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);
// Masks for the first byte of a network-order word.
const BYTE0_F0: u32 = u32::from_ne_bytes([0xf0, 0, 0, 0]);
const BYTE0_E0: u32 = u32::from_ne_bytes([0xe0, 0, 0, 0]);
const BYTE0_FF: u32 = u32::from_ne_bytes([0xff, 0, 0, 0]);
const BYTE0_7F: u32 = u32::from_ne_bytes([0x7f, 0, 0, 0]);

/// Whether an IPv6 address is link-local (RFC 4291 2.5.6).
#[inline(always)]
pub fn is_link_local(address: [u32; 4]) -> bool {
    const MASK: u32 = u32::from_ne_bytes([0xff, 0xc0, 0, 0]);
    const PREFIX: u32 = u32::from_ne_bytes([0xfe, 0x80, 0, 0]);
    let [first, ..] = address;
    first & MASK == PREFIX
}

/// TCP FIN.
pub const FIN: u8 = 0x01;
/// TCP SYN.
pub const SYN: u8 = 0x02;
/// TCP RST.
pub const RST: u8 = 0x04;
/// TCP ACK.
pub const ACK: u8 = 0x10;

/// Copies `T` from any offset of an IP packet that ends at `end`.
#[inline(always)]
fn inside<T: Copy>(ctx: &TcContext, offset: usize, end: usize) -> Result<T, Verdict> {
    if offset + size_of::<T>() > end {
        return Err(Verdict::Truncated);
    }
    skb::load(ctx, offset)
}
