//! Decides about packets from a pod to one of another node: first packets, and packets after a change.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    endpoint::{EndpointPolicy, EndpointRow, is_older},
    flow::{END_LOCAL, END_REMOTE, END_ROUTED, FLOW_TRANSLATED, is_second},
    route::ROUTE_NODE,
};

use super::open::{begin, own_end};
use crate::{
    config, count,
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    fragment,
    global::global,
    packet::{Class, Packet},
    policy, remote, skb, translate,
    work::{Place, Work},
};

/// Sends the packet, counted, to its node.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub(super) fn send(ctx: &TcContext, place: &Place, way: Decision) -> i32 {
    count::forwarded(place.endpoint, Direction::FromPod, way.verdict(), ctx.len());
    skb::clear_priority(ctx);
    remote::send(ctx, place.network, way)
}

/// Evaluates the packet, which may have been translated, and opens or renews its flow.
#[inline(always)]
pub(super) fn decide(ctx: &TcContext, row: &EndpointRow, place: &Place, packet: &Packet, work: &mut Work) -> Decision {
    let mut decision = Decision::NONE;
    // A SYN is always evaluated as the first packet of a flow.
    if packet.class != Class::Open {
        decision = Decision::from_word(from_pod_review_node(ctx.skb.skb, row, packet, work));
    }
    if decision == Decision::RENEWED {
        // A further change in between: the next packet is evaluated again.
        return follow(ctx, place, packet).or_drop(Verdict::DestinationNotReady);
    }
    if decision.is_none() {
        return Decision::from_word(from_pod_to_node(ctx.skb.skb, row, packet, work));
    }
    decision
}

/// The way of a packet of a current flow to another node. No decision where the state that the flow was evaluated on
/// has changed.
#[inline(always)]
pub(super) fn follow(ctx: &TcContext, place: &Place, packet: &Packet) -> Decision {
    Decision::from_word(from_pod_follow_node(ctx.skb.skb, place, packet))
}

/// [`follow`].
///
/// VERIFIER: a global function, see `global`, which looks up the flow again: the paths within the node stay as they
/// are.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_pod_follow_node(skb: *mut __sk_buff, place: *const Place, packet: *const Packet) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_ref() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_ref() };
    let (Some(place), Some(packet)) = (place, packet) else {
        return Decision::NONE.word();
    };
    current(&TcContext::new(skb), place, packet).word()
}

#[inline(always)]
fn current(ctx: &TcContext, place: &Place, packet: &Packet) -> Decision {
    // Without calls where that is possible: they are a large part of the cost.
    let Some(found) = flow::find(place.network, packet) else {
        return Decision::NONE;
    };
    let second = is_second(packet.source, packet.destination);
    // Copied once: another flow may take over the row at any moment. The checks below are on the copies.
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_LOCAL
        || !matches!(to, END_REMOTE | END_ROUTED)
        || sender.generation != place.generation
        || !flow::is_live(found)
    {
        return Decision::NONE;
    }
    let way = Decision::node(receiver.id, to == END_REMOTE);
    let Some(node) = remote::row(way) else {
        return Decision::NONE;
    };
    if remote::end(way, node, place.epoch).generation != receiver.generation {
        return Decision::NONE;
    }
    let later = flow::refresh(found);
    if later {
        flow::refresh_other(place.network, packet, found);
    }
    attempt!(remote::check(ctx, packet, way, node));
    if config::is_dry_run() {
        return way;
    }
    if found.flags & FLOW_TRANSLATED != 0 {
        attempt!(translate::follow(ctx, packet, found));
    }
    if packet.is_first() {
        fragment::record(place.network, Direction::FromPod, packet);
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found, later) {
        flow::flow_change_state(place.network, packet, found, u32::from(later));
    }
    way
}

