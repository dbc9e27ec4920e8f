//! Forwards packets from outside to pods: replies to masqueraded flows, packets to node ports of pods, and packets of
//! other nodes' pods that come without a tunnel. Replies to pods of other nodes that leave by this one go to those
//! nodes.
//!
//! - Hook: TC ingress of the uplink.
//! - Reads `OVERLAY`, `ENDPOINTS`, `ADDRESSES`, `ROUTES`, `NODES`, `HOST_PORTS`, `EGRESS_SHARES`, `POLICY`, `PORTS`,
//!   `IDENTITIES`, `CONFIG`; reads and writes `NAT4`, `NAT6`, `FLOWS4`, `FLOWS6`, `FLOW_SHARES`, `FRAGMENTS_OUTSIDE`;
//!   counts.
//! - Order: datagram to this node's end of the tunnel, headers, fragment, flow, ICMP error about a flow to another
//!   node, pod of another node, other ICMP error, node port, egress address that this node is responsible for with
//!   other nodes.
//! - Falls through to: the node's stack, for everything that is not for a pod or cannot be parsed.

mod open;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    event::FlowEvent,
    flow::{END_LOCAL, END_OUTSIDE, FlowValue},
    uplink::OUTSIDE,
};

use super::from_node;
use crate::{
    action::{DROP, NEXT, redirect_back},
    config, count,
    decision::{Decision, attempt},
    delivery, egress, endpoint,
    flow::{self, nat},
    fragment,
    packet::{self, Class, Packet},
    reject, remote,
    skb::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    translate,
    work::{self, Place, Work},
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::FromUplink);
    if !read(ctx, &mut place, &mut packet) {
        return NEXT;
    }
    let mut decision = established(ctx, &packet);
    if decision.is_none() {
        if let Some(action) = from_node::from_uplink(ctx, &mut place, &packet) {
            return action;
        }
        // One row of an array: there is always one.
        let Some(work) = work::begin(&place, &packet) else {
            return DROP;
        };
        decision = slow(ctx, &packet, work);
        if let Some(reason) = decision.reason() {
            return refuse(ctx, &packet, &mut work.event, reason);
        }
    } else if let Some(reason) = decision.reason() {
        return match work::begin(&place, &packet) {
            Some(work) => refuse(ctx, &packet, &mut work.event, reason),
            None => DROP,
        };
    }
    match decision.endpoint() {
        Some(endpoint) => {
            if packet.is_first() {
                fragment::record(OUTSIDE, Direction::FromUplink, &packet);
            }
            delivery::deliver(ctx, endpoint)
        }
        None => egress::pass_on(ctx, &place, &packet),
    }
}

/// Delivers a packet that the node which is responsible for its destination, an egress address, has sent through the
/// tunnel.
#[inline(always)]
pub(super) fn deliver_returned(ctx: &TcContext, place: &Place, packet: &Packet) -> i32 {
    let mut decision = established(ctx, packet);
    if decision.endpoint().is_none() {
        // One row of an array: there is always one.
        let Some(work) = work::begin(place, packet) else {
            return DROP;
        };
        if decision.is_none() {
            decision = returned(ctx, packet, work);
        }
        if decision.endpoint().is_none() {
            let reason = decision.reason().unwrap_or(Verdict::NoFlow as u16);
            return count::dropped(ctx, &mut work.event, reason);
        }
    }
    from_node::accept(ctx);
    match decision.endpoint() {
        Some(endpoint) => delivery::deliver(ctx, endpoint),
        None => DROP,
    }
}

/// Decides about packets without a current flow that came through the tunnel.
#[inline(always)]
fn returned(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::from_uplink_icmp_error(skb, packet, work));
    }
    let decision = Decision::from_word(open::from_uplink_renew(packet, work));
    if decision == Decision::RENEWED {
        return after_renewal(ctx, packet);
    }
    decision
}

/// Drops the packet, with a reply to its sender if it is its last hop here.
#[inline(always)]
fn refuse(ctx: &TcContext, packet: &Packet, event: &mut FlowEvent, reason: u16) -> i32 {
    let action = count::dropped(ctx, event, reason);
    if reason == Verdict::TimeExceeded as u16 && reject::reply_expired(ctx.skb.skb, packet) != 0 {
        return redirect_back(ctx);
    }
    action
}

