//! Decides about packets from a pod without a current flow: first packets, packets after a policy change, ICMP errors.

mod backend;
mod routed;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    address::{ADDRESS_OF_SERVICE, AddressValue, words},
    endpoint::{EndpointPolicy, EndpointRow, FLAG_HOST_ACCESS, is_older},
    flow::{END_LOCAL, END_OUTSIDE, END_REMOTE, END_ROUTED, END_STACK, FLOW_HAIRPIN, FLOW_NODE, FlowEnd, FlowValue},
};

use super::own_port;
use crate::{
    config,
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    masquerade,
    packet::{Class, Packet},
    policy, related, remote, service, shares, translate,
    work::Work,
};
use routed::{leads_outside, leads_to_stack, open_routed, open_uplink, route};

global! {
    /// Evaluates the packet and opens or renews its flow. Not on the path of most packets.
    from_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Open {
        return open(ctx, row, packet, work);
    }
    if let Some(found) = flow::lookup(row.network, packet) {
        let decision = review(row, packet, found, work);
        if decision.reason().is_some() || (config::is_dry_run() && !decision.is_none()) {
            return decision;
        }
        if !decision.is_none() {
            return Decision::RENEWED;
        }
    }
    open(ctx, row, packet, work)
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to. No decision
/// where the row has expired or belongs to an earlier owner.
#[inline(always)]
fn review(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let second = flow::is_second(packet);
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_LOCAL
        || sender.id != work.event.endpoint
        || is_older(sender.generation, row.incarnation)
        || !flow::lives(row.network, packet, found)
    {
        return Decision::NONE;
    }
    let Some(policy) = endpoint::policy(work.event.endpoint) else {
        return Decision::NONE;
    };
    match to {
        END_LOCAL => review_local(row, policy, packet, found, receiver, work),
        END_STACK if row.flags & FLAG_HOST_ACCESS != 0 => review_far(row, policy, packet, found, to, work),
        END_OUTSIDE => review_far(row, policy, packet, found, to, work),
        END_REMOTE | END_ROUTED => Decision::OTHER_NODE,
        _ => Decision::NONE,
    }
}

#[inline(always)]
fn review_local(
    row: &EndpointRow,
    policy: &EndpointPolicy,
    packet: &Packet,
    found: &mut FlowValue,
    receiver: FlowEnd,
    work: &mut Work,
) -> Decision {
    let Some(there) = endpoint::row(receiver.id) else {
        return Decision::NONE;
    };
    let generation = endpoint::generation(there);
    if there.network != row.network || !endpoint::is_ready(there) || is_older(receiver.generation, there.incarnation) {
        return Decision::NONE;
    }
    let Some(their_policy) = endpoint::policy(receiver.id) else {
        return Decision::NONE;
    };
    // Not before: without a decision the packet opens a flow of its own, untranslated.
    flow::translate_out_of_line(&mut work.to, found);
    work.record_translation();
    work.event.peer = receiver.id;
    if found.flags & FLOW_HAIRPIN == 0 {
        if found.is_reply(flow::is_second(packet)) {
            attempt!(policy::between(
                their_policy,
                policy,
                packet.reply_policy_port(),
                packet.v4,
                &mut work.event
            ));
        } else {
            attempt!(policy::between(
                policy,
                their_policy,
                work.to.policy_port(),
                packet.v4,
                &mut work.event
            ));
        }
    }
    flow::renew(row.network, packet, found, work.event.generation, generation);
    Decision::local(receiver.id)
}

#[inline(always)]
fn review_far(
    row: &EndpointRow,
    policy: &EndpointPolicy,
    packet: &Packet,
    found: &mut FlowValue,
    to: u8,
    work: &mut Work,
) -> Decision {
    flow::translate_out_of_line(&mut work.to, found);
    work.record_translation();
    if !found.is_reply(flow::is_second(packet)) {
        attempt!(policy::leaving(
            policy,
            row.network,
            work.to.destination,
            work.to.policy_port(),
            &mut work.event
        ));
        if to == END_OUTSIDE
            && !attempt!(masquerade::keeps_source(
                work.event.endpoint,
                packet.v4,
                &work.to.source,
                work.to.ports
            ))
        {
            // Nothing leaves with the former address any more: the flow begins anew.
            if !config::is_dry_run() {
                flow::remove(row.network, packet);
            }
            work.to = *packet;
            return Decision::NONE;
        }
    } else if found.flags & FLOW_NODE == 0 {
        let identity = policy::identity_at(row.network, packet.v4, &packet.destination);
        attempt!(policy::entering(
            policy,
            identity,
            packet.reply_policy_port(),
            &mut work.event
        ));
    }
    if !flow::refresh_other(row.network, packet, found) {
        work.to = *packet;
        return Decision::NONE;
    }
    flow::renew(row.network, packet, found, work.event.generation, work.epoch);
    if to == END_OUTSIDE {
        Decision::UPLINK
    } else {
        Decision::STACK
    }
}

/// Opens a flow.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let mut found = located(locate(row.network, &packet.destination));
    if is_service(found) && endpoint::is_plugin(row) {
        // Its plugin's datapath leads to the node's own proxy.
        found = None;
    }
    let mut translated = is_service(found);
    let mut way = 0;
    if found.is_none() {
        way = route(row.network, work);
        // An address outside of the cluster is a Service's at the Service's ports only.
        translated = leads_outside(way) && !endpoint::is_plugin(row) && service::has_port(row.network, packet, work);
    }
    if translated {
        attempt!(backend::translate(row, packet, work));
    } else if leads_to_stack(row, way) && !endpoint::is_plugin(row) {
        translated = attempt!(own_port::translate(row, packet, work));
    }
    if translated {
        if work.to.destination == packet.source {
            // The pod itself: it would not accept its own packet as a reply of the service.
            work.to.source = packet.destination;
            work.record_translation();
            return open_hairpin(ctx, packet, work);
        }
        work.record_translation();
        found = located(locate(row.network, &work.to.destination));
        if found.is_none() {
            way = route(row.network, work);
        }
    }
    let Some(found) = found else {
        return open_routed(ctx, row, packet, work, (way, translated));
    };
    open_local(ctx, row, packet, work, (found, translated))
}

