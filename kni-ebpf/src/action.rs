//! The actions that TC programs return.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::{bpf_redirect, bpf_redirect_peer},
    programs::TcContext,
};
use kni_common::endpoint::FLAG_HANDOVER;

use crate::{endpoint, skb};

/// Drops the packet.
pub(crate) const DROP: i32 = TC_ACT_SHOT;

/// Continues with the next program of the hook (other tools' programs keep working), then with the stack. Equal to
/// `TCX_NEXT`.
pub(crate) const NEXT: i32 = TC_ACT_UNSPEC;

/// Passes a packet of an endpoint to the stack, or out of it, through the programs of other tools. During a handover it
/// bypasses them, because the other copy of our programs is one of them.
#[inline(always)]
pub(crate) fn pass(endpoint: u32) -> i32 {
    match endpoint::row(endpoint) {
        Some(row) if row.flags & FLAG_HANDOVER != 0 => TC_ACT_OK,
        _ => NEXT,
    }
}

/// Sends the packet out of the interface that it came from.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
pub(crate) fn redirect_back(ctx: &TcContext) -> i32 {
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect(skb::ifindex(ctx), 0) as i32 }
}

/// Redirects to the pod end of a host interface: `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` where the kernel refuses.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
pub(crate) fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}
