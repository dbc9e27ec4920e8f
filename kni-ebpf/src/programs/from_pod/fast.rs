//! Forwards packets of established flows: the straight path in front of the general one.
//!
//! TCP and UDP without options, extension headers, fragments or tags, in the linear part of the packet, of an
//! untranslated flow that is confirmed on state that has not changed. Everything else is left to the general path,
//! which is the only one that drops. It would forward whatever this one forwards: the row of the flow exists only
//! because the general path let a packet with these addresses through, and only its sender's endpoint has the
//! generation in it.
//!
//! Between endpoints of the node here, to pods of other nodes in [`to_node`].

mod to_node;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    endpoint::{EndpointRow, FLAG_PLUGIN, FLAG_READY, FLAG_SHAPED},
    flow::{
        END_LOCAL, END_REMOTE, END_ROUTED, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND,
        FLOW_OPENED_BY_SECOND, FLOW_REPLIED, FLOW_RESET, FLOW_TRANSLATED, FlowValue,
    },
};

use crate::{
    action::redirect_peer,
    config, count, endpoint, flow,
    maps::{FLOWS4, FLOWS6},
    packet::{ACK, FIN, RST, SYN, TCP, UDP},
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
    straight::{self, IPV4_LEN, IPV6_LEN, TCP_FLAGS, TCP_LEN, UDP_LEN, is_second_by_halves},
    time,
};

/// The kinds and the flags of a row as one word.
const fn state(kind: u8, flags: u16) -> u32 {
    let [a, b] = flags.to_ne_bytes();
    u32::from_ne_bytes([kind, kind, a, b])
}

/// The bits that decide whether packets of a flow take this path.
const STATE_MASK: u32 = state(
    u8::MAX,
    FLOW_CONFIRMED | FLOW_TRANSLATED | FLOW_FIN_FIRST | FLOW_FIN_SECOND | FLOW_CLOSED | FLOW_RESET,
);
/// Between endpoints of this node, confirmed, not translated, not about to end.
const STATE: u32 = state(END_LOCAL, FLOW_CONFIRMED);

/// Forwards the packet, or leaves it as it is to the general path.
#[inline(always)]
pub(super) fn forward(ctx: &TcContext) -> Option<i32> {
    if config::is_dry_run() || skb::has_vlan_tag(ctx) {
        return None;
    }
    let endpoint = endpoint::of_own_interface(ctx);
    let row = endpoint::row(endpoint)?;
    if !endpoint::is_ready(row) || !skb::holds(ctx, ETH_LEN + IPV4_LEN + UDP_LEN) {
        return None;
    }
    let (expected_low, expected_high) = from_pod_words(row);
    if skb::peek::<u64>(ctx, 0) != expected_low || skb::peek::<u32>(ctx, 8) != expected_high {
        return None;
    }
    match skb::peek::<u16>(ctx, 12) {
        ETHERTYPE_IPV4 => ipv4(ctx, endpoint, row),
        ETHERTYPE_IPV6 => ipv6(ctx, endpoint, row),
        _ => None,
    }
}

#[inline(always)]
fn ipv4(ctx: &TcContext, endpoint: u32, row: &EndpointRow) -> Option<i32> {
    let plain = straight::is_plain4(ctx);
    let protocol = skb::peek::<u8>(ctx, ETH_LEN + 9);
    if !plain {
        return None;
    }
    let Some(transport) = transport::<{ ETH_LEN + IPV4_LEN }>(ctx, protocol) else {
        return change::<{ ETH_LEN + IPV4_LEN }>(ctx, protocol);
    };
    let total = usize::from(u16::from_be(skb::peek(ctx, ETH_LEN + 2)));
    if !straight::fits(ctx, total, IPV4_LEN + transport, ETH_LEN + total) {
        return None;
    }
    let (source, destination) = (skb::peek::<u32>(ctx, ETH_LEN + 12), skb::peek::<u32>(ctx, ETH_LEN + 16));
    let key = |ends, second| straight::key4(ctx, row.network, protocol, ends, second);
    // Each order of the ends has code of its own: one comparison decides.
    if source > destination {
        let found = FLOWS4.get_ptr_mut(key([destination, source], true))?;
        // SAFETY: as in `flow::find`.
        follow::<true>(ctx, endpoint, row, unsafe { &mut *found }, protocol)
    } else {
        let found = FLOWS4.get_ptr_mut(key([source, destination], false))?;
        // SAFETY: as in `flow::find`.
        follow::<false>(ctx, endpoint, row, unsafe { &mut *found }, protocol)
    }
}

