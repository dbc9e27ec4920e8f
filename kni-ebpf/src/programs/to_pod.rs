//! What reaches a pod through the node's stack.
//!
//! - Hook: TC egress of the host interface. Minimum kernel 4.5 (clsact), 6.6 for TCX.
//! - Reads `ENDPOINTS`, `ADDRESSES`, `POLICY`, `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`, `FLOWS6`,
//!   `FLOW_SHARES`, `FRAGMENTS`; counts.
//! - Order: endpoint, VLAN, ARP, headers, link control, host access, destination kind, destination address, fragment,
//!   flow, then (for a packet of no current flow) source, ingress policy, share of the flow tables.
//! - Packets of `bpf_redirect_peer` never come by here; `from_pod` judges for both sides. So it does for pods of one CNI
//!   plugin, whose packets come by here, and for pods with a bounded rate, whose packets carry a mark that says so.

mod open;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS, JUDGED_MARK},
    flow::{FLOW_FROM, FLOW_TO, FlowValue, KIND_FROM_STACK, KIND_LOCAL},
};

use super::{DROP, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, onward};
use crate::{
    config,
    count::{self, Place},
    decision::{Decision, attempt},
    endpoint, flow, fragment,
    packet::{self, Class, Packet},
    skb::{self, EthHeader},
    story::{self, Work},
    translate,
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::ToPod);
    let mut decision = decide(ctx, &mut place, &mut packet);
    let known = !decision.is_none() && decision.reason().is_none();
    if known && !config::is_dry_run() {
        return carry_out(ctx, &place, decision);
    }
    // One row of an array: there is always one.
    let Some(work) = story::begin(&place, &packet) else {
        return DROP;
    };
    if decision.is_none()
        && let Some(row) = endpoint::row(place.endpoint)
    {
        decision = slow(ctx, row, &packet, work);
    }
    if let Some(reason) = decision.reason() {
        return count::dropped(ctx, &mut work.story, reason);
    }
    if config::is_dry_run() {
        story::answer(&mut work.story, decision.verdict() as u16, ctx.len());
        return DROP;
    }
    carry_out(ctx, &place, decision)
}

/// Packets of no current flow.
#[inline(always)]
fn slow(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::to_pod_icmp_error(skb, row, packet, work));
    }
    let decision = Decision::from_word(open::to_pod_open(skb, row, packet, work));
    if decision == Decision::AGAIN {
        return again(ctx, row, packet, work.story.generation);
    }
    decision
}

/// Not current after all when it was changed again in between: the next packet finds out how it is then.
#[inline(never)]
fn again(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generation: u32) -> Decision {
    let decision = established(ctx, row, packet, generation);
    if decision.is_none() {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    decision
}

#[inline(always)]
fn carry_out(ctx: &TcContext, place: &Place, decision: Decision) -> i32 {
    count::forwarded(place.endpoint, Direction::ToPod, decision.verdict(), ctx.len());
    if decision == Decision::DELIVER {
        onward(place.endpoint)
    } else {
        DROP
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
    if !endpoint::is_ready(row) {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    if endpoint::is_shaped(row) && skb::mark(ctx) == JUDGED_MARK {
        skb::set_mark(ctx, 0);
        return Decision::DELIVER;
    }
    let eth: EthHeader = attempt!(skb::read(ctx, 0));
    place.ethertype = u16::from_be(eth.ethertype);
    if skb::has_vlan_tag(ctx) || eth.ethertype == ETHERTYPE_VLAN || eth.ethertype == ETHERTYPE_QINQ {
        return Decision::drop(Verdict::VlanTagged);
    }
    match eth.ethertype {
        ETHERTYPE_IPV4 => attempt!(packet::ipv4(ctx, packet)),
        ETHERTYPE_IPV6 => attempt!(packet::ipv6(ctx, packet)),
        ETHERTYPE_ARP => return link_control(row),
        _ => return Decision::drop(Verdict::UnsupportedEthertype),
    }
    if packet.class == Class::LinkControl {
        return link_control(row);
    }
    if row.flags & FLAG_HOST_ACCESS == 0 {
        return Decision::drop(Verdict::HostNotAllowed);
    }
    if packet.to_many() {
        return Decision::drop(Verdict::Multicast);
    }
    if !has_address(row, packet) {
        return Decision::drop(Verdict::DestinationAddress);
    }
    if !packet.is_whole() {
        attempt!(fragment::resolve(row.network, Direction::ToPod, packet));
    }
    let opened_at_sender = packet.class == Class::Open && endpoint::is_plugins(row);
    if packet.class == Class::Flow || opened_at_sender {
        return established(ctx, row, packet, place.generation);
    }
    Decision::NONE
}

/// The node knows every pod by a permanent neighbour entry and asks nobody; a CNI plugin's pods ask each other.
#[inline(always)]
fn link_control(row: &EndpointRow) -> Decision {
    if endpoint::is_plugins(row) {
        Decision::DELIVER
    } else {
        Decision::ABSORB
    }
}

/// Whether the packet's flow was judged, and everything it was judged on still holds.
#[inline(always)]
fn established(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generation: u32) -> Decision {
    match flow::find(row.network, packet) {
        Some(found)
            if comes_here(row, packet, found) && found.destination_generation == generation && flow::is_live(found) =>
        {
            follow(ctx, row.network, packet, found)
        }
        _ => Decision::NONE,
    }
}

/// Whether packets of the flow come by here: out of the stack, or, between pods of a CNI plugin, judged at the sender and
/// carried by the plugin's datapath. The first packet of the latter has its flow already: the sender's program wrote it.
#[inline(always)]
fn comes_here(row: &EndpointRow, packet: &Packet, found: &FlowValue) -> bool {
    match found.kind {
        KIND_FROM_STACK => packet.class == Class::Flow,
        KIND_LOCAL => endpoint::is_plugins(row),
        _ => false,
    }
}

/// What every packet of a judged flow gets.
#[inline(always)]
fn follow(ctx: &TcContext, network: u32, packet: &Packet, found: &mut FlowValue) -> Decision {
    if flow::refresh(found) {
        flow::refresh_other(network, packet, found);
    }
    if found.flags & (FLOW_TO | FLOW_FROM) != 0 && !config::is_dry_run() {
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may take the row away.
    if flow::is_turning(packet, found) {
        flow::flow_turn(network, packet, found);
    }
    Decision::DELIVER
}

/// Whether the packet's destination is the endpoint's: a stale route or a reused interface index must not deliver.
#[inline(always)]
fn has_address(row: &EndpointRow, packet: &Packet) -> bool {
    let [.., v4] = packet.destination;
    if packet.v4 {
        v4 == u32::from_ne_bytes(row.ipv4) && v4 != 0
    } else {
        packet.destination == words(row.ipv6) && packet.destination != [0; 4]
    }
}
