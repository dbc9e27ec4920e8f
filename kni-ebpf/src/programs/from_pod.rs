//! What a pod sends.
//!
//! - Hook: TC ingress of the host interface. Minimum kernel 5.10 (`bpf_redirect_peer`).
//! - Reads `ENDPOINTS`, `ADDRESSES`, `ROUTES`; reads and writes `FLOWS4`, `FLOWS6`, `FRAGMENTS`; counts.
//! - Order: endpoint, VLAN, source MAC, ARP, headers, link control, source address, destination kind (link-local,
//!   multicast, loopback), destination MAC, fragment, flow, then (for a packet of no current flow) destination.
//! - Falls through to: the node's stack, only for endpoints with host access.

use aya_ebpf::{btf_maps::lpm_trie::Key, helpers::bpf_redirect_peer, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::{bytes, words},
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{FlowValue, KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK},
    route::{ACTION_STACK, FULL_PREFIX, RouteData},
};

use super::{DROP, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, NEXT};
use crate::{
    count::{self, Place},
    decision::{Decision, attempt},
    endpoint,
    flow::{self, NewFlow},
    fragment,
    maps::ROUTES,
    neighbour::{self, Answer, mac_words},
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
        direction: Direction::FromPod,
        ethertype: 0,
    };
    let decision = decide(ctx, &mut place, &mut packet);
    if let Some(destination) = decision.endpoint() {
        return deliver(ctx, &place, &packet, destination);
    }
    if let Some(reason) = decision.reason() {
        return count::dropped(ctx, &place, &packet, reason);
    }
    match decision {
        Decision::STACK => {
            count::forwarded(place.endpoint, Direction::FromPod, Verdict::PassedToStack, ctx.len());
            NEXT
        }
        Decision::ANSWER => answer(ctx, &place),
        _ => {
            count::forwarded(place.endpoint, Direction::FromPod, Verdict::Absorbed, ctx.len());
            DROP
        }
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
    place.generation = row.generation;
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
        ETHERTYPE_ARP => return link_answer(attempt!(neighbour::arp(ctx, row))),
        _ => return Decision::drop(Verdict::UnsupportedEthertype),
    }
    if packet.to_many() {
        return Decision::drop(Verdict::Multicast);
    }
    if packet.to_loopback() {
        return Decision::drop(Verdict::Loopback);
    }
    if eth.destination != mac_words(&row.host_mac) {
        return Decision::drop(Verdict::DestinationMac);
    }
    attempt!(fragment::resolve(row.network, Direction::FromPod, packet));
    if packet.class == Class::Flow
        && let Some(found) = flow::find(row.network, packet)
    {
        let decision = current(row, found);
        if !decision.is_none() {
            flow::refresh(found);
            return decision;
        }
    }
    slow(ctx, endpoint, row, packet)
}

/// Reads an IPv6 packet and judges its source; no decision where the packet may go on.
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
fn link_answer(answer: Answer) -> Decision {
    match answer {
        Answer::Ready => Decision::ANSWER,
        Answer::None => Decision::ABSORB,
    }
}