#[inline(always)]
fn ipv6(ctx: &TcContext, endpoint: u32, row: &EndpointRow) -> Option<i32> {
    if !skb::holds(ctx, ETH_LEN + IPV6_LEN + UDP_LEN) || skb::peek::<u8>(ctx, ETH_LEN) >> 4 != 6 {
        return None;
    }
    let protocol = skb::peek::<u8>(ctx, ETH_LEN + 6);
    let Some(transport) = transport::<{ ETH_LEN + IPV6_LEN }>(ctx, protocol) else {
        return change::<{ ETH_LEN + IPV6_LEN }>(ctx, protocol);
    };
    let payload = usize::from(u16::from_be(skb::peek(ctx, ETH_LEN + 4)));
    if !straight::fits(ctx, payload, transport, ETH_LEN + IPV6_LEN + payload) {
        return None;
    }
    let [source, destination] = straight::halves6(ctx);
    let key = |ends, second| straight::key6(ctx, row.network, protocol, ends, second);
    // As in `ipv4`.
    if is_second_by_halves([source, destination]) {
        let found = FLOWS6.get_ptr_mut(key([destination, source], true).key())?;
        // SAFETY: as in `flow::find`.
        follow::<true>(ctx, endpoint, row, unsafe { &mut *found }, protocol)
    } else {
        let found = FLOWS6.get_ptr_mut(key([source, destination], false).key())?;
        // SAFETY: as in `flow::find`.
        follow::<false>(ctx, endpoint, row, unsafe { &mut *found }, protocol)
    }
}

/// Bytes of the transport header at an offset, of a protocol and with flags that change nothing.
#[inline(always)]
fn transport<const OFFSET: usize>(ctx: &TcContext, protocol: u8) -> Option<usize> {
    if protocol == UDP {
        return Some(UDP_LEN);
    }
    let changes_nothing = protocol == TCP
        && skb::holds(ctx, OFFSET + TCP_LEN)
        && skb::peek::<u8>(ctx, OFFSET + TCP_FLAGS) & (SYN | FIN | RST) == 0;
    changes_nothing.then_some(TCP_LEN)
}

/// Forwards a TCP packet that may change the state of its flow, where the flow leads to another node; but for a SYN
/// that opens one.
#[inline(always)]
fn change<const OFFSET: usize>(ctx: &TcContext, protocol: u8) -> Option<i32> {
    // Read again: kept from `transport`, the flags would cost the packets that change nothing another instruction.
    let ctx = &skb::reread(ctx);
    let continues = protocol == TCP
        && skb::holds(ctx, OFFSET + TCP_LEN)
        && skb::peek::<u8>(ctx, OFFSET + TCP_FLAGS) & (SYN | ACK) != SYN;
    if continues { to_node::find(ctx) } else { None }
}

