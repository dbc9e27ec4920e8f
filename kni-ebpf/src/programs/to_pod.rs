//! What reaches a pod through the node's stack.
//!
//! - Hook: TC egress of the host interface. Minimum kernel 4.5 (clsact), 6.6 for TCX.
//! - Reads `ENDPOINTS`; reads and writes `FLOWS4`, `FLOWS6`, `FRAGMENTS`; counts.
//! - Order: endpoint, VLAN, ARP, headers, link control, host access, destination kind, destination address, fragment,
//!   flow.
//! - Packets of `bpf_redirect_peer` never come by here; `from_pod` judges for both sides.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{KIND_FROM_STACK, KIND_TO_STACK},
};

use super::{DROP, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, NEXT};
use crate::{
    count::{self, Place},
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    fragment,
    packet::{self, Class, Packet},
    skb::{self, EthHeader},
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place {
        endpoint: 0,
        network: 0,
        generation: 0,
        direction: Direction::ToPod,
        ethertype: 0,
    };
    let decision = decide(ctx, &mut place, &mut packet);
    if let Some(reason) = decision.reason() {
        return count::dropped(ctx, &place, &packet, reason);
    }
    if decision == Decision::DELIVER {
        count::forwarded(place.endpoint, Direction::ToPod, Verdict::Delivered, ctx.len());
        return NEXT;
    }
    count::forwarded(place.endpoint, Direction::ToPod, Verdict::Absorbed, ctx.len());
    DROP
}

#[inline(always)]
fn decide(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> Decision {
    let endpoint = endpoint::of_interface(ctx);
    let Some(row) = endpoint::row(endpoint) else {
        return Decision::drop(Verdict::NoEndpoint);
    };
    place.endpoint = endpoint;
    place.network = row.network;
    place.generation = row.generation;
    if !endpoint::is_ready(row) {
        return Decision::drop(Verdict::EndpointNotReady);
    }
    let eth: EthHeader = attempt!(skb::read(ctx, 0));
    place.ethertype = u16::from_be(eth.ethertype);
    if skb::has_vlan_tag(ctx) || eth.ethertype == ETHERTYPE_VLAN || eth.ethertype == ETHERTYPE_QINQ {
        return Decision::drop(Verdict::VlanTagged);
    }
    match eth.ethertype {
        ETHERTYPE_IPV4 => attempt!(packet::ipv4(ctx, packet)),
        ETHERTYPE_IPV6 => attempt!(packet::ipv6(ctx, packet)),
        // The node knows every pod by a permanent neighbour entry and asks nobody.
        ETHERTYPE_ARP => return Decision::ABSORB,
        _ => return Decision::drop(Verdict::UnsupportedEthertype),
    }
    if packet.class == Class::LinkControl {
        return Decision::ABSORB;
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
    attempt!(fragment::resolve(row.network, Direction::ToPod, packet));
    flow_of(ctx, endpoint, row, packet)
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

/// Lets the packet through and makes sure that its answers take the same way back.
#[inline(always)]
fn flow_of(ctx: &TcContext, endpoint: u32, row: &EndpointRow, packet: &Packet) -> Decision {
    if packet.class == Class::IcmpError {
        return icmp_error(ctx, row, packet);
    }
    if packet.class == Class::Flow
        && let Some(found) = flow::find(row.network, packet)
        && found.kind == KIND_FROM_STACK
        && found.destination_generation == row.generation
    {
        flow::refresh(found);
        return Decision::DELIVER;
    }
    attempt!(flow::create(
        row.network,
        packet,
        &NewFlow {
            kind: KIND_FROM_STACK,
            answer_kind: KIND_TO_STACK,
            source: 0,
            source_generation: 0,
            destination: endpoint,
            destination_generation: row.generation,
        },
    ));
    Decision::DELIVER
}

/// An ICMP error from the stack must be about a packet that this pod sent into the stack.
#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Decision {
    let mut inner = Packet::unknown();
    attempt!(packet::quoted(ctx, packet, &mut inner));
    if inner.source != packet.destination {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    match flow::find(row.network, &inner) {
        Some(found) if found.kind == KIND_TO_STACK && found.source_generation == row.generation => Decision::DELIVER,
        _ => Decision::drop(Verdict::IcmpUnrelated),
    }
}
