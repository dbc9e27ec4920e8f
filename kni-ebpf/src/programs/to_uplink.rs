//! Drops packets that would leave the node with a pod's address although the pod's network does not route, and those to
//! the port of tunnels that did not come through the tunnel device.
//!
//! - Hook: TC egress of the uplink.
//! - Reads `ENDPOINTS`, `OVERLAY`, `CONFIG`; counts.
//! - `from_pod` translates packets before it sends them to the uplink: a packet with a pod's address came through the
//!   stack.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Direction, IFINDEX_BASE, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_ROUTED},
};

use crate::{
    action::{DROP, NEXT},
    config, count, endpoint,
    packet::{self, Packet},
    remote,
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, EthHeader},
    work::{self, Place},
};

const IPV4_SOURCE: usize = ETH_LEN + 12;
const IPV6_SOURCE: usize = ETH_LEN + 8;
/// Bytes of a VLAN tag; the last two are the EtherType of what follows.
const TAG_LEN: usize = 4;
/// The most IPv6 extension headers that may precede a datagram. A node sends no packet with more.
const MAX_EXTENSIONS: usize = 8;

/// Drops such packets, passes all others.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    if config::is_evaluated(skb::mark(ctx)) {
        // `from_pod` sends it to a pod of another node, which knows it by its own address, or it came through the
        // tunnel.
        skb::set_mark(ctx, 0);
        return NEXT;
    }
    if remote::has_tunnel() && to_uplink_is_forged(ctx.skb.skb) != 0 {
        return drop(ctx, &Place::unknown(Direction::ToUplink), Verdict::OverlayPort);
    }
    let endpoint = skb::ingress_ifindex(ctx).wrapping_sub(IFINDEX_BASE);
    let Some(row) = endpoint::row(endpoint) else {
        return NEXT;
    };
    let Ok(eth) = skb::read::<EthHeader>(ctx, 0) else {
        return NEXT;
    };
    if row.flags & FLAG_ROUTED != 0 || !is_own(ctx, row, eth.ethertype) {
        return NEXT;
    }
    let mut place = Place::unknown(Direction::ToUplink);
    place.endpoint = endpoint;
    place.network = row.network;
    place.generation = row.generation;
    place.ethertype = u16::from_be(eth.ethertype);
    drop(ctx, &place, Verdict::Untranslated)
}

#[inline(always)]
fn drop(ctx: &TcContext, place: &Place, reason: Verdict) -> i32 {
    match work::begin(place, &Packet::unknown()) {
        Some(work) => count::dropped(ctx, &mut work.event, reason as u16),
        None => DROP,
    }
}

/// Whether a process of the node, or a pod by way of the stack, forges a packet of the tunnel: 1 if so. Later fragments
/// are useless without their first.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn to_uplink_is_forged(skb: *mut __sk_buff) -> u32 {
    u32::from(is_forged(&TcContext::new(skb)))
}

/// Does not use the parser: it gives up on headers that a receiver accepts, and any process may choose them
/// (`IP_OPTIONS`, `IPV6_RTHDR`).
#[inline(always)]
fn is_forged(ctx: &TcContext) -> bool {
    let Ok(eth) = skb::read::<EthHeader>(ctx, 0) else {
        return false;
    };
    if is_tag(eth.ethertype) {
        return to_uplink_is_forged_in_vlan(ctx.skb.skb) != 0;
    }
    is_forged_at::<ETH_LEN>(ctx, eth.ethertype)
}

#[inline(always)]
fn is_tag(ethertype: u16) -> bool {
    ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_QINQ
}

/// [`is_forged`] for a frame that begins with a VLAN tag, whatever its VLAN: a receiver removes any number of tags
/// without a VLAN, and may have an interface in any other.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn to_uplink_is_forged_in_vlan(skb: *mut __sk_buff) -> u32 {
    const ONE: usize = ETH_LEN + TAG_LEN;
    const TWO: usize = ONE + TAG_LEN;
    let ctx = TcContext::new(skb);
    // No node sends more than two tags.
    let is_forged = match (skb::read::<u16>(&ctx, ONE - 2), skb::read::<u16>(&ctx, TWO - 2)) {
        (Ok(behind), Ok(ethertype)) if is_tag(behind) => is_tag(ethertype) || is_forged_at::<TWO>(&ctx, ethertype),
        (Ok(ethertype), _) => is_forged_at::<ONE>(&ctx, ethertype),
        _ => false,
    };
    u32::from(is_forged)
}

/// [`is_forged`] for the packet that begins at an offset of the frame.
#[inline(always)]
fn is_forged_at<const START: usize>(ctx: &TcContext, ethertype: u16) -> bool {
    match ethertype {
        ETHERTYPE_IPV4 => is_forged_v4::<START>(ctx),
        ETHERTYPE_IPV6 => is_forged_v6::<START>(ctx),
        _ => false,
    }
}

#[inline(always)]
fn is_forged_v4<const START: usize>(ctx: &TcContext) -> bool {
    const OFFSET: u16 = u16::from_be(0x1fff);
    let (Ok(packet::UDP), Ok(fragment), Ok(version_ihl)) = (
        skb::read::<u8>(ctx, START + 9),
        skb::read::<u16>(ctx, START + 6),
        skb::read::<u8>(ctx, START),
    ) else {
        return false;
    };
    fragment & OFFSET == 0 && has_port(ctx, START + usize::from(version_ihl & 0xf) * 4)
}

#[inline(always)]
fn is_forged_v6<const START: usize>(ctx: &TcContext) -> bool {
    const OFFSET: u16 = 0xfff8;
    let Ok(mut next) = skb::read::<u8>(ctx, START + 6) else {
        return false;
    };
    let mut offset = START + 40;
    // VERIFIER: a bounded loop.
    for _ in 0..=MAX_EXTENSIONS {
        if !packet::is_extension(next) {
            return next == packet::UDP && has_port(ctx, offset);
        }
        // The rest of the headers may be in the next fragment.
        let Ok([following, length, high, low]) = skb::load::<[u8; 4]>(ctx, offset) else {
            return true;
        };
        offset += match next {
            packet::FRAGMENT if u16::from_be_bytes([high, low]) & OFFSET != 0 => return false,
            packet::FRAGMENT => 8,
            _ => (usize::from(length) + 1) * 8,
        };
        next = following;
    }
    true
}

/// Whether the datagram at the offset is for the port of tunnels, or ends before its port.
#[inline(always)]
fn has_port(ctx: &TcContext, offset: usize) -> bool {
    match skb::load::<[u8; 2]>(ctx, offset + 2) {
        Ok(port) => remote::is_to_tunnel(packet::UDP, port),
        Err(_) => true,
    }
}

/// Whether the source is the pod's own address.
#[inline(always)]
fn is_own(ctx: &TcContext, row: &EndpointRow, ethertype: u16) -> bool {
    match ethertype {
        ETHERTYPE_IPV4 => matches!(
            skb::read::<u32>(ctx, IPV4_SOURCE),
            Ok(source) if source == u32::from_ne_bytes(row.ipv4) && source != 0
        ),
        ETHERTYPE_IPV6 => matches!(
            skb::read::<[u32; 4]>(ctx, IPV6_SOURCE),
            Ok(source) if source == words(row.ipv6) && source != [0; 4]
        ),
        _ => false,
    }
}
