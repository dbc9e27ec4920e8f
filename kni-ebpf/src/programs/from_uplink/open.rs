//! Packets from outside that belong to no current flow: first packets to a node port, packets after a change, ICMP
//! errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    endpoint::EndpointRow,
    flow::{FLOW_REPLY, FlowValue, KIND_UPLINK},
    uplink::{HostPortKey, HostPortValue, OUTSIDE},
};

use crate::{
    count,
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    global::global,
    maps::HOST_PORTS,
    packet::{Class, Packet, SCTP, TCP, UDP},
    policy, related,
    story::{self, Work},
    translate,
};

global! {
    /// Judges the packet and opens or renews its flow. [`Decision::STACK`] for what is not for a pod.
    from_uplink_open(packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow
        && let Some(found) = flow::lookup(OUTSIDE, packet)
        && let Some(there) = endpoint::row(found.destination)
    {
        let decision = revive(there, packet, found, work);
        if decision.reason().is_some() {
            return decision;
        }
        if !decision.is_none() {
            return Decision::AGAIN;
        }
    }
    open(ctx, packet, work)
}

/// Judges a flow again after a change: the direction that was asked for, whichever the packet belongs to.
#[inline(always)]
fn revive(there: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    let generation = endpoint::generation(there);
    if found.kind != KIND_UPLINK
        || !endpoint::is_ready(there)
        || found.destination_generation < there.incarnation
        || !flow::lives(OUTSIDE, packet, found)
    {
        return Decision::NONE;
    }
    let endpoint = found.destination;
    tell_of(work, there, endpoint);
    flow::translate(&mut work.to, found);
    story::translated(work);
    if found.flags & FLOW_REPLY != 0 {
        attempt!(policy::leaving(there, packet.source, packet.answers(), &mut work.story));
    } else {
        let identity = policy::identity_beyond(there.network, &packet.source);
        attempt!(policy::entering(there, identity, work.to.asked(), &mut work.story));
    }
    flow::renew(OUTSIDE, packet, found, 0, generation);
    Decision::local(endpoint)
}

/// The story is the pod's, whose network and policies decide.
#[inline(always)]
fn tell_of(work: &mut Work, there: &EndpointRow, endpoint: u32) {
    work.story.endpoint = endpoint;
    work.story.network = there.network;
    work.story.generation = endpoint::generation(there);
}

/// Opens a flow to a port of the node that is a pod's.
#[inline(always)]
fn open(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let Some(mapping) = mapping(packet) else {
        return Decision::STACK;
    };
    let Some(there) = endpoint::row(mapping.endpoint) else {
        return Decision::STACK;
    };
    let generation = endpoint::generation(there);
    if there.incarnation != mapping.incarnation || !endpoint::is_ready(there) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    tell_of(work, there, mapping.endpoint);
    if !aim(packet, there, mapping, &mut work.to) {
        return Decision::drop(Verdict::DestinationAddress);
    }
    story::translated(work);
    let identity = policy::identity_beyond(there.network, &packet.source);
    attempt!(policy::entering(there, identity, work.to.asked(), &mut work.story));
    let new = NewFlow {
        kind: KIND_UPLINK,
        answer_kind: KIND_UPLINK,
        flags: 0,
        source: 0,
        source_generation: 0,
        destination: mapping.endpoint,
        destination_generation: generation,
        answer_network: there.network,
        careful: false,
    };
    attempt!(flow::create(OUTSIDE, packet, &work.to, &new));
    count::new_flow(ctx, &mut work.story, Verdict::Redirected);
    attempt!(translate::hop(ctx, packet.v4));
    attempt!(translate::apply(ctx, packet, &work.to));
    Decision::local(mapping.endpoint)
}

/// What a port of the node leads to.
#[inline(always)]
pub(crate) fn mapping(packet: &Packet) -> Option<&'static HostPortValue> {
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

/// Turns `to` towards the pod. False when it has no address of the family.
#[inline(always)]
pub(crate) fn aim(packet: &Packet, there: &EndpointRow, mapping: &HostPortValue, to: &mut Packet) -> bool {
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
    /// An ICMP error from outside about what a pod sent.
    from_uplink_icmp_error(packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    // What cannot be read, or is about somebody else, is the stack's.
    if related::quoted(ctx, packet, work).is_err() {
        return Decision::STACK;
    }
    let Some(found) = flow::find_answer(OUTSIDE, &work.inner) else {
        return Decision::STACK;
    };
    let Some(there) = endpoint::row(found.destination) else {
        return Decision::STACK;
    };
    if !super::is_current(there, found) {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    let endpoint = found.destination;
    tell_of(work, there, endpoint);
    attempt!(related::translate::<true>(ctx, packet, work, found));
    Decision::local(endpoint)
}
