//! Decides about packets from a pod without a current flow: first packets, packets after a policy change, ICMP errors.

use aya_ebpf::{btf_maps::lpm_trie::Key, programs::TcContext};
use kni_common::{
    Verdict,
    address::{ADDRESS_OF_SERVICE, AddressValue, bytes, words},
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{
        FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_HAIRPIN, FLOW_NODE, FLOW_REPLY, FLOW_TO, FlowValue,
        KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK, KIND_UPLINK,
    },
    route::{ACTION_MASQUERADE, ACTION_SERVICE_RANGE, ACTION_STACK, FULL_PREFIX, RouteData},
};

use crate::{
    config,
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    maps::ROUTES,
    masquerade,
    packet::{Class, Packet},
    policy, related, service, translate,
    work::Work,
};

global! {
    /// Evaluates the packet and opens or renews its flow. Not on the path of most packets.
    from_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Open {
        return open(ctx, row, packet, work);
    }
    let found = match flow::lookup(row.network, packet) {
        Some(found) => Some(found),
        None => lost_reply(row, packet),
    };
    if let Some(found) = found {
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

/// A retransmitted SYN stays with the first one's backend: the reply may be in flight.
#[inline(always)]
fn keeps_backend(row: &EndpointRow, found: &FlowValue) -> bool {
    found.flags & (FLOW_TO | FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED) == FLOW_TO
        && found.source_generation >= row.incarnation
        && flow::is_live(found)
}

/// Recreates the reply's row of a flow whose original row still exists.
#[inline(always)]
fn lost_reply(row: &EndpointRow, packet: &Packet) -> Option<&'static mut FlowValue> {
    let original = flow::find_reply(row.network, packet)?;
    if original.flags & (FLOW_REPLY | FLOW_TO | FLOW_FROM) != 0
        || original.destination_generation < row.incarnation
        || !flow::is_live(original)
    {
        return None;
    }
    match original.kind {
        KIND_FROM_STACK => flow::repair(row.network, packet, original, KIND_TO_STACK, 0),
        KIND_LOCAL => {
            let client = endpoint::by_address(row.network, packet.destination)?;
            flow::repair(row.network, packet, original, KIND_LOCAL, client.endpoint)
        }
        _ => None,
    }
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to. No decision
/// where the row has expired or belongs to an earlier owner.
#[inline(always)]
fn review(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    if found.source_generation < row.incarnation || !flow::lives(row.network, packet, found) {
        return Decision::NONE;
    }
    match found.kind {
        KIND_LOCAL => review_local(row, packet, found, work),
        KIND_TO_STACK if row.flags & FLAG_HOST_ACCESS != 0 => review_stack(row, packet, found, work),
        KIND_UPLINK => review_stack(row, packet, found, work),
        _ => Decision::NONE,
    }
}

#[inline(always)]
fn review_local(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let Some(there) = endpoint::row(found.destination) else {
        return Decision::NONE;
    };
    let generation = endpoint::generation(there);
    if there.network != row.network || !endpoint::is_ready(there) || found.destination_generation < there.incarnation {
        return Decision::NONE;
    }
    // Not before: without a decision the packet opens a flow of its own, untranslated.
    flow::translate_out_of_line(&mut work.to, found);
    work.record_translation();
    work.event.peer = found.destination;
    if found.flags & FLOW_HAIRPIN == 0 {
        if found.flags & FLOW_REPLY == 0 {
            attempt!(policy::between(
                row,
                there,
                work.to.policy_port(),
                packet.v4,
                &mut work.event
            ));
        } else {
            attempt!(policy::between(
                there,
                row,
                packet.reply_policy_port(),
                packet.v4,
                &mut work.event
            ));
        }
    }
    flow::renew(row.network, packet, found, work.event.generation, generation);
    Decision::local(found.destination)
}

#[inline(always)]
fn review_stack(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    flow::translate_out_of_line(&mut work.to, found);
    work.record_translation();
    if found.flags & FLOW_REPLY == 0 {
        attempt!(policy::leaving(
            row,
            work.to.destination,
            work.to.policy_port(),
            &mut work.event
        ));
        if found.kind == KIND_UPLINK {
            attempt!(masquerade::keeps_source(work.event.endpoint, packet.v4, found));
        }
    } else if found.flags & FLOW_NODE == 0 {
        let identity = policy::identity_at(row.network, packet.v4, &packet.destination);
        attempt!(policy::entering(
            row,
            identity,
            packet.reply_policy_port(),
            &mut work.event
        ));
    }
    flow::renew(row.network, packet, found, work.event.generation, 0);
    if found.kind == KIND_UPLINK {
        Decision::UPLINK
    } else {
        Decision::STACK
    }
}

/// Opens a flow.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let mut found = locate(row.network, &packet.destination);
    if is_service(found) && endpoint::is_plugin(row) {
        // Its plugin's datapath leads to the node's own proxy.
        found = None;
    }
    if is_service(found) {
        attempt!(translate_to_backend(row, packet, work));
        if work.to.destination == packet.source {
            // The pod itself: it would not accept its own packet as a reply of the service.
            work.to.source = packet.destination;
            work.record_translation();
            return open_hairpin(ctx, packet, work);
        }
        work.record_translation();
        found = locate(row.network, &work.to.destination);
    }
    let Some(found) = found else {
        return open_routed(ctx, row, packet, work);
    };
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
    work.event.peer = found.endpoint;
    attempt!(policy::between(
        row,
        there,
        work.to.policy_port(),
        packet.v4,
        &mut work.event
    ));
    let new = NewFlow {
        kind: KIND_LOCAL,
        reply_kind: KIND_LOCAL,
        flags: 0,
        source: work.event.endpoint,
        source_generation: work.event.generation,
        destination: found.endpoint,
        destination_generation: generation,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::local(found.endpoint))
}

/// The holder of the address.
///
/// VERIFIER: not inlined, to save stack: Linux 6.1 rounds each frame up to 32 bytes.
#[inline(never)]
fn locate(network: u32, address: &[u32; 4]) -> Option<&'static AddressValue> {
    endpoint::by_address(network, *address)
}