global! {
    /// Re-evaluates the flow of the packet, if it has one to another node. Apart from the following, for the stack of a
    /// chain of calls.
    from_pod_review_node(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => review
}

global! {
    /// Evaluates the packet and opens its flow.
    from_pod_to_node(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => open
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to. No decision
/// where the row has expired or belongs to an earlier owner, or the pod is on another node by now.
#[inline(always)]
fn review(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let (Some(policy), Some(found)) = (endpoint::policy(work.event.endpoint), flow::lookup(row.network, packet)) else {
        return Decision::NONE;
    };
    let second = flow::is_second(packet);
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_LOCAL
        || !matches!(to, END_REMOTE | END_ROUTED)
        || sender.id != work.event.endpoint
        || is_older(sender.generation, row.incarnation)
        || !flow::lives(row.network, packet, found)
    {
        return Decision::NONE;
    }
    flow::translate_out_of_line(&mut work.to, found);
    work.route.action = 0;
    let Some((way, to_stack)) = find(row.network, work) else {
        work.to = *packet;
        work.route.action = 0;
        return Decision::NONE;
    };
    if remote::kind(way) != to || way.number() != Some(receiver.id) {
        work.to = *packet;
        work.route.action = 0;
        return Decision::NONE;
    }
    let Some(node) = remote::row(way) else {
        return Decision::drop(Verdict::NoNode);
    };
    let end = remote::end(way, node, work.epoch);
    work.record_translation();
    if found.is_reply(second) {
        let identity = policy::external_identity(row.network, &packet.destination);
        attempt!(policy::entering(
            policy,
            identity,
            packet.reply_policy_port(),
            &mut work.event
        ));
    } else {
        attempt!(check(policy, row.network, work, to_stack));
    }
    flow::renew(row.network, packet, found, work.event.generation, end.generation);
    if config::is_dry_run() {
        // Otherwise checked when the renewed flow is followed.
        attempt!(remote::prepare(ctx, packet, way));
        return way;
    }
    Decision::RENEWED
}

/// The way to the destination on another node, and whether that is the node itself. The route that the packet was found
/// to take there is not looked up twice.
#[inline(always)]
fn find(network: u32, work: &mut Work) -> Option<(Decision, bool)> {
    if work.route.action == 0 {
        work.route = *remote::route(network, &work.to.destination)?;
    }
    Some((remote::way(&work.route)?, work.route.flags & ROUTE_NODE != 0))
}

/// Whether the sender may send to the destination. Nodes are destinations outside of the pod networks.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn check(policy: &EndpointPolicy, network: u32, work: &mut Work, to_stack: bool) -> Result<(), Verdict> {
    let port = work.to.policy_port();
    if to_stack {
        policy::leaving(policy, network, work.to.destination, port, &mut work.event)
    } else {
        policy::to_node(policy, network, &work.to.destination, port, &mut work.event)
    }
}

/// Opens a flow.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let Some((way, to_stack)) = find(row.network, work) else {
        // The pod of a flow is no longer on another node: the next packet finds no flow.
        if !config::is_dry_run() {
            flow::remove(row.network, packet);
        }
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let Some(node) = remote::row(way) else {
        return Decision::drop(Verdict::NoNode);
    };
    let end = remote::end(way, node, work.epoch);
    let decision = permit(ctx, packet, work, (way, to_stack));
    if !decision.is_none() {
        return decision;
    }
    work.new = NewFlow {
        source_kind: END_LOCAL,
        destination_kind: remote::kind(way),
        flags: 0,
        source: own_end(work),
        destination: end,
        // Only packets to services are.
        translated: work.event.service != 0,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, work, way)
}

/// No decision where the packet may go.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn permit(ctx: &TcContext, packet: &Packet, work: &mut Work, (way, to_stack): (Decision, bool)) -> Decision {
    let Some(policy) = endpoint::policy(work.event.endpoint) else {
        return Decision::drop(Verdict::EndpointNotReady);
    };
    attempt!(check(policy, work.event.network, work, to_stack));
    // Before the flow is written: a packet that goes no further opens none.
    attempt!(remote::prepare(ctx, packet, way));
    Decision::NONE
}
