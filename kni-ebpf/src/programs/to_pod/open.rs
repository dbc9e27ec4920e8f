//! Decides about packets to a pod without a current flow: first packets, packets after a policy change, ICMP errors.

use aya_ebpf::programs::TcContext;
use kni_common::{
    IFINDEX_BASE, Verdict,
    address::ADDRESS_OF_SERVICE,
    endpoint::{EndpointPolicy, EndpointRow, is_older},
    flow::{END_LOCAL, END_STACK, FLOW_NODE, FlowEnd, FlowValue},
};

use crate::{
    config,
    decision::{Decision, Reason, attempt},
    endpoint, event,
    flow::{self, NewFlow},
    global::global,
    packet::{Class, Packet},
    policy, related,
    remote::{self, NODE},
    skb,
    work::Work,
};

global! {
    /// Evaluates the packet and opens or renews its flow. Not on the path of most packets.
    to_pod_open(row: *const EndpointRow as as_ref, packet: *const Packet as as_ref, work: *mut Work as as_mut) => decide
}

#[inline(always)]
fn decide(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let Some(policy) = endpoint::policy(work.event.endpoint) else {
        return Decision::drop(Verdict::EndpointNotReady);
    };
    if packet.class == Class::Flow
        && let Some(found) = flow::lookup(row.network, packet)
    {
        let decision = review(ctx, row, policy, packet, found, work);
        if decision.reason().is_some() || (config::is_dry_run() && !decision.is_none()) {
            return decision;
        }
        if !decision.is_none() {
            return Decision::RENEWED;
        }
    }
    open(ctx, row, policy, packet, work)
}

