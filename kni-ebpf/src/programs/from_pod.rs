//! Enforces policy on packets that a pod sends, and forwards them.
//!
//! - Hook: TC ingress of the host interface. Minimum kernel 5.10 (`bpf_redirect_peer`).
//! - Reads `ENDPOINTS`, `INTERFACES`, `ADDRESSES`, `ROUTES`, `SERVICES`, `BACKENDS`, `MASQUERADE`, `POLICY`, `PORTS`,
//!   `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`, `FLOWS6`, `FLOW_SHARES`, `AFFINITY`, `FRAGMENTS`; counts.
//! - Order: endpoint, VLAN, source MAC, ARP, headers, link control, source address, destination kind (link-local,
//!   multicast, loopback), destination MAC, fragment, flow, then (for a packet without a current flow) service,
//!   destination, egress policy of the sender, ingress policy of a local receiver, share of the flow tables.
//! - Falls through to: the node's stack, only for endpoints with host access.
//! - At an interface that a CNI plugin created, it applies policy and passes packets on instead of redirecting or
//!   answering.

mod open;

use aya_ebpf::{helpers::bpf_redirect_neigh, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    event::FlowEvent,
    flow::{FLOW_FROM, FLOW_TO, FlowValue, KIND_LOCAL, KIND_TO_STACK, KIND_UPLINK},
};

use crate::{
    action::{DROP, pass, redirect_peer},
    config, count,
    decision::{Decision, attempt},
    endpoint, explanation, flow, fragment, masquerade,
    neighbour::{self, Answer, mac_words},
    packet::{self, Class, Packet},
    reject,
    skb::{self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, EthHeader},
    translate,
    work::{self, Place, Work},
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::FromPod);
    let mut decision = decide(ctx, &mut place, &mut packet);
    let is_known = !decision.is_none() && decision.reason().is_none();
    if !is_known || config::is_dry_run() {
        // One row of an array: there is always one.
        let Some(work) = work::begin(&place, &packet) else {
            return DROP;
        };
        if decision.is_none()
            && let Some(row) = endpoint::row(place.endpoint)
        {
            decision = slow(ctx, row, &packet, work);
        }
        if let Some(reason) = decision.reason() {
            return refuse(ctx, &packet, &mut work.event, reason);
        }
        if config::is_dry_run() {
            explanation::record(&mut work.event, decision.verdict() as u16, ctx.len());
            return DROP;
        }
    }
    carry_out(ctx, &place, decision)
}

/// Decides about packets without a current flow.
#[inline(always)]
fn slow(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::from_pod_icmp_error(skb, row, packet, work));
    }
    let decision = Decision::from_word(open::from_pod_open(skb, row, packet, work));
    if decision == Decision::RENEWED {
        return after_renewal(ctx, row, packet, work.event.generation);
    }
    if decision == Decision::MASQUERADE {
        return Decision::from_word(open::from_pod_masquerade(skb, packet, work));
    }
    decision
}

/// A further change in between leaves the flow without a decision: the next packet is evaluated again.
#[inline(never)]
fn after_renewal(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generation: u32) -> Decision {
    established(ctx, row, packet, generation).or_drop(Verdict::DestinationNotReady)
}

#[inline(always)]
fn carry_out(ctx: &TcContext, place: &Place, decision: Decision) -> i32 {
    if let Some(destination) = decision.endpoint() {
        return deliver(ctx, place, destination);
    }
    let verdict = decision.verdict();
    count::forwarded(place.endpoint, Direction::FromPod, verdict, ctx.len());
    match decision {
        Decision::STACK => pass(place.endpoint),
        Decision::ANSWER => send_back(ctx),
        Decision::UPLINK => redirect_to_uplink(),
        _ => DROP,
    }
}

/// Drops the packet, or rejects it where the sender can learn the reason, so that clients fail at once.
#[inline(always)]
fn refuse(ctx: &TcContext, packet: &Packet, event: &mut FlowEvent, reason: u16) -> i32 {
    let action = count::dropped(ctx, event, reason);
    if config::is_dry_run() {
        return action;
    }
    let has_answer = reason == Verdict::NoServicePort as u16
        || reason == Verdict::NoBackend as u16
        || reason == Verdict::TooBig as u16
        || reason == Verdict::TimeExceeded as u16;
    if has_answer && reject::answer_refusal(ctx.skb.skb, packet, u32::from(reason)) != 0 {
        return redirect_peer(skb::ifindex(ctx));
    }
    action
}

