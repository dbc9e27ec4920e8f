//! Decides about packets that other nodes send to pods of this one, whichever way they came, and delivers them.

mod errors;
mod port;
pub(super) mod straight;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Verdict,
    endpoint::{EndpointPolicy, is_older},
    flow::{END_LOCAL, FLOW_TRANSLATED, FlowEnd, FlowValue},
    route::{ACTION_UNREACHABLE, ROUTE_NODE},
    uplink::OUTSIDE,
};

use crate::{
    action::DROP,
    config, count,
    decision::{Decision, attempt},
    delivery, endpoint, event, explanation,
    flow::{self, NewFlow},
    fragment,
    global::global,
    packet::{Class, Packet},
    policy, remote, skb, translate,
    work::{self, Place, Work},
};

/// The origin of a packet.
///
/// VERIFIER: without pointers, which a global function could not follow, and without padding, which is not initialised.
#[repr(C)]
pub(super) struct Arrival {
    /// The node that has the sender, and the way there.
    pub(super) way: Decision,
    /// The sender as an end of a flow.
    pub(super) sender: FlowEnd,
    /// The receiver's port, in network byte order in the lower half, where the packet is for a port of this node that
    /// leads to it; else 0.
    pub(super) port: u32,
}

impl Arrival {
    /// Nothing is known yet.
    #[inline(always)]
    pub(super) const fn unknown() -> Self {
        Self {
            way: Decision::NONE,
            sender: FlowEnd { id: 0, generation: 0 },
            port: 0,
        }
    }
}

/// Decides, counts and carries out. `place` is of the receiver.
#[inline(always)]
pub(super) fn deliver(ctx: &TcContext, place: &Place, packet: &Packet, arrival: &Arrival) -> i32 {
    let mut decision = established(ctx, place, packet, arrival);
    let is_known = !decision.is_none() && decision.reason().is_none();
    if !is_known || config::is_dry_run() {
        // One row of an array: there is always one.
        let Some(work) = work::begin(place, packet) else {
            return DROP;
        };
        if decision.is_none() {
            decision = slow(ctx, place, packet, arrival, work);
        }
        if let Some(reason) = decision.reason() {
            return count::dropped(ctx, &mut work.event, reason);
        }
        if config::is_dry_run() {
            if is_known {
                explanation::follow(place.network, packet, work);
            }
            explanation::record(&mut work.event, Verdict::Redirected as u16, ctx.len());
            return DROP;
        }
    }
    if packet.is_first() {
        let network = if arrival.way.is_overlay() {
            place.network
        } else {
            OUTSIDE
        };
        fragment::record(network, place.direction, packet);
    }
    accept(ctx);
    delivery::deliver(ctx, place.endpoint)
}

/// Publishes that the node's stack gets the packet, as the outcome of a dry run.
#[inline(always)]
pub(super) fn explain(ctx: &TcContext, place: &Place, packet: &Packet) -> i32 {
    if let Some(work) = work::begin(place, packet) {
        explanation::record(&mut work.event, Verdict::PassedToStack as u16, ctx.len());
    }
    DROP
}

/// Carries out what the straight path found.
#[inline(always)]
pub(super) fn hand_over(ctx: &TcContext, place: &Place) -> i32 {
    accept(ctx);
    delivery::deliver(ctx, place.endpoint)
}

/// Takes the packet for this host. Its MAC address was that of the sender's gateway: the kernel takes it for another
/// host's.
#[inline(always)]
pub(super) fn accept(ctx: &TcContext) {
    const PACKET_HOST: u32 = 0;
    let _kept_on_failure = ctx.change_type(PACKET_HOST);
    skb::clear_priority(ctx);
}

/// Decides about packets without a current flow.
#[inline(always)]
fn slow(ctx: &TcContext, place: &Place, packet: &Packet, arrival: &Arrival, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(errors::from_node_icmp_error(skb, arrival, packet, work));
    }
    let decision = Decision::from_word(from_node_open(skb, arrival, packet, work));
    if decision == Decision::RENEWED {
        return established(ctx, place, packet, arrival).or_drop(Verdict::DestinationNotReady);
    }
    if decision.is_none() {
        return Decision::from_word(port::from_node_open_port(skb, arrival, packet, work));
    }
    decision
}

