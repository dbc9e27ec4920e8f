//! Enforces policy on packets that reach a pod through the node's stack.
//!
//! - Hook: TC egress of the host interface. Minimum kernel 4.5 (clsact), 6.6 for TCX.
//! - Reads `ENDPOINTS`, `ADDRESSES`, `ROUTES`, `NODES`, `POLICY`, `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes
//!   `FLOWS4`, `FLOWS6`, `FLOW_SHARES`, `FRAGMENTS_OUTSIDE`; counts.
//! - Order: endpoint, VLAN, ARP, headers, link control, host access, destination kind, destination address, fragment,
//!   flow, then (for a packet without a current flow) source, ingress policy, share of the flow tables.
//! - Packets of `bpf_redirect_peer` bypass this program; `from_pod` enforces the policies of both sides. It also does
//!   so for pods of one CNI plugin, whose packets pass through here, and for pods with a limited rate, whose packets
//!   carry a mark.

mod open;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{END_LOCAL, END_STACK, FLOW_TRANSLATED, FlowValue},
};

use crate::{
    action::{DROP, pass},
    config, count,
    decision::{Decision, attempt},
    endpoint, explanation, flow, fragment,
    packet::{self, Class, Packet},
    remote,
    skb::{self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, EthHeader},
    translate,
    work::{self, Place, Work},
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::ToPod);
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
            return count::dropped(ctx, &mut work.event, reason);
        }
        if config::is_dry_run() {
            if is_known {
                explanation::follow(place.network, &packet, work);
            }
            explanation::record(&mut work.event, decision.verdict() as u16, ctx.len());
            return DROP;
        }
    }
    if packet.is_first() {
        fragment::record(place.network, Direction::ToPod, &packet);
    }
    carry_out(ctx, &place, decision)
}

/// Decides about packets without a current flow.
#[inline(always)]
fn slow(ctx: &TcContext, row: &EndpointRow, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::to_pod_icmp_error(skb, row, packet, work));
    }
    let decision = Decision::from_word(open::to_pod_open(skb, row, packet, work));
    if decision == Decision::RENEWED {
        return after_renewal(ctx, row, packet, work.event.endpoint);
    }
    decision
}

/// Processes a packet whose flow was re-evaluated. What it was evaluated on may have changed again: that concerns the
/// next packet. Another flow that has replaced the row meanwhile was evaluated as well.
#[inline(never)]
fn after_renewal(ctx: &TcContext, row: &EndpointRow, packet: &Packet, endpoint: u32) -> Decision {
    let decision = match flow::lookup(row.network, packet) {
        Some(found) => {
            let (to, receiver) = found.receiver(flow::is_second(packet));
            if to == END_LOCAL && receiver.id == endpoint {
                follow(ctx, row.network, packet, found)
            } else {
                Decision::NONE
            }
        }
        None => Decision::NONE,
    };
    decision.or_drop(Verdict::EndpointNotReady)
}

#[inline(always)]
fn carry_out(ctx: &TcContext, place: &Place, decision: Decision) -> i32 {
    count::forwarded(place.endpoint, Direction::ToPod, decision.verdict(), ctx.len());
    if decision == Decision::DELIVER {
        pass(place.endpoint)
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
    place.epoch = endpoint::epoch(row);
    if !endpoint::is_ready(row) {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    if endpoint::is_shaped(row) && config::is_evaluated(skb::mark(ctx)) {
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
    if packet.is_multicast() {
        return Decision::drop(Verdict::Multicast);
    }
    if !has_address(row, packet) {
        return Decision::drop(Verdict::DestinationAddress);
    }
    if packet.is_later() {
        attempt!(fragment::lookup(row.network, Direction::ToPod, packet));
    }
    let opened_at_sender = packet.class == Class::Open && endpoint::is_plugin(row);
    if packet.class == Class::Flow || opened_at_sender {
        return established(ctx, row, packet, [place.generation, place.epoch]);
    }
    Decision::NONE
}

/// The node has a permanent neighbour entry for every pod and sends no request; a CNI plugin's pods ask each other.
#[inline(always)]
fn link_control(row: &EndpointRow) -> Decision {
    if endpoint::is_plugin(row) {
        Decision::DELIVER
    } else {
        Decision::ABSORB
    }
}

/// Delivers the packet if its flow exists and the state that it was evaluated on is unchanged. `generations`: the
/// endpoint's generation and epoch.
#[inline(always)]
fn established(ctx: &TcContext, row: &EndpointRow, packet: &Packet, generations: [u32; 2]) -> Decision {
    match flow::lookup(row.network, packet) {
        Some(found) if is_current(ctx, row, packet, found, generations) && flow::is_live(found) => {
            follow(ctx, row.network, packet, found)
        }
        _ => Decision::NONE,
    }
}

/// Whether this program sees packets of the flow, and the state that it was evaluated on is unchanged. They come from
/// the stack, or, between pods of a CNI plugin, were evaluated at the sender and forwarded by the plugin's datapath. In
/// the latter case the first packet has a flow already: the sender's program wrote it. No pod of this node sends by the
/// uplink, nor is it the node.
#[inline(always)]
fn is_current(
    ctx: &TcContext,
    row: &EndpointRow,
    packet: &Packet,
    found: &FlowValue,
    [generation, epoch]: [u32; 2],
) -> bool {
    let second = flow::is_second(packet);
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    let expected = match from {
        END_STACK => {
            packet.class == Class::Flow
                && sender.generation == epoch
                && (sender.id == 0 || sender.id == skb::ingress_ifindex(ctx))
        }
        END_LOCAL => {
            let ingress = skb::ingress_ifindex(ctx);
            endpoint::is_plugin(row) && ingress != remote::NODE && !config::is_uplink(ingress)
        }
        _ => false,
    };
    expected && to == END_LOCAL && receiver.generation == generation
}

/// Processes a packet of a current flow.
#[inline(always)]
fn follow(ctx: &TcContext, network: u32, packet: &Packet, found: &mut FlowValue) -> Decision {
    let later = flow::refresh(found);
    if later {
        flow::refresh_other(network, packet, found);
    }
    if found.flags & FLOW_TRANSLATED != 0 {
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found, later) {
        flow::flow_change_state(network, packet, found, u32::from(later));
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