/// Decides about packets without a current flow.
#[inline(always)]
fn slow(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::from_uplink_icmp_error(skb, packet, work));
    }
    let decision = Decision::from_word(open::from_uplink_open(skb, packet, work));
    if decision == Decision::RENEWED {
        return after_renewal(ctx, packet);
    }
    decision
}

/// Processes a packet whose flow was re-evaluated. What it was evaluated on may have changed again: that concerns the
/// next packet. Another flow that has replaced the row meanwhile was evaluated as well.
#[inline(never)]
fn after_renewal(ctx: &TcContext, packet: &Packet) -> Decision {
    let Some(found) = nat::lookup(packet) else {
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let (to, receiver) = found.receiver(flow::is_second(packet));
    match endpoint::row(receiver.id) {
        Some(there) if to == END_LOCAL && endpoint::is_ready(there) => follow(ctx, packet, found, receiver.id),
        _ => Decision::drop(Verdict::DestinationNotReady),
    }
}

/// Parses the headers. False for packets that are left to the stack.
#[inline(always)]
fn read(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> bool {
    // Packets of an interface in a VLAN pass the uplink below it first: they belong to another network. A tag without a
    // VLAN carries a priority only, and no pod expects it. Behind it there may be one with a VLAN.
    if skb::has_vlan_tag(ctx) && (skb::vlan(ctx) != 0 || !skb::remove_vlan_tag(ctx) || skb::has_vlan_tag(ctx)) {
        return false;
    }
    let Ok(eth) = skb::read::<EthHeader>(ctx, 0) else {
        return false;
    };
    // No flow and no port of a pod has the tunnel's port of this node, whatever the rows say.
    if remote::is_arriving(ctx, eth.ethertype) {
        return false;
    }
    place.ethertype = u16::from_be(eth.ethertype);
    let understood = match eth.ethertype {
        ETHERTYPE_IPV4 => packet::ipv4(ctx, packet),
        ETHERTYPE_IPV6 => packet::ipv6(ctx, packet),
        _ => return false,
    };
    if understood.is_err() || packet.class == Class::LinkControl || packet.is_multicast() || packet.to_link_local() {
        return false;
    }
    !packet.is_later() || fragment::lookup(OUTSIDE, Direction::FromUplink, packet).is_ok()
}

/// The pod of the packet's flow, if the state that the flow was evaluated on is unchanged.
#[inline(always)]
fn established(ctx: &TcContext, packet: &Packet) -> Decision {
    if packet.class != Class::Flow {
        return Decision::NONE;
    }
    let Some(found) = nat::lookup(packet) else {
        return Decision::NONE;
    };
    match current(found, flow::is_second(packet)) {
        Some(endpoint) => follow(ctx, packet, found, endpoint),
        None => Decision::NONE,
    }
}

/// The endpoint that receives the flow's packets, if it exists and is unchanged since the flow was evaluated. `second`:
/// the packet's sender is the second end.
#[inline(always)]
fn current(found: &FlowValue, second: bool) -> Option<u32> {
    // Copied once: another flow may take over the row at any moment. The checks below are on the copies.
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_OUTSIDE || to != END_LOCAL || !flow::is_live(found) {
        return None;
    }
    let there = endpoint::row(receiver.id)?;
    let unchanged =
        endpoint::is_ready(there) && there.generation == receiver.generation && there.epoch == sender.generation;
    unchanged.then_some(receiver.id)
}

/// Processes a packet of a current flow of the endpoint.
#[inline(always)]
fn follow(ctx: &TcContext, packet: &Packet, found: &mut FlowValue, endpoint: u32) -> Decision {
    let later = flow::refresh(found);
    if later {
        // A pod that has opened the flow again has another row; its peer may not know yet.
        let _of_another_flow = flow::refresh_other(OUTSIDE, packet, found);
    }
    if !config::is_dry_run() {
        attempt!(translate::hop(ctx, packet.v4));
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found, later) {
        flow::flow_change_state(OUTSIDE, packet, found, u32::from(later));
    }
    Decision::local(endpoint)
}
