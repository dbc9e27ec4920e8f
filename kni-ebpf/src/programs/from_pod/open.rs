//! Packets of no current flow: first packets, packets after a change of policy, ICMP errors.

use aya_ebpf::{btf_maps::lpm_trie::Key, programs::TcContext};
use kni_common::{
    Verdict,
    address::{ADDRESS_OF_SERVICE, AddressValue, bytes, words},
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{
        FLOW_REPLY, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_HAIRPIN, FLOW_NODE, FLOW_TO, FlowValue,
        KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK, KIND_UPLINK,
    },
    route::{ACTION_MASQUERADE, ACTION_SERVICE_RANGE, ACTION_STACK, FULL_PREFIX, RouteData},
};

use crate::{
    config, count,
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    global::global,
    maps::ROUTES,
    masquerade,
    packet::{Class, Packet},
    policy, related, service,
    story::{self, Work},
    translate,
};

global! {
    /// Judges the packet and opens or renews its flow. Not on the path of most packets.
    from_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Open {
        return open(ctx, row, packet, work);
    }
    let found = match flow::lookup(row.network, packet) {
        Some(found) => Some(found),
        None => lost_answer(row, packet),
    };
    if let Some(found) = found {
        let decision = revive(row, packet, found, work);
        if decision.reason().is_some() || (config::is_dry_run() && !decision.is_none()) {
            return decision;
        }
        if !decision.is_none() {
            return Decision::AGAIN;
        }
    }
    open(ctx, row, packet, work)
}

/// A repeated SYN stays with the backend that the first one went to: its answer may be on its way.
#[inline(always)]
fn keeps_backend(row: &EndpointRow, found: &FlowValue) -> bool {
    found.flags & (FLOW_TO | FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED) == FLOW_TO
        && found.source_generation >= row.incarnation
        && flow::is_live(found)
}

/// The answer's row of a flow whose original row says that there must be one.
#[inline(always)]
fn lost_answer(row: &EndpointRow, packet: &Packet) -> Option<&'static mut FlowValue> {
    let original = flow::find_answer(row.network, packet)?;
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

/// Judges a flow again after a change: the direction that was asked for, whichever the packet belongs to. No decision
/// where the row is worth nothing.
#[inline(always)]
fn revive(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    if found.source_generation < row.incarnation || !flow::lives(row.network, packet, found) {
        return Decision::NONE;
    }
    match found.kind {
        KIND_LOCAL => revive_local(row, packet, found, work),
        KIND_TO_STACK if row.flags & FLAG_HOST_ACCESS != 0 => revive_stack(row, packet, found, work),
        KIND_UPLINK => revive_stack(row, packet, found, work),
        _ => Decision::NONE,
    }
}

#[inline(always)]
fn revive_local(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let Some(there) = endpoint::row(found.destination) else {
        return Decision::NONE;
    };
    let generation = endpoint::generation(there);
    if there.network != row.network || !endpoint::is_ready(there) || found.destination_generation < there.incarnation {
        return Decision::NONE;
    }
    // Not before: without a decision the packet opens a flow of its own, untranslated as it is.
    flow::translate_apart(&mut work.to, found);
    story::translated(work);
    work.story.peer = found.destination;
    if found.flags & FLOW_HAIRPIN == 0 {
        if found.flags & FLOW_REPLY == 0 {
            attempt!(policy::between(row, there, work.to.asked(), packet.v4, &mut work.story));
        } else {
            attempt!(policy::between(
                there,
                row,
                packet.answers(),
                packet.v4,
                &mut work.story
            ));
        }
    }
    flow::renew(row.network, packet, found, work.story.generation, generation);
    Decision::local(found.destination)
}

#[inline(always)]
fn revive_stack(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    flow::translate_apart(&mut work.to, found);
    story::translated(work);
    if found.flags & FLOW_REPLY == 0 {
        attempt!(policy::leaving(
            row,
            work.to.destination,
            work.to.asked(),
            &mut work.story
        ));
    } else if found.flags & FLOW_NODE == 0 {
        let identity = policy::identity_at(row.network, packet.v4, &packet.destination);
        attempt!(policy::entering(row, identity, packet.answers(), &mut work.story));
    }
    flow::renew(row.network, packet, found, work.story.generation, 0);
    if found.kind == KIND_UPLINK {
        Decision::UPLINK
    } else {
        Decision::STACK
    }
}

