//! Drops packets that would leave the node with a pod's address although the pod's network does not route, and those to the
//! port of tunnels that did not come through the tunnel device.
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
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    work::{self, Place},
};

const IPV4_SOURCE: usize = ETH_LEN + 12;
const IPV6_SOURCE: usize = ETH_LEN + 8;
const IPV4_PROTOCOL: usize = ETH_LEN + 9;
const IPV6_NEXT: usize = ETH_LEN + 6;

/// Drops such packets, passes all others.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    if config::is_judged(skb::mark(ctx)) {
        // `from_pod` sends it to a pod of another node, which knows it by its own address, or it came through the tunnel.
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

/// Whether a process of the node, or a pod by way of the stack, forges a packet of the tunnel: 1 if so. Later fragments are
/// useless without their first.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn to_uplink_is_forged(skb: *mut __sk_buff) -> u32 {
    u32::from(is_forged(&TcContext::new(skb)))
}

#[inline(always)]
fn is_forged(ctx: &TcContext) -> bool {
    let mut packet = Packet::unknown();
    let Ok(eth) = skb::read::<EthHeader>(ctx, 0) else {
        return false;
    };
    let parsed = match eth.ethertype {
        ETHERTYPE_IPV4 if is(ctx, IPV4_PROTOCOL, packet::UDP) => packet::ipv4(ctx, &mut packet),
        // Extension headers may precede the datagram.
        ETHERTYPE_IPV6 if !is(ctx, IPV6_NEXT, packet::TCP) => packet::ipv6(ctx, &mut packet),
        _ => return false,
    };
    parsed.is_ok() && !packet.is_later() && remote::is_to_tunnel(packet.protocol, packet.destination_port())
}

#[inline(always)]
fn is(ctx: &TcContext, offset: usize, protocol: u8) -> bool {
    matches!(skb::read::<u8>(ctx, offset), Ok(found) if found == protocol)
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