/// Re-evaluates a flow after a change, in its original direction whichever direction the packet belongs to. No decision
/// where the row has expired or belongs to an earlier owner.
#[inline(always)]
fn review(
    ctx: &TcContext,
    row: &EndpointRow,
    policy: &EndpointPolicy,
    packet: &Packet,
    found: &mut FlowValue,
    work: &mut Work,
) -> Decision {
    let second = flow::is_second(packet);
    let ((from, origin), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_STACK
        || to != END_LOCAL
        || receiver.id != work.event.endpoint
        || is_older(receiver.generation, row.incarnation)
        || !flow::lives(row.network, packet, found)
    {
        return Decision::NONE;
    }
    flow::translate(&mut work.to, found);
    work.record_translation();
    let ingress = skb::ingress_ifindex(ctx);
    if ingress == NODE {
        attempt!(remote::admit_own(row.network, &packet.source, found.is_reply(second)));
    }
    if found.is_reply(second) {
        if ingress != NODE {
            attempt!(remote::admit(row.network, &packet.source, ingress));
        }
        attempt!(policy::leaving(
            policy,
            row.network,
            packet.source,
            packet.reply_policy_port(),
            &mut work.event
        ));
    } else if found.flags & FLOW_NODE == 0 {
        let identity = if ingress == NODE {
            policy::identity_at(row.network, packet.v4, &packet.source)
        } else {
            attempt!(sender(row, packet, ingress, work))
        };
        if ingress != NODE && work.new.source.id != origin.id {
            // The row is of another way.
            return Decision::NONE;
        }
        attempt!(policy::entering(
            policy,
            identity,
            packet.policy_port(),
            &mut work.event
        ));
    }
    flow::renew(row.network, packet, found, work.epoch, work.event.generation);
    Decision::DELIVER
}

/// Opens a flow from the stack. The node itself may always reach its pods, in the name of none; for other senders the
/// pod's policies apply.
#[inline(always)]
fn open(ctx: &TcContext, row: &EndpointRow, policy: &EndpointPolicy, packet: &Packet, work: &mut Work) -> Decision {
    let ingress = skb::ingress_ifindex(ctx);
    let mut flags = FLOW_NODE;
    let mut way = 0;
    if ingress == NODE {
        attempt!(remote::admit_own(row.network, &packet.source, false));
    } else {
        flags = 0;
        let identity = attempt!(sender(row, packet, ingress, work));
        way = work.new.source.id;
        attempt!(policy::entering(
            policy,
            identity,
            packet.policy_port(),
            &mut work.event
        ));
    }
    work.new = NewFlow {
        source_kind: END_STACK,
        destination_kind: END_LOCAL,
        flags,
        source: flow::far_end(way, work.epoch),
        destination: FlowEnd {
            id: work.event.endpoint,
            generation: work.event.generation,
        },
        translated: false,
        reply_network: work.event.network,
        refuse_taken: false,
    };
    let Some(config) = config::get() else {
        return Decision::drop(Verdict::FlowTableFull);
    };
    attempt!(flow::create_untranslated(config, row.network, packet, &work.new));
    event::new_flow(ctx, config, &mut work.event, Verdict::Delivered);
    Decision::DELIVER
}

/// Identity of a sender other than the node's own stack. A local pod's address is valid only from that pod's interface,
/// that of a pod of another node only by the interface that leads there, which is put into `work.new.source.id`.
#[inline(always)]
fn sender(row: &EndpointRow, packet: &Packet, ingress: u32, work: &mut Work) -> Result<u32, Reason> {
    let mut identity = 0;
    Reason::check(identify(row, packet, ingress, &mut identity, work)).map(|()| identity)
}

/// [`sender`]; 0 on success, else the code of the reason.
///
/// VERIFIER: not inlined, to save stack; returns a number for the same reason as `count::dropped`.
#[inline(never)]
fn identify(row: &EndpointRow, packet: &Packet, ingress: u32, identity: &mut u32, work: &mut Work) -> u32 {
    work.new.source.id = 0;
    let Some(found) = endpoint::by_address(row.network, packet.source) else {
        match remote::admit(row.network, &packet.source, ingress) {
            Ok(way) => work.new.source.id = way,
            Err(reason) => return reason.word(),
        }
        *identity = policy::external_identity(row.network, &packet.source);
        return 0;
    };
    let from = found.endpoint;
    // Packets through a CNI plugin's bridge have its index. The sender's own program has checked the address.
    let elsewhere = if endpoint::is_plugin(row) {
        config::is_uplink(ingress)
    } else {
        ingress != IFINDEX_BASE + from
    };
    if from == ADDRESS_OF_SERVICE || elsewhere {
        return Verdict::SourceAddress as u32;
    }
    work.event.peer = from;
    match (endpoint::row(from), endpoint::policy(from)) {
        (Some(there), Some(policy)) if endpoint::is_current(there, row.network, found) => {
            *identity = policy::identity_of(policy, packet.v4);
            0
        }
        _ => Verdict::SourceAddress as u32,
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
    // The row of the replies: it has the translation. `second`: the sender of the replies.
    let second = flow::is_reply_second(&work.inner);
    if let Some(found) = flow::find_reply(row.network, &work.inner)
        && let ((END_STACK, _), (END_LOCAL, receiver)) = (found.sender(second), found.receiver(second))
        && receiver.generation == generation
        && flow::is_live(found)
    {
        attempt!(related::translate(ctx, packet, work, found));
        return Decision::DELIVER;
    }
    match flow::lookup(row.network, &work.inner) {
        Some(found)
            if was_sent_to_stack(row, found, flow::is_second(&work.inner), generation) && flow::is_live(found) =>
        {
            Decision::DELIVER
        }
        _ => Decision::drop(Verdict::IcmpUnrelated),
    }
}

/// Whether the pod's packets of the flow went into the stack, or into a CNI plugin's datapath. `second`: the pod is the
/// second end.
#[inline(always)]
fn was_sent_to_stack(row: &EndpointRow, found: &FlowValue, second: bool, generation: u32) -> bool {
    let ((from, sender), (to, _)) = (found.sender(second), found.receiver(second));
    let sent = to == END_STACK || to == END_LOCAL && endpoint::is_plugin(row);
    sent && from == END_LOCAL && sender.generation == generation
}
