//! Opens flows of pods of other nodes to ports of this node that lead to pods.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    flow::{END_LOCAL, FlowEnd},
};

use super::Arrival;
use crate::{
    config,
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    host_port,
    packet::{Class, Packet},
    policy, remote, translate,
    work::Work,
};

global! {
    /// Evaluates a packet for a port of the node by the policies of the pod that it leads to, and opens its flow.
    ///
    /// VERIFIER: apart from other packets, to save stack.
    from_node_open_port(arrival: *const Arrival as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => open
}

#[inline(always)]
fn open(ctx: &TcContext, arrival: &Arrival, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(check(arrival.port, packet, work));
    let Some(config) = config::get() else {
        return Decision::drop(Verdict::FlowTableFull);
    };
    let network = work.event.network;
    work.new = NewFlow {
        source_kind: remote::kind(arrival.way),
        destination_kind: END_LOCAL,
        flags: 0,
        source: arrival.sender,
        destination: FlowEnd {
            id: work.event.endpoint,
            generation: work.event.generation,
        },
        translated: true,
        reply_network: network,
        refuse_taken: packet.class == Class::Open,
    };
    attempt!(flow::create(config, network, packet, &work.to, &work.new));
    event::new_flow(ctx, config, &mut work.event, Verdict::Redirected);
    attempt!(translate::apply(ctx, packet, &work.to));
    Decision::local(work.event.endpoint)
}

/// Translates `work.to` to the port of the event's endpoint, whose policies must allow the packet then.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn check(port: u32, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let id = work.event.endpoint;
    let (Some(own), Some(policy)) = (endpoint::row(id), endpoint::policy(id)) else {
        return Err(Verdict::DestinationNotReady);
    };
    let [high, low, ..] = port.to_ne_bytes();
    if !host_port::translate(packet, own, [high, low], &mut work.to) {
        return Err(Verdict::DestinationAddress);
    }
    work.record_translation();
    let identity = policy::external_identity(work.event.network, &packet.source);
    policy::entering(policy, identity, work.to.policy_port(), &mut work.event)
}
