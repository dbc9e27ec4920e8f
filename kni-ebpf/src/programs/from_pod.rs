//! Enforces policy on packets that a pod sends, and forwards them.
//!
//! - Hook: TC ingress of the host interface. Minimum kernel 5.10 (`bpf_redirect_peer`).
//! - Reads `ENDPOINTS`, `INTERFACES`, `ADDRESSES`, `ROUTES`, `HOST_PORTS`, `SERVICES`, `BACKENDS`, `MASQUERADE`,
//!   `SHARED_EGRESS`, `EGRESS_SHARES`, `POLICY`, `PORTS`, `IDENTITIES`, `NODES`, `NUMBERS`, `OVERLAY`, `CONFIG`; reads
//!   and writes `FLOWS4`, `FLOWS6`, `FLOW_SHARES`, `AFFINITY`, `FRAGMENTS`; counts.
//! - Order: endpoint, VLAN, source MAC, ARP, headers, link control, source address, destination kind (link-local,
//!   multicast, loopback), destination MAC, fragment, flow, then (for a packet without a current flow) service,
//!   destination, port of this node, egress policy of the sender, ingress policy of a local receiver, share of the flow
//!   tables.
//! - Falls through to: the node's stack, only for endpoints with host access.
//! - At an interface that a CNI plugin created, it applies policy and passes packets on instead of redirecting or
//!   answering.

mod carry_out;
mod fast;
mod open;
mod own_port;
mod to_node;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{END_LOCAL, END_OUTSIDE, END_REMOTE, END_ROUTED, END_STACK, FLOW_CLOSED, FLOW_TRANSLATED, FlowValue},
};

use crate::{
    action::DROP,
    config,
    decision::{Decision, attempt},
    egress, endpoint, explanation, flow, fragment, masquerade,
    neighbour::{self, Reply, mac_words},
    packet::{self, Class, Packet},
    skb::{self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, EthHeader},
    translate,
    work::{self, Place, Work},
};
use carry_out::{carry_out, refuse};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    if let Some(action) = fast::forward(ctx) {
        return action;
    }
    let ctx = &skb::reread(ctx);
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::FromPod);
    let mut decision = decide(ctx, &mut place, &mut packet);
    if decision == Decision::OTHER_NODE {
        decision = to_node::follow(ctx, &place, &packet);
        if decision.number().is_some() && !config::is_dry_run() {
            return to_node::send(ctx, &place, decision);
        }
    }
    let is_known = !decision.is_none() && decision.reason().is_none();
    if !is_known || config::is_dry_run() {
        // One row of an array: there is always one.
        let Some(work) = work::begin(&place, &packet) else {
            return DROP;
        };
        if decision.is_none()
            && let Some(row) = endpoint::row(place.endpoint)
        {
            decision = slow(ctx, row, &place, &packet, work);
        }
        if let Some(reason) = decision.reason() {
            return refuse(ctx, &packet, &mut work.event, reason);
        }
        if config::is_dry_run() {
            if is_known {
                explanation::follow(place.network, &packet, work);
            }
            if let Some(destination) = decision.endpoint() {
                work.event.peer = destination;
            }
            explanation::record(&mut work.event, decision.verdict() as u16, ctx.len());
            return DROP;
        }
    }
    if packet.is_first() {
        fragment::record(place.network, Direction::FromPod, &packet);
    }
    carry_out(ctx, &place, decision)
}

/// Decides about packets without a current flow.
#[inline(always)]
fn slow(ctx: &TcContext, row: &EndpointRow, place: &Place, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::from_pod_icmp_error(skb, row, packet, work));
    }
    let decision = Decision::from_word(open::from_pod_open(skb, row, packet, work));
    if decision == Decision::OTHER_NODE {
        return to_node::decide(ctx, row, place, packet, work);
    }
    if decision == Decision::RENEWED {
        return after_renewal(ctx, row, packet);
    }
    if decision == Decision::MASQUERADE {
        return Decision::from_word(open::from_pod_masquerade(skb, packet, work));
    }
    decision
}