#[inline(always)]
fn is_service(found: Option<&AddressValue>) -> bool {
    matches!(found, Some(found) if found.endpoint == ADDRESS_OF_SERVICE)
}

#[inline(always)]
fn translate_to_backend(row: &EndpointRow, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    if packet.class == Class::Open
        && let Some(found) = flow::lookup(row.network, packet)
        && keeps_backend(row, found)
    {
        work.event.service = service::at(row.network, packet).map_or(0, |service| service.service);
        work.to.destination = words(found.address);
        work.to.ports = found.ports.word();
        return Ok(());
    }
    service::choose(row.network, packet, work)
}

/// Opens a flow of a pod to itself through a service; no policy applies.
#[inline(always)]
fn open_hairpin(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let endpoint = work.event.endpoint;
    work.event.peer = endpoint;
    let new = NewFlow {
        kind: KIND_LOCAL,
        reply_kind: KIND_LOCAL,
        flags: FLOW_HAIRPIN,
        source: endpoint,
        source_generation: work.event.generation,
        destination: endpoint,
        destination_generation: work.event.generation,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::local(endpoint))
}

/// The action for packets of the network to this one's destination.
///
/// VERIFIER: not inlined, as [`locate`].
#[inline(never)]
fn route(network: u32, work: &Work) -> Option<u32> {
    let key = Key::new(
        FULL_PREFIX,
        RouteData {
            network: network.to_be_bytes(),
            address: bytes(work.to.destination),
        },
    );
    Some(ROUTES.get(&key)?.action)
}

/// Opens a flow to a destination that is not a local endpoint.
#[inline(always)]
fn open_routed(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let Some(action) = route(row.network, work) else {
        return Decision::drop(Verdict::NoRoute);
    };
    match action {
        ACTION_MASQUERADE => {}
        ACTION_STACK if row.flags & FLAG_HOST_ACCESS != 0 => {}
        ACTION_STACK => return Decision::drop(Verdict::NoRoute),
        ACTION_SERVICE_RANGE => return Decision::drop(Verdict::NoService),
        _ => return Decision::drop(Verdict::NoDestination),
    }
    attempt!(policy::leaving(
        row,
        work.to.destination,
        work.to.policy_port(),
        &mut work.event
    ));
    if action == ACTION_MASQUERADE {
        if !masquerade::is_possible(packet, work) {
            return Decision::drop(Verdict::MasqueradeProtocol);
        }
        return Decision::MASQUERADE;
    }
    let new = NewFlow {
        kind: KIND_TO_STACK,
        reply_kind: KIND_FROM_STACK,
        flags: 0,
        source: work.event.endpoint,
        source_generation: work.event.generation,
        destination: 0,
        destination_generation: 0,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::STACK)
}

global! {
    /// Masquerades a flow that passed policy and leaves the node.
    from_pod_masquerade(packet: *const Packet as as_ref, work: *mut Work as as_mut) => open_uplink
}

#[inline(always)]
fn open_uplink(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    if !masquerade::reuse(packet, work) {
        attempt!(flow::take_share(work.event.endpoint));
        attempt!(masquerade::claim(ctx, packet, work));
    }
    attempt!(masquerade::open(packet, work));
    work.record_translation();
    event::new_flow(ctx, &mut work.event, Verdict::Masqueraded);
    if !config::is_dry_run() {
        attempt!(masquerade::prepare_egress(ctx, packet.v4));
        attempt!(translate::apply(ctx, packet, &work.to));
    }
    Decision::UPLINK
}

/// Writes a flow that passed policy, reports it, translates its first packet.
#[inline(always)]
fn begin(ctx: &TcContext, packet: &Packet, new: &NewFlow, work: &mut Work, decision: Decision) -> Decision {
    let network = work.event.network;
    attempt!(flow::create(network, packet, &work.to, new));
    event::new_flow(ctx, &mut work.event, decision.verdict());
    let translated = packet.destination != work.to.destination || packet.ports != work.to.ports;
    if translated && !config::is_dry_run() {
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
    let decision = super::current(row, work.event.generation, found);
    if decision.is_none() || !flow::is_live(found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    attempt!(related::translate::<false>(ctx, packet, work, found));
    decision
}
