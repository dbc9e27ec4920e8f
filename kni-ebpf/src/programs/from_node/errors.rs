//! Matches ICMP errors to flows with pods of other nodes: those of these pods, and those of routers on the way to them.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    flow::{END_LOCAL, END_ROUTED, FlowEnd},
    uplink::OUTSIDE,
};

use super::{Arrival, hand_over, is_current, refuse};
use crate::{
    decision::{Decision, attempt},
    endpoint, flow, fragment,
    global::global,
    packet::Packet,
    related, remote, skb,
    work::{self, Place, Work},
};

global! {
    /// Delivers an ICMP error of a pod of another node about a packet that the receiver sent to it.
    from_node_icmp_error(arrival: *const Arrival as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, arrival: &Arrival, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(related::quoted(ctx, packet, work));
    let receiver = FlowEnd {
        id: work.event.endpoint,
        generation: work.event.generation,
    };
    // The row of the replies: it has the translation.
    let Some(found) = flow::find_reply(work.event.network, &work.inner) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    let second = flow::is_reply_second(&work.inner);
    if !is_current(found, second, arrival, receiver) || !flow::is_live(found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    attempt!(related::translate(ctx, packet, work, found));
    Decision::local(receiver.id)
}

/// Finds the pod that an ICMP error from the uplink is for: one whose packet, which the error quotes, is of a current
/// flow to another node without a tunnel. Any router on the way may send it, with whichever address it has, so that
/// neither the source's route nor its node matter. No decision about other errors.
#[inline(always)]
pub(super) fn on_the_way(ctx: &TcContext, place: &mut Place, packet: &Packet) -> Decision {
    let skb = ctx.skb.skb;
    // One row of an array: there is always one.
    let Some(work) = work::begin(place, packet) else {
        return Decision::NONE;
    };
    let decision = Decision::from_word(from_node_error_on_the_way(skb, place, packet, work));
    if decision.is_none() {
        return decision;
    }
    Decision::from_word(from_node_translate_error(skb, place, packet, work))
}

/// Delivers the error, or drops it. `place` is of the receiver.
#[inline(always)]
pub(super) fn carry_out(ctx: &TcContext, place: &Place, packet: &Packet, decision: Decision) -> i32 {
    if let Some(reason) = decision.reason() {
        return refuse(ctx, place, packet, u32::from(reason));
    }
    if packet.is_first() {
        fragment::record(OUTSIDE, place.direction, packet);
    }
    hand_over(ctx, place)
}

global! {
    /// The endpoint of [`on_the_way`], also in `place`.
    from_node_error_on_the_way(place: *mut Place as as_mut, packet: *const Packet as as_ref, work: *mut Work as as_mut) => about_routed
}

#[inline(always)]
fn about_routed(ctx: &TcContext, place: &mut Place, packet: &Packet, work: &mut Work) -> Decision {
    let Some(found) = endpoint::by_address(OUTSIDE, packet.destination) else {
        return Decision::NONE;
    };
    let Some(row) = endpoint::row(found.endpoint) else {
        return Decision::NONE;
    };
    let network = row.network;
    let (generation, epoch) = (endpoint::generation(row), endpoint::epoch(row));
    if !endpoint::is_current(row, network, found) || related::quoted(ctx, packet, work).is_err() {
        return Decision::NONE;
    }
    let Some(replies) = flow::find_reply(network, &work.inner) else {
        return Decision::NONE;
    };
    let second = flow::is_reply_second(&work.inner);
    // Copied once: another flow may take over the row at any moment.
    let ((from, sender), (to, own)) = (replies.sender(second), replies.receiver(second));
    if from != END_ROUTED
        || to != END_LOCAL
        || own.id != found.endpoint
        || own.generation != generation
        || !flow::is_live(replies)
        || !leads_by(sender, epoch, skb::ifindex(ctx))
    {
        return Decision::NONE;
    }
    place.endpoint = found.endpoint;
    place.network = network;
    place.generation = generation;
    place.epoch = epoch;
    Decision::local(found.endpoint)
}

global! {
    /// Translates the error for the endpoint in `place`, as its flow is.
    ///
    /// VERIFIER: apart from [`about_routed`], to save stack: Linux 6.1 rounds each frame up to 32 bytes.
    from_node_translate_error(place: *const Place as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => translate_error
}

#[inline(always)]
fn translate_error(ctx: &TcContext, place: &Place, packet: &Packet, work: &mut Work) -> Decision {
    // The row of the replies: it has the translation.
    let Some(replies) = flow::find_reply(place.network, &work.inner) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    attempt!(related::translate(ctx, packet, work, replies));
    Decision::local(place.endpoint)
}

/// Whether the interface leads to the node at the end of the flow, and nothing that is known about it has changed since
/// the flow was evaluated.
#[inline(always)]
fn leads_by(end: FlowEnd, epoch: u32, ifindex: u32) -> bool {
    let way = Decision::node(end.id, false);
    remote::row(way)
        .is_some_and(|node| node.ifindex == ifindex && remote::end(way, node, epoch).generation == end.generation)
}
