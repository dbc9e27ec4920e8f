//! Reads a packet's headers into a [`Packet`], or says why it will not.
//!
//! Order of checks (tests' reference model follows it): length and version, header length, total length, options,
//! then transport. Whatever is read lies inside the length that the IP header tells: what follows it in the frame is
//! padding, which no receiver reads. Addresses are judged by the programs.

use aya_ebpf::programs::TcContext;
use kni_common::{Verdict, address};

use crate::skb::{self, ETH_LEN};

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

/// What a packet means for the flow table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Belongs to a flow.
    Flow,
    /// Opens a flow (TCP SYN): whatever an old flow with the same tuple allowed does not count.
    Open,
    /// An ICMP error; its flow is that of the packet it quotes.
    IcmpError,
    /// IPv6 neighbour discovery or multicast listener report.
    LinkControl,
}

/// Which part of a datagram a packet is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// All of it.
    Whole,
    /// The first of several: it has the ports.
    First,
    /// A later one: it has none.
    Later,
}

/// What the programs know of a packet.
#[derive(Clone, Copy)]
pub struct Packet {
    /// Source address, IPv4 as `::ffff:a.b.c.d`.
    pub source: [u32; 4],
    /// Destination address, likewise.
    pub destination: [u32; 4],
    /// Ports as in `kni_common::flow::FlowKey4`.
    pub ports: u32,
    /// Fragment identification, network byte order.
    pub identification: u32,
    /// Offset of the transport header.
    pub transport: usize,
    /// Offset of the first byte behind the IP packet.
    pub end: usize,
    /// Transport protocol number.
    pub protocol: u8,
    /// Type of ICMP and ICMPv6.
    pub icmp_type: u8,
    /// IPv4, else IPv6.
    pub v4: bool,
    /// Meaning for the flow table.
    pub class: Class,
    /// Part of a datagram.
    pub fragment: Fragment,
}

impl Packet {
    /// Nothing known yet.
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
            v4: true,
            class: Class::Flow,
            fragment: Fragment::Whole,
        }
    }

    /// Whether the destination is a multicast or broadcast address.
    #[inline(always)]
    pub fn to_many(&self) -> bool {
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

    /// Whether the destination is an IPv6 link-local address.
    #[inline(always)]
    pub fn to_link_local(&self) -> bool {
        !self.v4 && is_link_local(self.destination)
    }

    /// Whether the source may stand in neighbour discovery: link-local or unspecified (RFC 4861, RFC 4862).
    #[inline(always)]
    pub fn from_link(&self) -> bool {
        is_link_local(self.source) || self.source == [0; 4]
    }
}

// Masks for the first byte of a network-order word.
const BYTE0_F0: u32 = u32::from_ne_bytes([0xf0, 0, 0, 0]);
const BYTE0_E0: u32 = u32::from_ne_bytes([0xe0, 0, 0, 0]);
const BYTE0_FF: u32 = u32::from_ne_bytes([0xff, 0, 0, 0]);
const BYTE0_7F: u32 = u32::from_ne_bytes([0x7f, 0, 0, 0]);

#[inline(always)]
fn is_link_local(address: [u32; 4]) -> bool {
    const MASK: u32 = u32::from_ne_bytes([0xff, 0xc0, 0, 0]);
    const PREFIX: u32 = u32::from_ne_bytes([0xfe, 0x80, 0, 0]);
    let [first, ..] = address;
    first & MASK == PREFIX
}

