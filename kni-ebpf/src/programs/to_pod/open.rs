//! Decides about packets to a pod without a current flow: first packets, packets after a policy change, ICMP errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    IFINDEX_BASE, Verdict,
    address::ADDRESS_OF_SERVICE,
    endpoint::EndpointRow,
    flow::{FLOW_FROM, FLOW_NODE, FLOW_REPLY, FLOW_TO, FlowValue, KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK},
};

use crate::{
    config,
    decision::{Decision, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    packet::{Class, Packet},
    policy, related, skb,
    work::Work,
};

/// `skb::ingress_ifindex` of a packet that the node sent.
const NODE: u32 = 0;

global! {
    /// Evaluates the packet and opens or renews its flow. Not on the path of most packets.
    to_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    if packet.class == Class::Flow {
        let found = match flow::lookup(row.network, packet) {
            Some(found) => Some(found),
            None => lost_reply(row, packet, work.event.endpoint),
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
    }
    open(ctx, row, packet, work)
}

/// Recreates the reply's row of a flow whose original row still exists.
#[inline(always)]
fn lost_reply(row: &EndpointRow, packet: &Packet, endpoint: u32) -> Option<&'static mut FlowValue> {
    let original = flow::find_reply(row.network, packet)?;
    if original.kind != KIND_TO_STACK
        || original.flags & (FLOW_REPLY | FLOW_TO | FLOW_FROM) != 0
        || original.source_generation < row.incarnation
        || !flow::is_live(original)
    {
        return None;
    }
    flow::repair(row.network, packet, original, KIND_FROM_STACK, endpoint)
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to. No decision
/// where the row has expired or belongs to an earlier owner.
#[inline(always)]
fn review(row: &EndpointRow, packet: &Packet, found: &mut FlowValue, work: &mut Work) -> Decision {
    if found.kind != KIND_FROM_STACK
        || found.destination_generation < row.incarnation
        || !flow::lives(row.network, packet, found)
    {
        return Decision::NONE;
    }
    flow::translate_if::<false>(&mut work.to, found);
    work.record_translation();
    if found.flags & FLOW_REPLY != 0 {
        attempt!(policy::leaving(
            row,
            packet.source,
            packet.reply_policy_port(),
            &mut work.event
        ));
    } else if found.flags & FLOW_NODE == 0 {
        let identity = policy::identity_at(row.network, packet.v4, &packet.source);
        attempt!(policy::entering(row, identity, packet.policy_port(), &mut work.event));
    }
    flow::renew(row.network, packet, found, 0, work.event.generation);
    Decision::DELIVER
}

/// Opens a flow from the stack. The node itself may always reach its pods; for other senders the pod's policies apply.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let ingress = skb::ingress_ifindex(ctx);
    let mut flags = FLOW_NODE;
    if ingress != NODE {
        flags = 0;
        let mut identity = 0;
        attempt!(sender(row, packet, ingress, &mut identity, work));
        attempt!(policy::entering(row, identity, packet.policy_port(), &mut work.event));
    }
    let new = NewFlow {
        kind: KIND_FROM_STACK,
        reply_kind: KIND_TO_STACK,
        flags,
        source: 0,
        source_generation: 0,
        destination: work.event.endpoint,
        destination_generation: work.event.generation,
        reply_network: work.event.network,
        refuse_taken: false,
    };
    attempt!(flow::create(row.network, packet, &work.to, &new));
    event::new_flow(ctx, &mut work.event, Verdict::Delivered);
    Decision::DELIVER
}

/// Identity of a sender other than the node's own stack. A local pod's address is valid only from that pod's interface.
#[inline(always)]
fn sender(
    row: &EndpointRow,
    packet: &Packet,
    ingress: u32,
    identity: &mut u32,
    work: &mut Work,
) -> Result<(), Verdict> {
    let Some(found) = endpoint::by_address(row.network, packet.source) else {
        *identity = policy::external_identity(row.network, &packet.source);
        return Ok(());
    };
    let from = found.endpoint;
    // Packets through a CNI plugin's bridge have its index. The sender's own program has checked the address.
    let elsewhere = ingress != IFINDEX_BASE + from && !endpoint::is_plugin(row);
    if from == ADDRESS_OF_SERVICE || elsewhere {
        return Err(Verdict::SourceAddress);
    }
    work.event.peer = from;
    match endpoint::row(from) {
        Some(there) if endpoint::is_current(there, row.network, found) => {
            *identity = policy::identity_of(there, packet.v4);
            Ok(())
        }
        _ => Err(Verdict::SourceAddress),
    }
}

global! {
    /// Delivers an ICMP error from the stack about a packet that this pod sent into the stack.
    to_pod_icmp_error(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => icmp_error
}

#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    attempt!(related::quoted(ctx, packet, work));
    let generation = work.event.generation;
    // The row of the replies: it has the translation.
    if let Some(found) = flow::find_reply(row.network, &work.inner)
        && found.kind == KIND_FROM_STACK
        && found.destination_generation == generation
        && flow::is_live(found)
    {
        attempt!(related::translate::<false>(ctx, packet, work, found));
        return Decision::DELIVER;
    }
    match flow::lookup(row.network, &work.inner) {
        Some(found)
            if was_sent_to_stack(row, found) && found.source_generation == generation && flow::is_live(found) =>
        {
            Decision::DELIVER
        }
        _ => Decision::drop(Verdict::IcmpUnrelated),
    }
}

/// Whether the pod's packets of the flow went into the stack, or into a CNI plugin's datapath.
#[inline(always)]
fn was_sent_to_stack(row: &EndpointRow, found: &FlowValue) -> bool {
    found.kind == KIND_TO_STACK || found.kind == KIND_LOCAL && endpoint::is_plugin(row)
}
