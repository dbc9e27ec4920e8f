//! Decides about packets from outside without a current flow: first packets to a node port, packets after a change,
//! ICMP errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    endpoint::{EndpointRow, is_older},
    flow::{END_LOCAL, END_OUTSIDE, FlowEnd, FlowValue},
    uplink::OUTSIDE,
};

use crate::{
    config,
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow, nat},
    global::global,
    host_port, masquerade,
    packet::{Class, Packet},
    policy, related, remote, translate,
    work::Work,
};

global! {
    /// Evaluates the packet and opens or renews its flow. [`Decision::STACK`] for packets that are not for a pod.
    from_uplink_open(packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

/// Renews the flow of a packet that came through the tunnel for an egress address. No decision without one: no port of
/// such an address is forwarded to a pod.
///
/// VERIFIER: a global function, see `global`. Without the context: the compiler passes no argument that is not used.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn from_uplink_renew(packet: *const Packet, work: *mut Work) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let work = unsafe { work.as_mut() };
    let (Some(packet), Some(work)) = (packet, work) else {
        return Decision::NONE.word();
    };
    renew(packet, work).word()
}

#[inline(always)]
fn renew(packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow
        && let Some(found) = nat::lookup(packet)
    {
        let decision = review(packet, found, work);
        if decision.is_none() || decision.reason().is_some() {
            return decision;
        }
        return Decision::RENEWED;
    }
    Decision::NONE
}

#[inline(always)]
fn decide(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow
        && let Some(found) = nat::lookup(packet)
    {
        let decision = review(packet, found, work);
        if decision.reason().is_some() {
            return decision;
        }
        if !decision.is_none() {
            return Decision::RENEWED;
        }
    }
    open(ctx, packet, work)
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to.
#[inline(always)]
fn review(packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let second = flow::is_second(packet);
    let ((from, _), (to, receiver)) = (found.sender(second), found.receiver(second));
    let endpoint = receiver.id;
    let (Some(there), Some(policy)) = (endpoint::row(endpoint), endpoint::policy(endpoint)) else {
        return Decision::NONE;
    };
    attribute(work, there, endpoint);
    if from != END_OUTSIDE
        || to != END_LOCAL
        || !endpoint::is_ready(there)
        || is_older(receiver.generation, there.incarnation)
        || !flow::lives(OUTSIDE, packet, found)
    {
        return Decision::NONE;
    }
    flow::translate(&mut work.to, found);
    work.record_translation();
    if found.is_reply(second) {
        attempt!(policy::leaving(
            policy,
            there.network,
            packet.source,
            packet.reply_policy_port(),
            &mut work.event
        ));
        // Without it, a peer that continues to send to the former address would renew the flow.
        let ports = packet.ports.rotate_left(16);
        if !attempt!(masquerade::keeps_source(
            endpoint,
            packet.v4,
            &packet.destination,
            ports
        )) {
            return Decision::drop(Verdict::EgressAddress);
        }
    } else {
        let uplink = config::get().map_or(0, |config| config.uplink);
        attempt!(remote::admit(there.network, &packet.source, uplink));
        let identity = policy::external_identity(there.network, &packet.source);
        attempt!(policy::entering(
            policy,
            identity,
            work.to.policy_port(),
            &mut work.event
        ));
    }
    flow::renew(OUTSIDE, packet, found, work.epoch, work.event.generation);
    Decision::local(endpoint)
}

/// Attributes the event to the pod, whose network and policies decide.
#[inline(always)]
fn attribute(work: &mut Work, there: &EndpointRow, endpoint: u32) {
    work.event.endpoint = endpoint;
    work.event.network = there.network;
    work.event.generation = endpoint::generation(there);
    work.epoch = endpoint::epoch(there);
}

/// Opens a flow to a port of the node that is forwarded to a pod.
#[inline(always)]
fn open(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let Some(mapping) = host_port::find(packet) else {
        return Decision::STACK;
    };
    let (Some(there), Some(policy)) = (endpoint::row(mapping.endpoint), endpoint::policy(mapping.endpoint)) else {
        return Decision::STACK;
    };
    attribute(work, there, mapping.endpoint);
    if there.incarnation != mapping.incarnation || !endpoint::is_ready(there) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    if !host_port::translate(packet, there, mapping.port, &mut work.to) {
        return Decision::drop(Verdict::DestinationAddress);
    }
    work.record_translation();
    let Some(config) = config::get() else {
        return Decision::STACK;
    };
    attempt!(remote::admit(there.network, &packet.source, config.uplink));
    let identity = policy::external_identity(there.network, &packet.source);
    attempt!(policy::entering(
        policy,
        identity,
        work.to.policy_port(),
        &mut work.event
    ));
    // Before the flow is written: a packet on its last hop opens none.
    attempt!(translate::hop(ctx, packet.v4));
    work.new = NewFlow {
        source_kind: END_OUTSIDE,
        destination_kind: END_LOCAL,
        flags: 0,
        source: flow::far_end(config.uplink, work.epoch),
        destination: FlowEnd {
            id: mapping.endpoint,
            generation: work.event.generation,
        },
        translated: true,
        reply_network: there.network,
        refuse_taken: packet.class == Class::Open,
    };
    attempt!(flow::create_outside(config, packet, &work.to, &work.new));
    event::new_flow(ctx, config, &mut work.event, Verdict::Redirected);
    attempt!(translate::apply(ctx, packet, &work.to));
    Decision::local(mapping.endpoint)
}

global! {
    /// Translates an ICMP error from outside about a packet that a pod sent.
    from_uplink_icmp_error(packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    // Errors that cannot be parsed or are not about a pod's packet belong to the stack.
    if related::quoted(ctx, packet, work).is_err() {
        return Decision::STACK;
    }
    let Some(found) = nat::find_reply(&work.inner) else {
        return Decision::STACK;
    };
    let Some(endpoint) = super::current(found, flow::is_reply_second(&work.inner)) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    let Some(there) = endpoint::row(endpoint) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    attribute(work, there, endpoint);
    attempt!(related::translate(ctx, packet, work, found));
    Decision::local(endpoint)
}