/// Opens a flow.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let mut found = holder(row.network, &packet.destination);
    if is_service(found) && endpoint::is_plugins(row) {
        // Its plugin's datapath leads to the node's own proxy.
        found = None;
    }
    if is_service(found) {
        attempt!(translate_to_backend(row, packet, work));
        if work.to.destination == packet.source {
            // The pod itself: it would not take an answer of its own for one of the service.
            work.to.source = packet.destination;
            story::translated(work);
            return open_hairpin(ctx, packet, work);
        }
        story::translated(work);
        found = holder(row.network, &work.to.destination);
    }
    let Some(found) = found else {
        return open_beyond(ctx, row, packet, work);
    };
    if found.endpoint == work.story.endpoint {
        return Decision::drop(Verdict::SelfAddressed);
    }
    let Some(there) = endpoint::row(found.endpoint) else {
        // An address of a service behind another one, which leads nowhere, or an endpoint that never was.
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let generation = endpoint::generation(there);
    if !endpoint::is_current(there, row.network, found) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    work.story.peer = found.endpoint;
    attempt!(policy::between(row, there, work.to.asked(), packet.v4, &mut work.story));
    let new = NewFlow {
        kind: KIND_LOCAL,
        answer_kind: KIND_LOCAL,
        flags: 0,
        source: work.story.endpoint,
        source_generation: work.story.generation,
        destination: found.endpoint,
        destination_generation: generation,
        answer_network: work.story.network,
        careful: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::local(found.endpoint))
}

/// Who has the address.
///
/// VERIFIER: not inlined, for the stack's sake: Linux 6.1 rounds each frame up to 32 bytes.
#[inline(never)]
fn holder(network: u32, address: &[u32; 4]) -> Option<&'static AddressValue> {
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
        work.story.service = service::at(row.network, packet).map_or(0, |service| service.service);
        work.to.destination = words(found.address);
        work.to.ports = found.ports.word();
        return Ok(());
    }
    service::choose(row.network, packet, work)
}

/// A pod reaches itself through a service; no policy stands between.
#[inline(always)]
fn open_hairpin(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let endpoint = work.story.endpoint;
    work.story.peer = endpoint;
    let new = NewFlow {
        kind: KIND_LOCAL,
        answer_kind: KIND_LOCAL,
        flags: FLOW_HAIRPIN,
        source: endpoint,
        source_generation: work.story.generation,
        destination: endpoint,
        destination_generation: work.story.generation,
        answer_network: work.story.network,
        careful: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::local(endpoint))
}

/// What becomes of the network's packets to where this one goes.
///
/// VERIFIER: not inlined, as [`holder`].
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

/// The destination is not a local endpoint.
#[inline(always)]
fn open_beyond(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
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
        work.to.asked(),
        &mut work.story
    ));
    if action == ACTION_MASQUERADE {
        if !masquerade::is_possible(packet, work) {
            return Decision::drop(Verdict::MasqueradeProtocol);
        }
        return Decision::MASQUERADE;
    }
    let new = NewFlow {
        kind: KIND_TO_STACK,
        answer_kind: KIND_FROM_STACK,
        flags: 0,
        source: work.story.endpoint,
        source_generation: work.story.generation,
        destination: 0,
        destination_generation: 0,
        answer_network: work.story.network,
        careful: packet.class == Class::Open,
    };
    begin(ctx, packet, &new, work, Decision::STACK)
}

global! {
    /// Opens a flow that was judged and leaves the node.
    from_pod_masquerade(packet: *const Packet as as_ref, work: *mut Work as as_mut) => open_uplink
}

#[inline(always)]
fn open_uplink(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    if !masquerade::keep(packet, work) {
        attempt!(flow::take_share(work.story.endpoint));
        attempt!(masquerade::claim(ctx, packet, work));
    }
    attempt!(masquerade::open(packet, work));
    story::translated(work);
    count::new_flow(ctx, &mut work.story, Verdict::Masqueraded);
    if !config::is_dry_run() {
        attempt!(masquerade::depart(ctx, packet.v4));
        attempt!(translate::apply(ctx, packet, &work.to));
    }
    Decision::UPLINK
}

/// Everything was judged: writes the flow, tells of it, translates its first packet.
#[inline(always)]
fn begin(ctx: &TcContext, packet: &Packet, new: &NewFlow, work: &mut Work, decision: Decision) -> Decision {
    let network = work.story.network;
    attempt!(flow::create(network, packet, &work.to, new));
    count::new_flow(ctx, &mut work.story, decision.verdict());
    let translated = packet.destination != work.to.destination || packet.ports != work.to.ports;
    if translated && !config::is_dry_run() {
        attempt!(translate::apply(ctx, packet, &work.to));
    }
    decision
}

global! {
    /// A pod's ICMP error goes where the pod's own packets of the quoted flow go, so that a translation in the stack also
    /// sees it. It must be about a packet that this pod received from the one it tells.
    from_pod_icmp_error(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(related::quoted(ctx, packet, work));
    if work.inner.destination != packet.source {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    let Some(found) = flow::find_answer(row.network, &work.inner) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    let decision = super::current(row, work.story.generation, found);
    if decision.is_none() || !flow::is_live(found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    attempt!(related::translate::<false>(ctx, packet, work, found));
    decision
}