/// Forwards a packet of the flow; `SECOND`: its sender is the second end.
#[inline(always)]
fn follow<const SECOND: bool>(
    ctx: &TcContext,
    endpoint: u32,
    row: &EndpointRow,
    found: &mut FlowValue,
    protocol: u8,
) -> Option<i32> {
    const { assert!(core::mem::offset_of!(FlowValue, first_kind) % 4 == 0) };
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "asserted above, in rows that are aligned to eight bytes"
    )]
    let state_word = (&raw const found.first_kind).cast::<u32>();
    // SAFETY: four bytes of the row, aligned.
    let now_is = unsafe { core::ptr::read_volatile(state_word) };
    if now_is & STATE_MASK != STATE && !changes_nothing(now_is, found, protocol, SECOND) {
        let far = is_far(if SECOND { found.first_kind } else { found.second_kind });
        return if far && found.flags & FLOW_TRANSLATED == 0 {
            to_node::forward(ctx, row, found, SECOND)
        } else {
            None
        };
    }
    let (mine, theirs) = if SECOND {
        (&raw const found.second, &raw const found.first)
    } else {
        (&raw const found.first, &raw const found.second)
    };
    // Copied once: another flow may take over the row at any moment, and the checks below are on the copies.
    // SAFETY: a field of the row.
    let mine = unsafe { core::ptr::read_volatile(mine) };
    // SAFETY: a field of the row.
    let theirs = unsafe { core::ptr::read_volatile(theirs) };
    if mine.generation != row.generation {
        return None;
    }
    let there = endpoint::row(theirs.id)?;
    if there.generation != theirs.generation
        || there.network != row.network
        || there.flags & (FLAG_READY | FLAG_PLUGIN | FLAG_SHAPED) != FLAG_READY
    {
        return None;
    }
    let now = time::now();
    let age = now.wrapping_sub(found.last_seen);
    if age != 0 {
        // Also where another CPU has written a newer time.
        if age > found.lifetime {
            return None;
        }
        found.last_seen = now;
    }
    let (low, high) = to_pod_words(there);
    skb::poke_words(ctx, low, high)?;
    let length = ctx.len();
    count::add(endpoint, Direction::FromPod, Verdict::Redirected, length);
    count::add(theirs.id, Direction::ToPod, Verdict::Redirected, length);
    Some(redirect_peer(endpoint::ifindex(theirs.id)))
}

/// Whether a packet of a flow that is not confirmed leaves it as it is: a further reply, a packet before the first
/// reply, and a datagram of the opener in the same window as the packet before.
#[inline(always)]
fn changes_nothing(now_is: u32, found: &FlowValue, protocol: u8, second: bool) -> bool {
    if now_is & STATE_MASK != state(END_LOCAL, 0) {
        return false;
    }
    let is_reply = (now_is & flag(FLOW_OPENED_BY_SECOND) != 0) != second;
    let replied = now_is & flag(FLOW_REPLIED) != 0;
    is_reply == replied || !is_reply && protocol == UDP && !flow::is_later(found)
}

/// Whether an end of this kind is a pod of another node.
#[inline(always)]
const fn is_far(kind: u8) -> bool {
    matches!(kind, END_REMOTE | END_ROUTED)
}

/// A flag in the word of [`state`].
const fn flag(flag: u16) -> u32 {
    let [a, b] = flag.to_ne_bytes();
    u32::from_ne_bytes([0, 0, a, b])
}

const _: () = assert!(
    core::mem::offset_of!(EndpointRow, from_pod) == 0
        && core::mem::offset_of!(EndpointRow, to_pod) == 12
        && core::mem::size_of::<EndpointRow>() == 64
);

/// The first eight and the next four bytes of a frame that the pod sends.
#[inline(always)]
fn from_pod_words(row: &EndpointRow) -> (u64, u32) {
    let Line {
        from_pod,
        from_pod_rest,
        ..
    } = line(row);
    (from_pod, from_pod_rest)
}

/// The first four and the next eight bytes of a frame that the pod receives.
#[inline(always)]
fn to_pod_words(row: &EndpointRow) -> (u32, u64) {
    let Line {
        to_pod, to_pod_rest, ..
    } = line(row);
    (to_pod, to_pod_rest)
}

/// The first 24 bytes of an endpoint's row as words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Line {
    from_pod: u64,
    from_pod_rest: u32,
    to_pod: u32,
    to_pod_rest: u64,
}

#[inline(always)]
fn line(row: &EndpointRow) -> Line {
    #[expect(clippy::cast_ptr_alignment, reason = "rows are aligned to cache lines")]
    let start = core::ptr::from_ref(row).cast::<Line>();
    // SAFETY: the first 24 bytes of the row, which is aligned to a cache line; any bytes are valid words.
    unsafe { *start }
}