#[inline(always)]
fn is_v4_mapped(address: [u32; 4]) -> bool {
    let [a, b, c, _] = address;
    a == 0 && b == 0 && c == address::V4_MAPPED
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv4Header {
    version_ihl: u8,
    tos: u8,
    total_length: u16,
    identification: u16,
    fragment: u16,
    ttl: u8,
    protocol: u8,
    checksum: u16,
    source: u32,
    destination: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv6Header {
    version_class_flow: u32,
    payload_length: u16,
    next_header: u8,
    hop_limit: u8,
    source: [u32; 4],
    destination: [u32; 4],
}

const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;

/// Reads an IPv4 packet.
#[inline(always)]
pub fn ipv4(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
    let ip: Ipv4Header = skb::read(ctx, ETH_LEN)?;
    packet.v4 = true;
    packet.source = address::mapped(ip.source);
    packet.destination = address::mapped(ip.destination);
    packet.protocol = ip.protocol;
    let header_length = usize::from(ip.version_ihl & 0xf) * 4;
    if ip.version_ihl >> 4 != 4 || header_length < IPV4_LEN {
        return Err(Verdict::Malformed);
    }
    let total = usize::from(u16::from_be(ip.total_length));
    packet.end = ctx.len() as usize;
    if !skb::is_gso(ctx) {
        if total < header_length {
            return Err(Verdict::Malformed);
        }
        if ETH_LEN + total > packet.end {
            return Err(Verdict::Truncated);
        }
        packet.end = ETH_LEN + total;
    }
    fragment_v4(&ip, packet);
    if header_length == IPV4_LEN {
        transport::<true>(ctx, ETH_LEN + IPV4_LEN, packet)
    } else {
        options_v4(ctx, header_length)?;
        transport::<false>(ctx, ETH_LEN + header_length, packet)
    }
}

#[inline(always)]
fn fragment_v4(ip: &Ipv4Header, packet: &mut Packet) {
    const MORE: u16 = u16::from_be(0x2000);
    const OFFSET: u16 = u16::from_be(0x1fff);
    if ip.fragment & (MORE | OFFSET) != 0 {
        packet.identification = u32::from_ne_bytes(pad(ip.identification.to_ne_bytes()));
        packet.fragment = if ip.fragment & OFFSET == 0 {
            Fragment::First
        } else {
            Fragment::Later
        };
    }
}

#[inline(always)]
const fn pad(two: [u8; 2]) -> [u8; 4] {
    let [a, b] = two;
    [a, b, 0, 0]
}

/// Most IPv4 options that are looked at, padding (NOP) included.
const MAX_OPTIONS: usize = 10;

/// Walks IPv4 options (RFC 791): their lengths must add up and none may be a source route.
#[inline(never)]
fn options_v4(ctx: &TcContext, header_length: usize) -> Result<(), Verdict> {
    const END: u8 = 0;
    const NOP: u8 = 1;
    const LSRR: u8 = 131;
    const SSRR: u8 = 137;
    let mut offset = IPV4_LEN;
    // VERIFIER: a bounded loop. 40 bytes hold up to 40 options, but each turn doubles the paths to verify.
    for _ in 0..MAX_OPTIONS {
        if offset >= header_length {
            return Ok(());
        }
        let kind: u8 = skb::load(ctx, ETH_LEN + offset)?;
        if kind == END {
            return Ok(());
        }
        if kind == NOP {
            offset += 1;
            continue;
        }
        if kind == LSRR || kind == SSRR {
            return Err(Verdict::SourceRoute);
        }
        let length: u8 = skb::load(ctx, ETH_LEN + offset + 1)?;
        let length = usize::from(length);
        if length < 2 || offset + length > header_length {
            return Err(Verdict::Malformed);
        }
        offset += length;
    }
    if offset >= header_length {
        Ok(())
    } else {
        Err(Verdict::ExtensionHeaders)
    }
}

/// Reads an IPv6 packet.
#[inline(always)]
pub fn ipv6(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
    let ip: Ipv6Header = skb::read(ctx, ETH_LEN)?;
    packet.v4 = false;
    packet.source = ip.source;
    packet.destination = ip.destination;
    packet.protocol = ip.next_header;
    if u32::from_be(ip.version_class_flow) >> 28 != 6 {
        return Err(Verdict::Malformed);
    }
    // A v4-mapped address on the wire (RFC 4291 2.5.5.2 forbids it) would look like IPv4 in the tables.
    if is_v4_mapped(ip.source) || is_v4_mapped(ip.destination) {
        return Err(Verdict::Malformed);
    }
    let total = IPV6_LEN + usize::from(u16::from_be(ip.payload_length));
    packet.end = ctx.len() as usize;
    if !skb::is_gso(ctx) {
        if ETH_LEN + total > packet.end {
            return Err(Verdict::Truncated);
        }
        packet.end = ETH_LEN + total;
    }
    if is_extension(ip.next_header) {
        extensions(ctx, packet)?;
        transport::<false>(ctx, packet.transport, packet)
    } else {
        transport::<true>(ctx, ETH_LEN + IPV6_LEN, packet)
    }
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;
const MAX_EXTENSIONS: usize = 6;

#[inline(always)]
const fn is_extension(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// The first eight bytes of any IPv6 extension header (RFC 8200).
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    next: u8,
    length: u8,
    /// Fragment header: offset and flags, network byte order. Routing header: its type in the first byte.
    info: u16,
    identification: u32,
}

/// Walks IPv6 extension headers to the transport header, or to the fragment's payload.
///
/// VERIFIER: a result of more than one word would be written through a pointer, and the function would then return
/// whatever its first register holds; if that is a pointer into the stack, the verifier refuses it.
#[inline(never)]
fn extensions(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
    let mut offset = ETH_LEN + IPV6_LEN;
    let mut next = packet.protocol;
    // VERIFIER: a bounded loop.
    for position in 0..MAX_EXTENSIONS {
        let header: Extension = inside(ctx, offset, packet.end)?;
        let mut length = (usize::from(header.length) + 1) * 8;
        match next {
            HOP_BY_HOP if position != 0 => return Err(Verdict::Malformed),
            ROUTING if header.info.to_ne_bytes()[0] == 0 => return Err(Verdict::SourceRoute),
            FRAGMENT => {
                length = 8;
                fragment_v6(&header, packet);
            }
            _ => {}
        }
        next = header.next;
        offset += length;
        packet.protocol = next;
        if offset > packet.end {
            return Err(Verdict::Truncated);
        }
        // Behind a later fragment's header there is payload, whatever its first bytes look like.
        if !is_extension(next) || matches!(packet.fragment, Fragment::Later) {
            packet.transport = offset;
            return Ok(());
        }
    }
    Err(Verdict::ExtensionHeaders)
}

#[inline(always)]
fn fragment_v6(header: &Extension, packet: &mut Packet) {
    const MORE: u16 = u16::from_be(0x0001);
    const OFFSET: u16 = u16::from_be(0xfff8);
    // Neither bit: an atomic fragment (RFC 6946), which is a whole packet.
    if header.info & (MORE | OFFSET) != 0 {
        packet.identification = header.identification;
        packet.fragment = if header.info & OFFSET == 0 {
            Fragment::First
        } else {
            Fragment::Later
        };
    }
}

/// As much of a TCP header as the smallest first fragment that the programs accept must hold.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpStart {
    ports: u32,
    sequence: [u32; 2],
    offset_flags: [u8; 2],
    window: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UdpHeader {
    ports: u32,
    length_checksum: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SctpHeader {
    ports: u32,
    tag_checksum: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct IcmpHeader {
    kind: u8,
    code: u8,
    checksum: u16,
    identifier: u16,
    sequence: u16,
}

/// Copies `T` from any offset of an IP packet that ends at `end`.
#[inline(always)]
fn inside<T: Copy>(ctx: &TcContext, offset: usize, end: usize) -> Result<T, Verdict> {
    if offset + size_of::<T>() > end {
        return Err(Verdict::Truncated);
    }
    skb::load(ctx, offset)
}

/// Reads at a constant offset through a pointer, at a variable one through the helper.
#[inline(always)]
fn fetch<const FIXED: bool, T: Copy>(ctx: &TcContext, offset: usize, end: usize) -> Result<T, Verdict> {
    if !FIXED {
        return inside(ctx, offset, end);
    }
    if offset + size_of::<T>() > end {
        return Err(Verdict::Truncated);
    }
    skb::read(ctx, offset)
}

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

#[inline(always)]
fn transport<const FIXED: bool>(ctx: &TcContext, offset: usize, packet: &mut Packet) -> Result<(), Verdict> {
    let end = packet.end;
    packet.transport = offset;
    if matches!(packet.fragment, Fragment::Later) {
        return Ok(());
    }
    match packet.protocol {
        TCP => {
            let tcp: TcpStart = fetch::<FIXED, _>(ctx, offset, end)?;
            packet.ports = tcp.ports;
            let [_, flags] = tcp.offset_flags;
            if flags & (SYN | ACK) == SYN {
                packet.class = Class::Open;
            }
        }
        UDP => packet.ports = fetch::<FIXED, UdpHeader>(ctx, offset, end)?.ports,
        SCTP => packet.ports = fetch::<FIXED, SctpHeader>(ctx, offset, end)?.ports,
        ICMP if packet.v4 => icmp(&fetch::<FIXED, _>(ctx, offset, end)?, packet)?,
        ICMPV6 if !packet.v4 => icmpv6(&fetch::<FIXED, _>(ctx, offset, end)?, packet)?,
        _ => {}
    }
    Ok(())
}

/// An identifier twice, so that both directions of an echo have keys that are each other's reverse.
#[inline(always)]
fn twice(identifier: u16) -> u32 {
    u32::from(identifier) << 16 | u32::from(identifier)
}

#[inline(always)]
fn icmp(header: &IcmpHeader, packet: &mut Packet) -> Result<(), Verdict> {
    packet.icmp_type = header.kind;
    match header.kind {
        // Echo and timestamp, request and reply (RFC 792).
        0 | 8 | 13 | 14 => packet.ports = twice(header.identifier),
        // Destination unreachable, time exceeded, parameter problem.
        3 | 11 | 12 => packet.class = Class::IcmpError,
        _ => return Err(Verdict::IcmpType),
    }
    Ok(())
}

#[inline(always)]
fn icmpv6(header: &IcmpHeader, packet: &mut Packet) -> Result<(), Verdict> {
    packet.icmp_type = header.kind;
    match header.kind {
        // Unreachable, too big, time exceeded, parameter problem (RFC 4443).
        1..=4 => packet.class = Class::IcmpError,
        // Echo request and reply.
        128 | 129 => packet.ports = twice(header.identifier),
        // MLD (RFC 2710, 3810) and neighbour discovery (RFC 4861).
        130..=137 | 143 => packet.class = Class::LinkControl,
        _ => return Err(Verdict::IcmpType),
    }
    Ok(())
}

/// Reads the packet that an ICMP error quotes: its addresses, protocol and ports, in its own direction.
#[inline(never)]
pub fn quoted(ctx: &TcContext, outer: &Packet, inner: &mut Packet) -> Result<(), Verdict> {
    const ICMP_LEN: usize = 8;
    let start = outer.transport + ICMP_LEN;
    inner.v4 = outer.v4;
    let offset = if outer.v4 {
        let ip: Ipv4Header = inside(ctx, start, outer.end)?;
        let header_length = usize::from(ip.version_ihl & 0xf) * 4;
        if ip.version_ihl >> 4 != 4 || header_length < IPV4_LEN {
            return Err(Verdict::Malformed);
        }
        inner.source = address::mapped(ip.source);
        inner.destination = address::mapped(ip.destination);
        inner.protocol = ip.protocol;
        fragment_v4(&ip, inner);
        start + header_length
    } else {
        let ip: Ipv6Header = inside(ctx, start, outer.end)?;
        if u32::from_be(ip.version_class_flow) >> 28 != 6 {
            return Err(Verdict::Malformed);
        }
        inner.source = ip.source;
        inner.destination = ip.destination;
        inner.protocol = ip.next_header;
        start + IPV6_LEN
    };
    if matches!(inner.fragment, Fragment::Later) {
        return Err(Verdict::IcmpUnrelated);
    }
    inner.ports = match inner.protocol {
        TCP | UDP | SCTP => inside(ctx, offset, outer.end)?,
        ICMP if outer.v4 => twice(inside::<IcmpHeader>(ctx, offset, outer.end)?.identifier),
        ICMPV6 if !outer.v4 => twice(inside::<IcmpHeader>(ctx, offset, outer.end)?.identifier),
        _ => 0,
    };
    Ok(())
}