/// Opens a flow to a local endpoint.
#[inline(always)]
fn open_local(
    ctx: &TcContext,
    row: &EndpointRow,
    packet: &Packet,
    work: &mut Work,
    (found, translated): (AddressValue, bool),
) -> Decision {
    if found.endpoint == work.event.endpoint {
        return Decision::drop(Verdict::SelfAddressed);
    }
    let Some(there) = endpoint::row(found.endpoint) else {
        // A backend that is itself a service address, or an endpoint that never existed.
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let generation = endpoint::generation(there);
    if !endpoint::is_current(there, row.network, found) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    let (Some(policy), Some(their_policy)) = (endpoint::policy(work.event.endpoint), endpoint::policy(found.endpoint))
    else {
        return Decision::drop(Verdict::DestinationNotReady);
    };
    work.event.peer = found.endpoint;
    attempt!(policy::between(
        policy,
        their_policy,
        work.to.policy_port(),
        packet.v4,
        &mut work.event
    ));
    work.new = NewFlow {
        source_kind: END_LOCAL,
        destination_kind: END_LOCAL,
        flags: 0,
        source: own_end(work),
        destination: FlowEnd {
            id: found.endpoint,
            generation,
        },
        translated,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, work, Decision::local(found.endpoint))
}

/// This endpoint as an end of a flow.
#[inline(always)]
pub(super) const fn own_end(work: &Work) -> FlowEnd {
    FlowEnd {
        id: work.event.endpoint,
        generation: work.event.generation,
    }
}

/// The holder of the address, as one word, 0 for none.
///
/// VERIFIER: not inlined, to save stack: Linux 6.1 rounds each frame up to 32 bytes.
#[inline(never)]
fn locate(network: u32, address: &[u32; 4]) -> u64 {
    match endpoint::by_address(network, *address) {
        Some(found) => u64::from(found.endpoint) | u64::from(found.incarnation) << 32,
        None => 0,
    }
}

/// The row in the word that [`locate`] returns; no row names endpoint 0.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "two halves")]
fn located(word: u64) -> Option<AddressValue> {
    (word != 0).then_some(AddressValue {
        endpoint: word as u32,
        incarnation: (word >> 32) as u32,
    })
}

#[inline(always)]
fn is_service(found: Option<AddressValue>) -> bool {
    matches!(found, Some(found) if found.endpoint == ADDRESS_OF_SERVICE)
}

/// Opens a flow of a pod to itself through a service; no policy applies.
#[inline(always)]
fn open_hairpin(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let endpoint = work.event.endpoint;
    work.event.peer = endpoint;
    work.new = NewFlow {
        source_kind: END_LOCAL,
        destination_kind: END_LOCAL,
        flags: FLOW_HAIRPIN,
        source: own_end(work),
        destination: own_end(work),
        translated: true,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, work, Decision::local(endpoint))
}

global! {
    /// Masquerades a flow that passed policy and leaves the node.
    from_pod_masquerade(packet: *const Packet as as_ref, work: *mut Work as as_mut) => open_uplink
}

/// Writes `work.new`, a flow that passed policy, reports it, translates its first packet.
#[inline(always)]
pub(super) fn begin(ctx: &TcContext, packet: &Packet, work: &mut Work, decision: Decision) -> Decision {
    let network = work.event.network;
    let Some(config) = config::get() else {
        return Decision::drop(Verdict::FlowTableFull);
    };
    attempt!(flow::create(config, network, packet, &work.to, &work.new));
    event::new_flow(ctx, config, &mut work.event, decision.verdict());
    if work.new.translated {
        attempt!(translate::apply(ctx, packet, &work.to));
    }
    decision
}

global! {
    /// Sends a pod's ICMP error to the destination of the pod's own packets of the quoted flow, so that a translation
    /// in the stack also sees it. It must be about a packet that this pod received, and go to that packet's sender.
    from_pod_icmp_error(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(related::quoted(ctx, packet, work));
    if work.inner.destination != packet.source {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    let Some(found) = flow::find_reply(row.network, &work.inner) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    let second = flow::is_reply_second(&work.inner);
    let decision = current(row, work, found, second);
    if decision.is_none() || !flow::is_live(found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    attempt!(related::translate(ctx, packet, work, found));
    // A reply to a packet for a port of the node leaves as such packets do.
    if decision == Decision::UPLINK && !found.is_reply(second) {
        return shares::way(work.event.endpoint, packet.v4, &words(found.source));
    }
    decision
}

/// The path of the flow's packets, if the state that it was evaluated on is unchanged.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn current(row: &EndpointRow, work: &Work, found: &FlowValue, second: bool) -> Decision {
    let decision = super::current(row, [work.event.generation, work.epoch], found, second);
    if decision == Decision::OTHER_NODE {
        let (kind, end) = found.receiver(second);
        return remote::current(kind, end, work.epoch);
    }
    decision
}