/// Processes a packet whose flow was re-evaluated. What it was evaluated on may have changed again: that concerns the
/// next packet. Another flow that has replaced the row meanwhile was evaluated as well.
#[inline(never)]
fn after_renewal(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Decision {
    let Some(found) = flow::lookup(row.network, packet) else {
        return Decision::drop(Verdict::DestinationNotReady);
    };
    let decision = leads_to(row, found, flow::is_second(packet));
    if decision.is_none() {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    follow(ctx, row, packet, found, decision).or_drop(Verdict::DestinationNotReady)
}

/// Where the flow's row leads, whatever has changed since it was written. `second`: the packet's sender is the second
/// end.
#[inline(always)]
fn leads_to(row: &EndpointRow, found: &FlowValue, second: bool) -> Decision {
    let ((from, _), (to, receiver)) = (found.sender(second), found.receiver(second));
    if from != END_LOCAL {
        return Decision::NONE;
    }
    match to {
        END_LOCAL => match endpoint::row(receiver.id) {
            Some(there) if there.network == row.network && endpoint::is_ready(there) => Decision::local(receiver.id),
            _ => Decision::NONE,
        },
        END_STACK if row.flags & FLAG_HOST_ACCESS != 0 => Decision::STACK,
        END_OUTSIDE => Decision::UPLINK,
        _ => Decision::NONE,
    }
}

#[inline(always)]
fn decide(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> Decision {
    let endpoint = endpoint::of_interface(ctx);
    let Some(row) = endpoint::row(endpoint) else {
        return Decision::drop(Verdict::NoEndpoint);
    };
    place.endpoint = endpoint;
    place.network = row.network;
    place.generation = endpoint::generation(row);
    place.epoch = endpoint::epoch(row);
    if !endpoint::is_ready(row) {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    let eth: EthHeader = attempt!(skb::read(ctx, 0));
    place.ethertype = u16::from_be(eth.ethertype);
    if skb::has_vlan_tag(ctx) || eth.ethertype == ETHERTYPE_VLAN || eth.ethertype == ETHERTYPE_QINQ {
        return Decision::drop(Verdict::VlanTagged);
    }
    if eth.source != mac_words(&row.from_pod.source) {
        return Decision::drop(Verdict::SourceMac);
    }
    match eth.ethertype {
        ETHERTYPE_IPV4 => {
            attempt!(packet::ipv4(ctx, packet));
            let [.., source] = packet.source;
            if source != u32::from_ne_bytes(row.ipv4) || source == 0 {
                return Decision::drop(Verdict::SourceAddress);
            }
        }
        ETHERTYPE_IPV6 => {
            let decision = ipv6(ctx, row, packet);
            if !decision.is_none() {
                return decision;
            }
        }
        ETHERTYPE_ARP => return arp(ctx, row),
        _ => return Decision::drop(Verdict::UnsupportedEthertype),
    }
    if packet.is_multicast() {
        return Decision::drop(Verdict::Multicast);
    }
    if packet.to_loopback() {
        return Decision::drop(Verdict::Loopback);
    }
    if eth.destination != mac_words(&row.from_pod.destination) && !endpoint::is_plugin(row) {
        return Decision::drop(Verdict::DestinationMac);
    }
    if packet.is_later() {
        attempt!(fragment::lookup(row.network, Direction::FromPod, packet));
    }
    if packet.class == Class::Flow {
        return established(ctx, row, packet, [place.generation, place.epoch]);
    }
    Decision::NONE
}

/// The destination of the packet's flow, if the state that it was evaluated on is unchanged. `generations`: the
/// endpoint's generation and epoch.
#[inline(always)]
fn established(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generations: [u32; 2]) -> Decision {
    let Some(found) = flow::lookup(row.network, packet) else {
        return Decision::NONE;
    };
    if !flow::is_live(found) {
        return Decision::NONE;
    }
    let decision = current(row, generations, found, flow::is_second(packet));
    if decision.is_none() || decision == Decision::OTHER_NODE {
        return decision;
    }
    follow(ctx, row, packet, found, decision)
}

/// Processes a packet of a current flow.
#[inline(always)]
fn follow(ctx: &TcContext, row: &EndpointRow, packet: &Packet, found: &mut FlowValue, decision: Decision) -> Decision {
    let later = flow::refresh(found);
    // The port of a connection that both sides have closed may be another flow's at any moment.
    let may_be_lost = decision == Decision::UPLINK && found.flags & FLOW_CLOSED != 0;
    if (later || may_be_lost) && !flow::refresh_other(row.network, packet, found) {
        return Decision::NONE;
    }
    let mut decision = decision;
    if decision == Decision::UPLINK {
        decision = Decision::from_word(from_pod_leave(ctx.skb.skb, packet, found));
        if decision.reason().is_some() {
            return decision;
        }
    }
    if found.flags & FLOW_TRANSLATED != 0 {
        attempt!(translate::follow(ctx, packet, found));
    }
    // Between pods of a CNI plugin, the receiver's program sees the packet as well, and does this.
    let again = endpoint::is_plugin(row) && decision.endpoint().is_some();
    // Last: it may remove the row.
    if flow::changes_state(packet, found, later) && !again {
        flow::flow_change_state(row.network, packet, found, u32::from(later));
    }
    decision
}

/// [`leave`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_pod_leave(skb: *mut __sk_buff, packet: *const Packet, found: *const FlowValue) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: a row that stays mapped.
    let found = unsafe { found.as_ref() };
    let (Some(packet), Some(found)) = (packet, found) else {
        return Decision::NONE.word();
    };
    leave(&TcContext::new(skb), packet, found).word()
}

/// Checks and prepares a packet of a flow to outside; the way that it leaves by, or the reason to drop it.
#[inline(always)]
fn leave(ctx: &TcContext, packet: &Packet, found: &FlowValue) -> Decision {
    let second = flow::is_second(packet);
    if found.is_reply(second) {
        // To a host that came by a port of this node.
        attempt!(masquerade::prepare_egress(ctx, packet.v4));
        return Decision::UPLINK;
    }
    let (_, own) = found.sender(second);
    egress::leave(ctx, packet, own.id, &words(found.source))
}

/// Parses an IPv6 packet and checks its source; no decision where the packet may continue.
#[inline(always)]
fn ipv6(ctx: &TcContext, row: &EndpointRow, packet: &mut Packet) -> Decision {
    attempt!(packet::ipv6(ctx, packet));
    if packet.class == Class::LinkControl {
        return link_control(ctx, row, packet);
    }
    if packet.source != words(row.ipv6) || packet.source == [0; 4] {
        return Decision::drop(Verdict::SourceAddress);
    }
    if packet.to_link_local() {
        return Decision::drop(Verdict::LinkLocal);
    }
    Decision::NONE
}

#[inline(always)]
fn neighbour_decision(reply: Reply) -> Decision {
    match reply {
        Reply::Ready => Decision::REPLY,
        Reply::None => Decision::ABSORB,
    }
}

#[inline(always)]
fn arp(ctx: &TcContext, row: &EndpointRow) -> Decision {
    if endpoint::is_plugin(row) {
        attempt!(neighbour::check_arp(ctx, row));
        return Decision::STACK;
    }
    neighbour_decision(attempt!(neighbour::arp(ctx, row)))
}

#[inline(always)]
fn link_control(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Decision {
    if !packet.has_link_source() && packet.source != words(row.ipv6) {
        return Decision::drop(Verdict::SourceAddress);
    }
    if endpoint::is_plugin(row) {
        attempt!(neighbour::check(ctx, row, packet));
        return Decision::STACK;
    }
    neighbour_decision(neighbour::solicitation(ctx, row, packet))
}

/// The destination of the flow, if the state that it was evaluated on is unchanged. `second`: the packet's sender is
/// the second end.
#[inline(always)]
fn current(row: &EndpointRow, [generation, epoch]: [u32; 2], found: &FlowValue, second: bool) -> Decision {
    // Copied once: another flow may take over the row at any moment. The checks below are on the copies.
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    if sender.generation != generation || from != END_LOCAL {
        return Decision::NONE;
    }
    if to == END_LOCAL {
        // bpf_redirect_peer bypasses the destination's own program: its readiness is checked here, on every packet. So
        // is its network, which the generation implies unless the row was taken over while it was read.
        return match endpoint::row(receiver.id) {
            Some(there)
                if there.generation == receiver.generation
                    && there.network == row.network
                    && endpoint::is_ready(there) =>
            {
                Decision::local(receiver.id)
            }
            _ => Decision::NONE,
        };
    }
    if to == END_REMOTE || to == END_ROUTED {
        return Decision::OTHER_NODE;
    }
    // What is known about the far end may have changed since.
    if receiver.generation != epoch {
        return Decision::NONE;
    }
    match to {
        // Checked again although the flow was created by such an endpoint, for the same reason: this check keeps
        // isolated networks out of the stack.
        END_STACK if row.flags & FLAG_HOST_ACCESS != 0 => Decision::STACK,
        END_OUTSIDE => Decision::UPLINK,
        _ => Decision::NONE,
    }
}