#[inline(always)]
fn link_control(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Decision {
    if !packet.from_link() && packet.source != words(row.ipv6) {
        return Decision::drop(Verdict::SourceAddress);
    }
    link_answer(neighbour::solicitation(ctx, row, packet))
}

/// Where the flow goes, if everything it was decided on still holds.
#[inline(always)]
fn current(row: &EndpointRow, found: &FlowValue) -> Decision {
    if found.source_generation != row.generation {
        return Decision::NONE;
    }
    if found.kind == KIND_TO_STACK {
        // Asked again although the flow was made by such an endpoint: a row can be evicted and refilled by another
        // network's flow while it is read, and this is what keeps isolated networks out of the stack.
        return if row.flags & FLAG_HOST_ACCESS == 0 {
            Decision::NONE
        } else {
            Decision::STACK
        };
    }
    if found.kind != KIND_LOCAL {
        return Decision::NONE;
    }
    // bpf_redirect_peer skips the destination's own program: its readiness is judged here, on every packet. So is its
    // network, which the generation vouches for already, as long as both tables have lived equally long.
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

/// Packets of no current flow: ICMP errors, first packets, packets after a change.
#[inline(always)]
fn slow(ctx: &TcContext, endpoint: u32, row: &EndpointRow, packet: &Packet) -> Decision {
    if packet.class == Class::IcmpError {
        return icmp_error(ctx, row, packet);
    }
    if answers_stack(row, packet) {
        return to_stack(row, packet);
    }
    let Some(found) = endpoint::by_address(row.network, packet.destination) else {
        return beyond(row, packet);
    };
    if found.endpoint == endpoint {
        return Decision::drop(Verdict::SelfAddressed);
    }
    let Some(destination) = endpoint::row(found.endpoint) else {
        return Decision::drop(Verdict::DestinationNotReady);
    };
    if !endpoint::is_current(destination, row.network, found) {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    attempt!(flow::create(
        row.network,
        packet,
        &NewFlow {
            kind: KIND_LOCAL,
            answer_kind: KIND_LOCAL,
            source: endpoint,
            source_generation: row.generation,
            destination: found.endpoint,
            destination_generation: destination.generation,
        },
    ));
    Decision::local(found.endpoint)
}

/// Whether the other direction came through the stack, although the row that says so for this one is gone (evicted, or
/// its map was replaced): whoever translates there must still see the answer.
#[inline(always)]
fn answers_stack(row: &EndpointRow, packet: &Packet) -> bool {
    if row.flags & FLAG_HOST_ACCESS == 0 || packet.class != Class::Flow {
        return false;
    }
    match flow::find(row.network, &flow::reversed(packet)) {
        Some(found) => found.kind == KIND_FROM_STACK && found.destination_generation == row.generation,
        None => false,
    }
}

/// The destination is not a local endpoint.
#[inline(always)]
fn beyond(row: &EndpointRow, packet: &Packet) -> Decision {
    let key = Key::new(
        FULL_PREFIX,
        RouteData {
            network: row.network.to_be_bytes(),
            address: bytes(packet.destination),
        },
    );
    let Some(route) = ROUTES.get(&key) else {
        return Decision::drop(Verdict::NoRoute);
    };
    if route.action != ACTION_STACK {
        return Decision::drop(Verdict::NoDestination);
    }
    if row.flags & FLAG_HOST_ACCESS == 0 {
        return Decision::drop(Verdict::NoRoute);
    }
    to_stack(row, packet)
}

/// Hands a flow to the stack, its answers included.
#[inline(always)]
fn to_stack(row: &EndpointRow, packet: &Packet) -> Decision {
    attempt!(flow::create(
        row.network,
        packet,
        &NewFlow {
            kind: KIND_TO_STACK,
            answer_kind: KIND_FROM_STACK,
            source: 0,
            source_generation: row.generation,
            destination: 0,
            destination_generation: 0,
        },
    ));
    Decision::STACK
}

/// A pod's ICMP error goes where the pod's own packets of the quoted flow go, so that a translation in the stack also
/// sees it. It must be about a packet that this pod received from the one it tells.
#[inline(always)]
fn icmp_error(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Decision {
    let mut inner = Packet::unknown();
    attempt!(packet::quoted(ctx, packet, &mut inner));
    if inner.source != packet.destination || inner.destination != packet.source {
        return Decision::drop(Verdict::IcmpUnrelated);
    }
    let Some(found) = flow::find(row.network, &flow::reversed(&inner)) else {
        return Decision::drop(Verdict::IcmpUnrelated);
    };
    let decision = current(row, found);
    if decision.is_none() {
        Decision::drop(Verdict::IcmpUnrelated)
    } else {
        decision
    }
}

/// Writes the MAC addresses that the destination expects and sends the packet into its namespace.
#[inline(always)]
fn deliver(ctx: &TcContext, place: &Place, packet: &Packet, destination: u32) -> i32 {
    let length = ctx.len();
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return count::dropped(ctx, place, packet, Verdict::DestinationNotReady as u16);
    };
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.mac);
    eth.source = mac_words(&row.host_mac);
    count::forwarded(place.endpoint, Direction::FromPod, Verdict::Redirected, length);
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    redirect_peer(row.ifindex)
}

/// Sends the rewritten packet back into the pod.
#[inline(always)]
fn answer(ctx: &TcContext, place: &Place) -> i32 {
    const PACKET_HOST: u32 = 0;
    count::forwarded(place.endpoint, Direction::FromPod, Verdict::Answered, ctx.len());
    // The question was a broadcast or multicast, the answer is not. A failure leaves the type, which receivers of ARP
    // and neighbour discovery accept too.
    let _kept_on_failure = ctx.change_type(PACKET_HOST);
    redirect_peer(skb::ifindex(ctx))
}

/// `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` where the kernel refuses.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}
