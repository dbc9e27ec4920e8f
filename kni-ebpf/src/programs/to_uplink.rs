//! Drops packets that would leave the node with a pod's address although the pod's network does not route.
//!
//! - Hook: TC egress of the uplink.
//! - Reads `ENDPOINTS`, `CONFIG`; counts.
//! - `from_pod` translates packets before it sends them to the uplink: a packet with a pod's address came through the
//!   stack.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, IFINDEX_BASE, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_ROUTED},
};

use crate::{
    action::{DROP, NEXT},
    config, count, endpoint,
    packet::Packet,
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    work::{self, Place},
};

const IPV4_SOURCE: usize = ETH_LEN + 12;
const IPV6_SOURCE: usize = ETH_LEN + 8;

/// Drops such packets, passes all others.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let endpoint = skb::ingress_ifindex(ctx).wrapping_sub(IFINDEX_BASE);
    let Some(row) = endpoint::row(endpoint) else {
        return NEXT;
    };
    if config::is_judged(skb::mark(ctx)) {
        // `from_pod` sends it to a pod of another node, which knows it by its own address.
        skb::set_mark(ctx, 0);
        return NEXT;
    }
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
    match work::begin(&place, &Packet::unknown()) {
        Some(work) => count::dropped(ctx, &mut work.event, Verdict::Untranslated as u16),
        None => DROP,
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
