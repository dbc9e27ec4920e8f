//! Parses the IPv4 header (RFC 791).

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{Verdict, address};

use super::{Fragment, Packet, transport::transport};
use crate::{
    decision::Reason,
    skb::{self, ETH_LEN},
};

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ipv4Header {
    pub(super) version_ihl: u8,
    pub(super) tos: u8,
    pub(super) total_length: u16,
    pub(super) identification: u16,
    pub(super) fragment: u16,
    pub(super) ttl: u8,
    pub(super) protocol: u8,
    pub(super) checksum: u16,
    pub(super) source: u32,
    pub(super) destination: u32,
}

/// Bytes of a header without options.
pub(super) const IPV4_LEN: usize = 20;

/// Parses an IPv4 packet.
#[inline(always)]
pub fn ipv4(ctx: &TcContext, packet: &mut Packet) -> Result<(), Reason> {
    Reason::check(packet_ipv4(ctx.skb.skb, packet))
}

/// [`ipv4`]; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, see `global`: what follows is verified for any packet, not for each way through here.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_ipv4(skb: *mut __sk_buff, packet: *mut Packet) -> u32 {
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let Some(packet) = (unsafe { packet.as_mut() }) else {
        return Verdict::Malformed as u32;
    };
    Reason::code(parse(&TcContext::new(skb), packet))
}

#[inline(always)]
fn parse(ctx: &TcContext, packet: &mut Packet) -> Result<(), Verdict> {
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
    packet.set_end(ctx.len() as usize);
    if !skb::is_gso(ctx) {
        if total < header_length {
            return Err(Verdict::Malformed);
        }
        if ETH_LEN + total > packet.end() {
            return Err(Verdict::Truncated);
        }
        packet.set_end(ETH_LEN + total);
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
pub(super) fn fragment_v4(ip: &Ipv4Header, packet: &mut Packet) {
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

/// Maximum number of parsed IPv4 options, padding (NOP) included.
const MAX_OPTIONS: usize = 10;

/// Walks IPv4 options (RFC 791): their lengths must add up and none may be a source route.
#[inline(never)]
fn options_v4(ctx: &TcContext, header_length: usize) -> Result<(), Verdict> {
    const END: u8 = 0;
    const NOP: u8 = 1;
    const LSRR: u8 = 131;
    const SSRR: u8 = 137;
    let mut offset = IPV4_LEN;
    // VERIFIER: a bounded loop. 40 bytes hold up to 40 options, but each iteration doubles the paths to verify.
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
