//! Packets of no current flow: first packets, packets after a change of policy, ICMP errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    IFINDEX_BASE, Verdict,
    address::ADDRESS_OF_SERVICE,
    endpoint::EndpointRow,
    flow::{FLOW_REPLY, FLOW_FROM, FLOW_NODE, FLOW_TO, FlowValue, KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK},
};

use crate::{
    config, count,
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    global::global,
    packet::{Class, Packet},
    policy, related, skb,
    story::{self, Work},
};

/// What `skb::ingress_ifindex` says of a packet that the node itself made.
const NODE: u32 = 0;

global! {
    /// Judges the packet and opens or renews its flow. Not on the path of most packets.
    to_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow {
        let found = match flow::lookup(row.network, packet) {
            Some(found) => Some(found),
            None => lost_answer(row, packet, work.story.endpoint),
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
    }
    open(ctx, row, packet, work)
}

/// The answer's row of a flow whose original row says that there must be one.
#[inline(always)]
fn lost_answer(row: &EndpointRow, packet: &Packet, endpoint: u32) -> Option<&'static mut FlowValue> {
    let original = flow::find_answer(row.network, packet)?;
    if original.kind != KIND_TO_STACK
        || original.flags & (FLOW_REPLY | FLOW_TO | FLOW_FROM) != 0
        || original.source_generation < row.incarnation
        || !flow::is_live(original)
    {
        return None;
    }
    flow::repair(row.network, packet, original, KIND_FROM_STACK, endpoint)
}

/// Judges a flow again after a change: the direction that was asked for, whichever the packet belongs to. No decision
/// where the row is worth nothing.
#[inline(always)]
fn revive(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    if found.kind != KIND_FROM_STACK
        || found.destination_generation < row.incarnation
        || !flow::lives(row.network, packet, found)
    {
        return Decision::NONE;
    }
    flow::translate_if::<false>(&mut work.to, found);
    story::translated(work);
    if found.flags & FLOW_REPLY != 0 {
        attempt!(policy::leaving(row, packet.source, packet.answers(), &mut work.story));
    } else if found.flags & FLOW_NODE == 0 {
        let identity = policy::identity_at(row.network, packet.v4, &packet.source);
        attempt!(policy::entering(row, identity, packet.asked(), &mut work.story));
    }
    flow::renew(row.network, packet, found, 0, work.story.generation);
    Decision::DELIVER
}

/// Opens a flow from the stack. The node itself may always reach its pods; for anybody else the pod's policies count.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let ingress = skb::ingress_ifindex(ctx);
    let mut flags = FLOW_NODE;
    if ingress != NODE {
        flags = 0;
        let mut identity = 0;
        attempt!(sender(row, packet, ingress, &mut identity, work));
        attempt!(policy::entering(row, identity, packet.asked(), &mut work.story));
    }
    let new = NewFlow {
        kind: KIND_FROM_STACK,
        answer_kind: KIND_TO_STACK,
        flags,
        source: 0,
        source_generation: 0,
        destination: work.story.endpoint,
        destination_generation: work.story.generation,
        answer_network: work.story.network,
        careful: false,
    };
    attempt!(flow::create(row.network, packet, &work.to, &new));
    count::new_flow(ctx, &mut work.story, Verdict::Delivered);
    Decision::DELIVER
}

/// Identity of a sender beyond the node's own stack. A local pod's address counts only from that pod's interface.
#[inline(always)]
fn sender(
    row: &EndpointRow,
    packet: &Packet,
    ingress: u32,
    identity: &mut u32,
    work: &mut Work,
) -> Result<(), Verdict> {
    let Some(found) = endpoint::by_address(row.network, packet.source) else {
        *identity = policy::identity_beyond(row.network, &packet.source);
        return Ok(());
    };
    let from = found.endpoint;
    // What comes through a CNI plugin's bridge has its index. The sender's own program has checked the address.
    let elsewhere = ingress != IFINDEX_BASE + from && !endpoint::is_plugins(row);
    if from == ADDRESS_OF_SERVICE || elsewhere {
        return Err(Verdict::SourceAddress);
    }
    work.story.peer = from;
    match endpoint::row(from) {
        Some(there) if endpoint::is_current(there, row.network, found) => {
            *identity = policy::identity_of(there, packet.v4);
            Ok(())
        }
        _ => Err(Verdict::SourceAddress),
    }
}

global! {
    /// An ICMP error from the stack must be about a packet that this pod sent into the stack.
    to_pod_icmp_error(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(related::quoted(ctx, packet, work));
    let generation = work.story.generation;
    // The row of the answers: it knows of a translation.
    if let Some(found) = flow::find_answer(row.network, &work.inner)
        && found.kind == KIND_FROM_STACK
        && found.destination_generation == generation
        && flow::is_live(found)
    {
        attempt!(related::translate::<false>(ctx, packet, work, found));
        return Decision::DELIVER;
    }
    match flow::lookup(row.network, &work.inner) {
        Some(found) if went_there(row, found) && found.source_generation == generation && flow::is_live(found) => {
            Decision::DELIVER
        }
        _ => Decision::drop(Verdict::IcmpUnrelated),
    }
}

/// Whether packets of the flow went from the pod into the stack, or into a CNI plugin's datapath.
#[inline(always)]
fn went_there(row: &EndpointRow, found: &FlowValue) -> bool {
    found.kind == KIND_TO_STACK || found.kind == KIND_LOCAL && endpoint::is_plugins(row)
}