/// Sends the packet out of the node. The kernel looks up the next hop among the uplink's routes and its MAC address.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
fn redirect_to_uplink() -> i32 {
    let Some(config) = config::get() else {
        return DROP;
    };
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect_neigh(config.uplink, core::ptr::null_mut(), 0, 0) as i32 }
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
    if !endpoint::is_ready(row) {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    let eth: EthHeader = attempt!(skb::read(ctx, 0));
    place.ethertype = u16::from_be(eth.ethertype);
    if skb::has_vlan_tag(ctx) || eth.ethertype == ETHERTYPE_VLAN || eth.ethertype == ETHERTYPE_QINQ {
        return Decision::drop(Verdict::VlanTagged);
    }
    if eth.source != mac_words(&row.mac) {
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
    if eth.destination != mac_words(&row.host_mac) && !endpoint::is_plugin(row) {
        return Decision::drop(Verdict::DestinationMac);
    }
    if !packet.is_whole() {
        attempt!(fragment::resolve(row.network, Direction::FromPod, packet));
    }
    if packet.class == Class::Flow {
        return established(ctx, row, packet, place.generation);
    }
    Decision::NONE
}

/// The destination of the packet's flow, if the state that it was evaluated on is unchanged.
#[inline(always)]
fn established(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generation: u32) -> Decision {
    let Some(found) = flow::find(row.network, packet) else {
        return Decision::NONE;
    };
    if !flow::is_live(found) {
        return Decision::NONE;
    }
    let decision = current(row, generation, found);
    if decision.is_none() {
        return Decision::NONE;
    }
    follow(ctx, row.network, packet, found, decision)
}

/// Processes a packet of a current flow.
#[inline(always)]
fn follow(ctx: &TcContext, network: u32, packet: &Packet, found: &mut FlowValue, decision: Decision) -> Decision {
    if flow::refresh(found) {
        flow::refresh_other(network, packet, found);
    }
    if config::is_dry_run() {
        return decision;
    }
    if found.kind == KIND_UPLINK {
        attempt!(masquerade::prepare_egress(ctx, packet.v4));
    }
    if found.flags & (FLOW_TO | FLOW_FROM) != 0 {
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found) {
        flow::flow_change_state(network, packet, found);
    }
    decision
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
fn neighbour_decision(answer: Answer) -> Decision {
    match answer {
        Answer::Ready => Decision::ANSWER,
        Answer::None => Decision::ABSORB,
    }
}

#[inline(always)]
fn arp(ctx: &TcContext, row: &EndpointRow) -> Decision {
    if endpoint::is_plugin(row) {
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
        return Decision::STACK;
    }
    neighbour_decision(neighbour::solicitation(ctx, row, packet))
}

/// The destination of the flow, if the state that it was evaluated on is unchanged.
#[inline(always)]
fn current(row: &EndpointRow, generation: u32, found: &FlowValue) -> Decision {
    if found.source_generation != generation {
        return Decision::NONE;
    }
    if found.kind == KIND_TO_STACK {
        // Checked again although the flow was created by such an endpoint: a row can be evicted and refilled by another
        // network's flow while it is read, and this check keeps isolated networks out of the stack.
        return if row.flags & FLAG_HOST_ACCESS == 0 {
            Decision::NONE
        } else {
            Decision::STACK
        };
    }
    if found.kind == KIND_UPLINK {
        return Decision::UPLINK;
    }
    if found.kind != KIND_LOCAL {
        return Decision::NONE;
    }
    // bpf_redirect_peer bypasses the destination's own program: its readiness is checked here, on every packet. So is
    // its network, which the generation implies as long as both tables have existed equally long.
    match endpoint::row(found.destination) {
        Some(there)
            if there.generation == found.destination_generation
                && there.network == row.network
                && endpoint::is_ready(there) =>
        {
            Decision::local(found.destination)
        }
        _ => Decision::NONE,
    }
}

/// Writes the MAC addresses that the destination expects and sends the packet into its namespace.
#[inline(always)]
fn deliver(ctx: &TcContext, place: &Place, destination: u32) -> i32 {
    let length = ctx.len();
    // Both existed a moment ago, and neither goes away while the program runs.
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return DROP;
    };
    if endpoint::is_plugin(row) {
        count::forwarded(place.endpoint, Direction::FromPod, Verdict::PassedToStack, length);
        return pass(place.endpoint);
    }
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.mac);
    eth.source = mac_words(&row.host_mac);
    count::forwarded(place.endpoint, Direction::FromPod, Verdict::Redirected, length);
    if endpoint::is_shaped(row) {
        return endpoint::redirect_through_host_end(ctx, row.ifindex);
    }
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    redirect_peer(row.ifindex)
}

/// Sends the rewritten packet back into the pod.
#[inline(always)]
fn send_back(ctx: &TcContext) -> i32 {
    const PACKET_HOST: u32 = 0;
    // The request was a broadcast or multicast, the reply is not. On failure the type stays, which receivers of ARP and
    // neighbour discovery accept too.
    let _kept_on_failure = ctx.change_type(PACKET_HOST);
    redirect_peer(skb::ifindex(ctx))
}
