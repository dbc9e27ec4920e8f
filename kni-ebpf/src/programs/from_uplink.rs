//! Forwards packets from outside to pods: replies to masqueraded flows, and packets to node ports of pods.
//!
//! - Hook: TC ingress of the uplink.
//! - Reads `ENDPOINTS`, `HOST_PORTS`, `POLICY`, `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`, `FLOWS6`,
//!   `FLOW_SHARES`, `FRAGMENTS`; counts.
//! - Order: headers, fragment, flow, ICMP error, node port.
//! - Falls through to: the node's stack, for everything that is not for a pod or cannot be parsed.

mod open;

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    endpoint::EndpointRow,
    flow::{FlowValue, KIND_UPLINK},
    uplink::OUTSIDE,
};

use crate::{
    action::{DROP, NEXT, redirect_peer},
    config, count,
    decision::{Decision, attempt},
    endpoint, flow, fragment,
    neighbour::mac_words,
    packet::{self, Class, Packet},
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
        // One row of an array: there is always one.
        let Some(work) = work::begin(&place, &packet) else {
            return DROP;
        };
        decision = slow(ctx, &packet, work);
        if let Some(reason) = decision.reason() {
            return count::dropped(ctx, &mut work.event, reason);
        }
    } else if let Some(reason) = decision.reason() {
        return match work::begin(&place, &packet) {
            Some(work) => count::dropped(ctx, &mut work.event, reason),
            None => DROP,
        };
    }
    match decision.endpoint() {
        Some(endpoint) => deliver(ctx, endpoint),
        None => NEXT,
    }
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

/// A further change in between leaves the flow without a decision: the next packet is evaluated again.
#[inline(never)]
fn after_renewal(ctx: &TcContext, packet: &Packet) -> Decision {
    established(ctx, packet).or_drop(Verdict::DestinationNotReady)
}

/// Parses the headers. False for packets that are left to the stack.
#[inline(always)]
fn read(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> bool {
    let Ok(eth) = skb::read::<EthHeader>(ctx, 0) else {
        return false;
    };
    place.ethertype = u16::from_be(eth.ethertype);
    let understood = match eth.ethertype {
        ETHERTYPE_IPV4 => packet::ipv4(ctx, packet),
        ETHERTYPE_IPV6 => packet::ipv6(ctx, packet),
        _ => return false,
    };
    if understood.is_err() || packet.class == Class::LinkControl || packet.is_multicast() || packet.to_link_local() {
        return false;
    }
    packet.is_whole() || fragment::resolve(OUTSIDE, Direction::FromUplink, packet).is_ok()
}

/// The pod of the packet's flow, if the state that the flow was evaluated on is unchanged.
#[inline(always)]
fn established(ctx: &TcContext, packet: &Packet) -> Decision {
    if packet.class != Class::Flow {
        return Decision::NONE;
    }
    let Some(found) = flow::find(OUTSIDE, packet) else {
        return Decision::NONE;
    };
    match endpoint::row(found.destination) {
        Some(there) if is_current(there, found) => follow(ctx, packet, found),
        _ => Decision::NONE,
    }
}

/// Whether the row's endpoint exists and is unchanged since the flow was evaluated.
#[inline(always)]
fn is_current(there: &EndpointRow, found: &FlowValue) -> bool {
    found.kind == KIND_UPLINK
        && endpoint::is_ready(there)
        && there.generation == found.destination_generation
        && flow::is_live(found)
}

/// Processes a packet of a current flow.
#[inline(always)]
fn follow(ctx: &TcContext, packet: &Packet, found: &mut FlowValue) -> Decision {
    if flow::refresh(found) {
        flow::refresh_other(OUTSIDE, packet, found);
    }
    let endpoint = found.destination;
    if !config::is_dry_run() {
        attempt!(translate::hop(ctx, packet.v4));
        attempt!(translate::follow(ctx, packet, found));
    }
    // Last: it may remove the row.
    if flow::changes_state(packet, found) {
        flow::flow_change_state(OUTSIDE, packet, found);
    }
    Decision::local(endpoint)
}

/// Writes the MAC addresses that the pod expects and sends the packet into its namespace.
#[inline(always)]
fn deliver(ctx: &TcContext, destination: u32) -> i32 {
    let length = ctx.len();
    // Both existed a moment ago, and neither goes away while the program runs.
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return DROP;
    };
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.mac);
    eth.source = mac_words(&row.host_mac);
    if endpoint::is_shaped(row) {
        return endpoint::redirect_through_host_end(ctx, row.ifindex);
    }
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    redirect_peer(row.ifindex)
}
