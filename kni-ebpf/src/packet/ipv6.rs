//! Parses the IPv6 header and its extensions (RFC 8200).

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{Verdict, address};

use super::{Fragment, Packet, inside, transport::transport};
use crate::{
    decision::Reason,
    skb::{self, ETH_LEN},
};

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ipv6Header {
    pub(super) version_class_flow: u32,
    pub(super) payload_length: u16,
    pub(super) next_header: u8,
    pub(super) hop_limit: u8,
    pub(super) source: [u32; 4],
    pub(super) destination: [u32; 4],
}

/// Bytes of a header without extensions.
pub(super) const IPV6_LEN: usize = 40;

#[inline(always)]
fn is_v4_mapped(address: [u32; 4]) -> bool {
    let [a, b, c, _] = address;
    a == 0 && b == 0 && c == address::V4_MAPPED
}

/// Parses an IPv6 packet.
#[inline(always)]
pub fn ipv6(ctx: &TcContext, packet: &mut Packet) -> Result<(), Reason> {
    Reason::check(packet_ipv6(ctx.skb.skb, packet))
}

/// [`ipv6`]; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, as `packet_ipv4`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_ipv6(skb: *mut __sk_buff, packet: *mut Packet) -> u32 {
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let Some(packet) = (unsafe { packet.as_mut() }) else {
        return Verdict::Malformed as u32;
    };
    Reason::code(parse(&TcContext::new(skb), packet))
}

#[inline(always)]
fn parse(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
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
    packet.set_end(ctx.len() as usize);
    if !skb::is_gso(ctx) {
        if ETH_LEN + total > packet.end() {
            return Err(Verdict::Truncated);
        }
        packet.set_end(ETH_LEN + total);
    }
    if is_extension(ip.next_header) {
        extensions(ctx, packet)?;
        transport::<false>(ctx, packet.transport(), packet)
    } else {
        transport::<true>(ctx, ETH_LEN + IPV6_LEN, packet)
    }
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
/// Next header of a fragment (IANA).
pub const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;
const MAX_EXTENSIONS: usize = 6;

/// Whether an extension header follows that names a next header.
#[inline(always)]
#[must_use]
pub const fn is_extension(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// The first eight bytes of any IPv6 extension header (RFC 8200).
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    next: u8,
    length: u8,
    /// Fragment header: offset and flags, network byte order. Routing header: its type, and the segments left.
    info: u16,
    identification: u32,
}

/// Whether the routing header is of type 0 (RFC 5095), or of any type and names a further destination, which would be
/// another one than the policies are asked about.
#[inline(always)]
fn is_source_route(header: &Extension) -> bool {
    let [kind, segments_left] = header.info.to_ne_bytes();
    kind == 0 || segments_left != 0
}

/// Walks IPv6 extension headers to the transport header, or to the fragment's payload.
///
/// VERIFIER: a result of more than one word would be written through a pointer, and the function would then return the
/// content of its first register; if that is a pointer into the stack, the verifier refuses it.
#[inline(never)]
fn extensions(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
    let mut offset = ETH_LEN + IPV6_LEN;
    let mut next = packet.protocol;
    // VERIFIER: a bounded loop.
    for position in 0..MAX_EXTENSIONS {
        let header: Extension = inside(ctx, offset, packet.end())?;
        let mut length = (usize::from(header.length) + 1) * 8;
        match next {
            HOP_BY_HOP if position != 0 => return Err(Verdict::Malformed),
            ROUTING if is_source_route(&header) => return Err(Verdict::SourceRoute),
            FRAGMENT => {
                length = 8;
                fragment_v6(&header, packet);
            }
            _ => {}
        }
        next = header.next;
        offset += length;
        packet.protocol = next;
        if offset > packet.end() {
            return Err(Verdict::Truncated);
        }
        // After a later fragment's header comes payload, whatever its first bytes look like.
        if !is_extension(next) || matches!(packet.fragment, Fragment::Later) {
            packet.set_transport(offset);
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
