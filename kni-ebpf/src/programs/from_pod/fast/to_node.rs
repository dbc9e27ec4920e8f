//! The part of the straight path behind the lookup of a flow that leads to a pod of another node: also of packets that
//! change the flow's state, but for the SYN of a new connection, which is always evaluated.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    endpoint::EndpointRow,
    flow::{END_LOCAL, FLOW_TRANSLATED, FlowValue},
};

use super::is_far;
use crate::{
    count,
    decision::Decision,
    endpoint,
    flow::{self, Step},
    packet::TCP,
    remote,
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
    straight::{self, Followed, IPV4_LEN, IPV6_LEN, TCP_FLAGS, TCP_LEN, UDP_LEN},
    translate,
};

/// No action of a program.
const GENERAL: u32 = u32::MAX;

/// Forwards a packet of the sender's endpoint that the straight path has parsed, or leaves it as it is to the general
/// path. `second`: its sender is the second end of the flow.
#[inline(always)]
pub(super) fn forward(ctx: &TcContext, row: &EndpointRow, found: &mut FlowValue, second: bool) -> Option<i32> {
    match from_pod_straight_to_node(ctx.skb.skb, row, found, u32::from(second)) {
        GENERAL => None,
        action => Some(action.cast_signed()),
    }
}

/// [`forward`]; [`GENERAL`] for the general path.
///
/// VERIFIER: a global function, see `global`; and the program has no stack left for the key of the tunnel.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_pod_straight_to_node(
    skb: *mut __sk_buff,
    row: *const EndpointRow,
    found: *mut FlowValue,
    second: u32,
) -> u32 {
    // SAFETY: a row that stays mapped.
    let row = unsafe { row.as_ref() };
    // SAFETY: as above; as in `flow::find`, another flow may take it over.
    let found = unsafe { found.as_mut() };
    let (Some(row), Some(found)) = (row, found) else {
        return GENERAL;
    };
    send(&TcContext::new(skb), row, found, second != 0).map_or(GENERAL, i32::cast_unsigned)
}

/// Finds the flow of a TCP packet that may change its state, and forwards it as [`forward`].
#[inline(always)]
pub(super) fn find(ctx: &TcContext) -> Option<i32> {
    match from_pod_straight_change(ctx.skb.skb) {
        GENERAL => None,
        action => Some(action.cast_signed()),
    }
}

/// [`find`]; [`GENERAL`] for the general path.
///
/// VERIFIER: a global function, see `global`; and apart from the packets that change nothing, whose path stays as it
/// is.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_pod_straight_change(skb: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(skb);
    let Some(row) = endpoint::row(endpoint::of_own_interface(ctx)) else {
        return GENERAL;
    };
    let Some(Followed { found, second, .. }) = straight::find(ctx, row.network) else {
        return GENERAL;
    };
    let (to, _) = found.receiver(second);
    if !is_far(to) {
        return GENERAL;
    }
    from_pod_straight_to_node(skb, row, found, u32::from(second))
}

/// What matters here of a packet's headers.
struct Headers {
    v4: bool,
    protocol: u8,
    tcp_flags: u8,
    /// Bytes of the IP packet, or of the longest of those that it stands for.
    length: u32,
}

/// Checks all that may leave the packet to the general path before it changes anything. Behind that only what the
/// general path would lose as well: a packet that the kernel gives no tunnel.
#[inline(always)]
fn send(ctx: &TcContext, row: &EndpointRow, found: &mut FlowValue, second: bool) -> Option<i32> {
    let [(from, sender), (to, receiver)] = straight::ends(found, second);
    if from != END_LOCAL
        || !is_far(to)
        || sender.generation != row.generation
        || found.flags & FLOW_TRANSLATED != 0
        || !flow::is_live(found)
    {
        return None;
    }
    let way = Decision::node(receiver.id, remote::is_tunnel(to));
    let node = remote::row(way)?;
    if remote::end(way, node, row.epoch).generation != receiver.generation {
        return None;
    }
    let headers = match skb::peek_ethertype(ctx)? {
        ETHERTYPE_IPV4 => headers::<true>(ctx)?,
        ETHERTYPE_IPV6 => headers::<false>(ctx)?,
        _ => return None,
    };
    if headers.length > node.mtu {
        return None;
    }
    let mut number = 0;
    if way.is_overlay() {
        number = remote::number_of(row.network)?;
    } else if !remote::is_next_hop(headers.v4, node) || translate::hop_inline(ctx, headers.v4).is_err() {
        return None;
    }
    let later = flow::refresh(found);
    flow::advance(found, Step::new(headers.protocol, headers.tcp_flags), second, later);
    let endpoint = endpoint::of_own_interface(ctx);
    skb::clear_priority(ctx);
    if way.is_overlay() {
        count::add(endpoint, Direction::FromPod, Verdict::Tunnelled, ctx.len());
        return Some(remote::through_tunnel(ctx, number, node));
    }
    count::add(endpoint, Direction::FromPod, Verdict::Routed, ctx.len());
    Some(remote::to_next_hop(ctx, node))
}

/// Reads the headers again.
///
/// VERIFIER: it knows nothing here of what the caller found.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "lengths of headers are below 100")]
fn headers<const V4: bool>(ctx: &TcContext) -> Option<Headers> {
    const TCP_OFFSET: usize = 12;
    let header = if V4 { IPV4_LEN } else { IPV6_LEN };
    if !skb::holds(ctx, ETH_LEN + header + UDP_LEN) {
        return None;
    }
    let (protocol, total) = if V4 {
        (skb::peek::<u8>(ctx, ETH_LEN + 9), skb::peek::<u16>(ctx, ETH_LEN + 2))
    } else {
        (skb::peek::<u8>(ctx, ETH_LEN + 6), skb::peek::<u16>(ctx, ETH_LEN + 4))
    };
    let total = u32::from(u16::from_be(total));
    let (mut transport, mut tcp_flags) = (UDP_LEN as u32, 0);
    if protocol == TCP {
        if !skb::holds(ctx, ETH_LEN + header + TCP_LEN) {
            return None;
        }
        transport = u32::from(skb::peek::<u8>(ctx, ETH_LEN + header + TCP_OFFSET) >> 4) * 4;
        tcp_flags = skb::peek::<u8>(ctx, ETH_LEN + header + TCP_FLAGS);
    }
    let length = match skb::gso_size(ctx) {
        0 if V4 => total,
        0 => IPV6_LEN as u32 + total,
        segment => header as u32 + transport + segment,
    };
    Some(Headers {
        v4: V4,
        protocol,
        tcp_flags,
        length,
    })
}
