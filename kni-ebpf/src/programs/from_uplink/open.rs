//! Decides about packets from outside without a current flow: first packets to a node port, packets after a change,
//! ICMP errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    endpoint::EndpointRow,
    flow::{FLOW_REPLY, FlowValue, KIND_UPLINK},
    uplink::{HostPortKey, HostPortValue, OUTSIDE},
};

use crate::{
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    maps::HOST_PORTS,
    packet::{Class, Packet, SCTP, TCP, UDP},
    policy, related, translate,
    work::Work,
};

global! {
    /// Evaluates the packet and opens or renews its flow. [`Decision::STACK`] for packets that are not for a pod.
    from_uplink_open(packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow
        && let Some(found) = flow::lookup(OUTSIDE, packet)
        && let Some(there) = endpoint::row(found.destination)
    {
        let decision = review(there, packet, found, work);
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
fn review(there: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let generation = endpoint::generation(there);
    if found.kind != KIND_UPLINK
        || !endpoint::is_ready(there)
        || found.destination_generation < there.incarnation
        || !flow::lives(OUTSIDE, packet, found)
    {
        return Decision::NONE;
    }
    let endpoint = found.destination;
    attribute(work, there, endpoint);
    flow::translate(&mut work.to, found);
    work.record_translation();
    if found.flags & FLOW_REPLY != 0 {
        attempt!(policy::leaving(
            there,
            packet.source,
            packet.reply_policy_port(),
            &mut work.event
        ));
    } else {
        let identity = policy::external_identity(there.network, &packet.source);
        attempt!(policy::entering(
            there,
            identity,
            work.to.policy_port(),
            &mut work.event
        ));
    }
    flow::renew(OUTSIDE, packet, found, 0, generation);
    Decision::local(endpoint)
}

/// Attributes the event to the pod, whose network and policies decide.
#[inline(always)]
fn attribute(work: &mut Work, there: &EndpointRow, endpoint: u32) {
    work.event.endpoint = endpoint;
    work.event.network = there.network;
    work.event.generation = endpoint::generation(there);
}

/// Opens a flow to a port of the node that is forwarded to a pod.
#[inline(always)]
fn open(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let Some(mapping) = host_port(packet) else {
        return Decision::STACK;
    };
    let Some(there) = endpoint::row(mapping.endpoint) else {
        return Decision::STACK;
    };
    let generation = endpoint::generation(there);
    if there.incarnation != mapping.incarnation || !endpoint::is_ready(there) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    attribute(work, there, mapping.endpoint);
    if !set_pod_destination(packet, there, mapping, &mut work.to) {
        return Decision::drop(Verdict::DestinationAddress);
    }
    work.record_translation();
    let identity = policy::external_identity(there.network, &packet.source);
    attempt!(policy::entering(
        there,
        identity,
        work.to.policy_port(),
        &mut work.event
    ));
    let new = NewFlow {
        kind: KIND_UPLINK,
        reply_kind: KIND_UPLINK,
        flags: 0,
        source: 0,
        source_generation: 0,
        destination: mapping.endpoint,
        destination_generation: generation,
        reply_network: there.network,
        refuse_taken: false,
    };
    attempt!(flow::create(OUTSIDE, packet, &work.to, &new));
    event::new_flow(ctx, &mut work.event, Verdict::Redirected);
    attempt!(translate::hop(ctx, packet.v4));
    attempt!(translate::apply(ctx, packet, &work.to));
    Decision::local(mapping.endpoint)
}

/// The pod and port that a port of the node is forwarded to.
#[inline(always)]
pub(crate) fn host_port(packet: &Packet) -> Option<&'static HostPortValue> {
    if !matches!(packet.protocol, TCP | UDP | SCTP) {
        return None;
    }
    let [_, _, high, low] = packet.ports.to_ne_bytes();
    // SAFETY: the agent replaces rows whole; one that is replaced meanwhile stays readable (RCU).
    unsafe {
        HOST_PORTS.get(HostPortKey {
            address: bytes(packet.destination),
            port: [high, low],
            protocol: u16::from(packet.protocol),
        })
    }
}

/// Sets the destination of `to` to the pod. False when it has no address of the family.
#[inline(always)]
pub(crate) fn set_pod_destination(
    packet: &Packet,
    there: &EndpointRow,
    mapping: &HostPortValue,
    to: &mut Packet,
) -> bool {
    let [a, b, ..] = packet.ports.to_ne_bytes();
    let [c, d] = mapping.port;
    to.ports = u32::from_ne_bytes([a, b, c, d]);
    to.destination = if packet.v4 {
        mapped(u32::from_ne_bytes(there.ipv4))
    } else {
        words(there.ipv6)
    };
    to.destination != [0; 4] && to.destination != mapped(0)
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
    let Some(found) = flow::find_reply(OUTSIDE, &work.inner) else {
        return Decision::STACK;
    };
    let Some(there) = endpoint::row(found.destination) else {
        return Decision::STACK;
    };
    if !super::is_current(there, found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    let endpoint = found.destination;
    attribute(work, there, endpoint);
    attempt!(related::translate::<true>(ctx, packet, work, found));
    Decision::local(endpoint)
}