/// Delivers the packet if its flow exists and the state that it was evaluated on is unchanged.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn established(ctx: &TcContext, place: &Place, packet: &Packet, arrival: &Arrival) -> Decision {
    // A SYN is always evaluated.
    if packet.class != Class::Flow {
        return Decision::NONE;
    }
    let Some(found) = flow::lookup(place.network, packet) else {
        return Decision::NONE;
    };
    let receiver = FlowEnd {
        id: place.endpoint,
        generation: place.generation,
    };
    if !is_current(found, flow::is_second(packet), arrival, receiver) || !flow::is_live(found) {
        return Decision::NONE;
    }
    let later = flow::refresh(found);
    if later {
        flow::refresh_other(place.network, packet, found);
    }
    if found.flags & FLOW_TRANSLATED != 0 {
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found, later) {
        flow::flow_change_state(place.network, packet, found, u32::from(later));
    }
    Decision::local(place.endpoint)
}

/// Whether packets of the flow come from that sender by that way to the receiver, and the state that it was evaluated
/// on is unchanged. `second`: the packet's sender is the second end.
#[inline(always)]
fn is_current(found: &FlowValue, second: bool, arrival: &Arrival, receiver: FlowEnd) -> bool {
    // Copied once: another flow may take over the row at any moment.
    let ((from, sender), (to, own)) = (found.sender(second), found.receiver(second));
    from == remote::kind(arrival.way)
        && to == END_LOCAL
        && sender.id == arrival.sender.id
        && sender.generation == arrival.sender.generation
        && own.id == receiver.id
        && own.generation == receiver.generation
}

