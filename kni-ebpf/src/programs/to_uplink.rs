//! What leaves the node.
//!
//! - Hook: TC egress of the uplink.
//! - Reads `ENDPOINTS`; counts.
//! - Drops packets of pods that would leave with the pod's own address although their network does not route: `from_pod`
//!   translates before it sends here, so this is what came another way, through the stack.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, IFINDEX_BASE, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_ROUTED},
};

use super::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, NEXT};
use crate::{
    count::{self, Place},
    endpoint,
    packet::Packet,
    skb::{self, ETH_LEN, EthHeader},
    story,
};

const IPV4_SOURCE: usize = ETH_LEN + 12;
const IPV6_SOURCE: usize = ETH_LEN + 8;

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
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
    match story::begin(&place, &Packet::unknown()) {
        Some(work) => count::dropped(ctx, &mut work.story, Verdict::Untranslated as u16),
        None => super::DROP,
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
