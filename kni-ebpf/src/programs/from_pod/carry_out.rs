//! Carries out a decision: delivers, redirects, returns or drops the packet.

use aya_ebpf::{helpers::bpf_redirect_neigh, programs::TcContext};
use kni_common::{Direction, Verdict, event::FlowEvent};

use super::to_node;
use crate::{
    action::{DROP, pass, redirect_peer},
    config, count,
    decision::Decision,
    egress, endpoint,
    neighbour::mac_words,
    packet::Packet,
    reject,
    skb::{self, EthHeader},
    work::Place,
};

#[inline(always)]
pub(super) fn carry_out(ctx: &TcContext, place: &Place, decision: Decision) -> i32 {
    if let Some(destination) = decision.endpoint() {
        return deliver(ctx, place, destination);
    }
    if decision.number().is_some() {
        return to_node::send(ctx, place, decision);
    }
    let verdict = decision.verdict();
    count::forwarded(place.endpoint, Direction::FromPod, verdict, ctx.len());
    match decision {
        Decision::STACK => {
            skb::clear_priority(ctx);
            pass(place.endpoint)
        }
        Decision::REPLY => send_back(ctx),
        Decision::UPLINK => {
            skb::clear_priority(ctx);
            redirect_to_uplink()
        }
        _ => match decision.answering() {
            Some(node) => egress::send(ctx, node),
            None => DROP,
        },
    }
}

/// Drops the packet, or rejects it where the sender can learn the reason, so that clients fail at once.
#[inline(always)]
pub(super) fn refuse(ctx: &TcContext, packet: &Packet, event: &mut FlowEvent, reason: u16) -> i32 {
    let action = count::dropped(ctx, event, reason);
    if config::is_dry_run() {
        return action;
    }
    let has_answer = reason == Verdict::NoServicePort as u16
        || reason == Verdict::NoBackend as u16
        || reason == Verdict::TooBig as u16
        || reason == Verdict::TimeExceeded as u16;
    if has_answer && reject::reply_refusal(ctx.skb.skb, packet, u32::from(reason)) != 0 {
        return redirect_peer(skb::ifindex(ctx));
    }
    action
}

/// Sends the packet out of the node. The kernel looks up the next hop among the uplink's routes and its MAC address.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
fn redirect_to_uplink() -> i32 {
    let Some(config) = config::get() else {
        return DROP;
    };
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect_neigh(config.uplink, core::ptr::null_mut(), 0, 0) as i32 }
}

/// Writes the MAC addresses that the destination expects and sends the packet into its namespace.
#[inline(always)]
fn deliver(ctx: &TcContext, place: &Place, destination: u32) -> i32 {
    let length = ctx.len();
    // Both existed a moment ago, and neither goes away while the program runs.
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return DROP;
    };
    if endpoint::is_plugin(row) {
        count::forwarded(place.endpoint, Direction::FromPod, Verdict::PassedToStack, length);
        return pass(place.endpoint);
    }
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.to_pod.destination);
    eth.source = mac_words(&row.to_pod.source);
    count::forwarded(place.endpoint, Direction::FromPod, Verdict::Redirected, length);
    if endpoint::is_shaped(row) {
        return endpoint::redirect_through_host_end(ctx, endpoint::ifindex(destination));
    }
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    redirect_peer(endpoint::ifindex(destination))
}

/// Sends the rewritten packet back into the pod.
#[inline(always)]
fn send_back(ctx: &TcContext) -> i32 {
    const PACKET_HOST: u32 = 0;
    // The request was a broadcast or multicast, the reply is not. On failure the type stays, which receivers of ARP and
    // neighbour discovery accept too.
    let _kept_on_failure = ctx.change_type(PACKET_HOST);
    redirect_peer(skb::ifindex(ctx))
}