global! {
    /// Evaluates the packet and opens or renews its flow. No decision about one without a flow for a port of the node.
    from_node_open(arrival: *const Arrival as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, arrival: &Arrival, packet: &Packet, work: &mut Work) -> Decision {
    let Some(policy) = endpoint::policy(work.event.endpoint) else {
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let network = work.event.network;
    if packet.class == Class::Flow
        && let Some(found) = flow::lookup(network, packet)
        && is_of_flow(packet, found, arrival, work)
    {
        flow::translate_out_of_line(&mut work.to, found);
        work.record_translation();
        if found.is_reply(flow::is_second(packet)) {
            attempt!(may_ask(policy, packet, work));
        } else {
            let identity = policy::external_identity(network, &packet.source);
            attempt!(policy::entering(
                policy,
                identity,
                work.to.policy_port(),
                &mut work.event
            ));
        }
        flow::renew(network, packet, found, arrival.sender.generation, work.event.generation);
        if config::is_dry_run() {
            return Decision::local(work.event.endpoint);
        }
        return Decision::RENEWED;
    }
    if arrival.port != 0 {
        return Decision::NONE;
    }
    open(ctx, arrival, policy, packet, work)
}

/// Whether the receiver may send to the sender of a reply, as it was asked when it sent to it: nodes are destinations
/// outside of the pod networks.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn may_ask(policy: &EndpointPolicy, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let (network, port) = (work.event.network, packet.reply_policy_port());
    let is_node = remote::route(network, &packet.source).is_some_and(|route| route.flags & ROUTE_NODE != 0);
    if is_node {
        policy::leaving(policy, network, packet.source, port, &mut work.event)
    } else {
        policy::to_node(policy, network, &packet.source, port, &mut work.event)
    }
}

/// Opens a flow to the pod itself.
#[inline(always)]
fn open(ctx: &TcContext, arrival: &Arrival, policy: &EndpointPolicy, packet: &Packet, work: &mut Work) -> Decision {
    let network = work.event.network;
    let identity = policy::external_identity(network, &packet.source);
    attempt!(policy::entering(
        policy,
        identity,
        packet.policy_port(),
        &mut work.event
    ));
    let Some(config) = config::get() else {
        return Decision::drop(Verdict::FlowTableFull);
    };
    work.new = NewFlow {
        source_kind: remote::kind(arrival.way),
        destination_kind: END_LOCAL,
        flags: 0,
        source: arrival.sender,
        destination: FlowEnd {
            id: work.event.endpoint,
            generation: work.event.generation,
        },
        translated: false,
        reply_network: network,
        // The replies of a connection to a port of the node are those of one to the pod itself.
        refuse_taken: packet.class == Class::Open,
    };
    attempt!(flow::create_untranslated(config, network, packet, &work.new));
    event::new_flow(ctx, config, &mut work.event, Verdict::Redirected);
    Decision::local(work.event.endpoint)
}

/// Whether the row, of packets of this sender to this receiver, is live and only out of date.
#[inline(always)]
fn is_of_flow(packet: &Packet, found: &FlowValue, arrival: &Arrival, work: &Work) -> bool {
    let second = flow::is_second(packet);
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    from == remote::kind(arrival.way)
        && to == END_LOCAL
        && sender.id == arrival.sender.id
        && receiver.id == work.event.endpoint
        && endpoint::row(receiver.id).is_some_and(|own| !is_older(receiver.generation, own.incarnation))
        && flow::lives(work.event.network, packet, found)
}

/// Delivers a packet that came without a tunnel from a pod of another node, or from a router on the way to one, and
/// returns the action. `None` for packets that are no pod's, or from no pod network.
#[inline(always)]
pub(super) fn from_uplink(ctx: &TcContext, place: &mut Place, packet: &Packet) -> Option<i32> {
    if packet.class == Class::IcmpError {
        let decision = errors::on_the_way(ctx, place, packet);
        if !decision.is_none() {
            return Some(errors::carry_out(ctx, place, packet, decision));
        }
    }
    let mut arrival = Arrival::unknown();
    match from_node_by_uplink(ctx.skb.skb, place, packet, &raw mut arrival) {
        ELSEWHERE => None,
        ARRIVED => Some(deliver(ctx, place, packet, &arrival)),
        FOLLOWED => Some(hand_over(ctx, place)),
        reason => Some(refuse(ctx, place, packet, reason)),
    }
}

/// Drops a packet; `reason` is the code of a verdict.
#[inline(always)]
pub(super) fn refuse(ctx: &TcContext, place: &Place, packet: &Packet, reason: u32) -> i32 {
    match work::begin(place, packet) {
        #[expect(clippy::cast_possible_truncation, reason = "the code of a verdict")]
        Some(work) => count::dropped(ctx, &mut work.event, reason as u16),
        None => DROP,
    }
}

/// The results of functions that find an arrival, below all codes of drops.
pub(super) const ARRIVED: u32 = 1;
/// The packet is of a current flow, by [`straight`].
pub(super) const FOLLOWED: u32 = 3;
const ELSEWHERE: u32 = 0;

/// Finds the receiver and the sender's node of a packet from the uplink. Returns [`ARRIVED`], [`FOLLOWED`],
/// [`ELSEWHERE`], or the code of the reason to drop it.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_node_by_uplink(
    skb: *mut __sk_buff,
    place: *mut Place,
    packet: *const Packet,
    arrival: *mut Arrival,
) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_mut() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let arrival = unsafe { arrival.as_mut() };
    let (Some(place), Some(packet), Some(arrival)) = (place, packet, arrival) else {
        return Verdict::Truncated as u32;
    };
    let Some(found) = endpoint::by_address(OUTSIDE, packet.destination) else {
        return ELSEWHERE;
    };
    let Some(row) = endpoint::row(found.endpoint) else {
        return ELSEWHERE;
    };
    let network = row.network;
    let generation = endpoint::generation(row);
    let epoch = endpoint::epoch(row);
    place.network = network;
    let ifindex = skb::ifindex(&TcContext::new(skb));
    if straight::follow(place, packet, |node| node.ifindex == ifindex) {
        return FOLLOWED;
    }
    place.network = OUTSIDE;
    let Some(route) = remote::route(network, &packet.source) else {
        return ELSEWHERE;
    };
    let way = remote::way(route);
    if way.is_none() && route.action != ACTION_UNREACHABLE {
        return ELSEWHERE;
    }
    place.endpoint = found.endpoint;
    place.network = network;
    place.generation = generation;
    place.epoch = epoch;
    if !endpoint::is_current(row, network, found) {
        return Verdict::DestinationNotReady as u32;
    }
    // Otherwise an address of the network that no other node has.
    let Some(way) = way else {
        return Verdict::OwnerUnknown as u32;
    };
    match remote::row(way) {
        // It came by the interface that leads to its node.
        Some(node) if !way.is_overlay() && node.ifindex == ifindex => {
            arrival.way = way;
            arrival.sender = remote::end(way, node, epoch);
            ARRIVED
        }
        _ => Verdict::ForeignNode as u32,
    }
}
