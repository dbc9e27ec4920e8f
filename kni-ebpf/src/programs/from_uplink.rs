//! What comes into the node for a pod: answers to what left with the node's address, and ports of the node that are a
//! pod's.
//!
//! - Hook: TC ingress of the uplink.
//! - Reads `ENDPOINTS`, `HOST_PORTS`, `POLICY`, `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`, `FLOWS6`,
//!   `FLOW_SHARES`, `FRAGMENTS`; counts.
//! - Order: headers, fragment, flow, ICMP error, node port.
//! - Falls through to: the node's stack, with everything that is not for a pod, also with what it does not understand.

mod open;

use aya_ebpf::{helpers::bpf_redirect_peer, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    endpoint::EndpointRow,
    flow::{FlowValue, KIND_UPLINK},
    uplink::OUTSIDE,
};

use super::{DROP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, NEXT};
use crate::{
    config,
    count::{self, Place},
    decision::{Decision, attempt},
    endpoint, flow, fragment,
    neighbour::mac_words,
    packet::{self, Class, Packet},
    skb::{self, EthHeader},
    story::{self, Work},
    translate,
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
        let Some(work) = story::begin(&place, &packet) else {
            return DROP;
        };
        decision = slow(ctx, &packet, work);
        if let Some(reason) = decision.reason() {
            return count::dropped(ctx, &mut work.story, reason);
        }
    } else if let Some(reason) = decision.reason() {
        return match story::begin(&place, &packet) {
            Some(work) => count::dropped(ctx, &mut work.story, reason),
            None => DROP,
        };
    }
    match decision.endpoint() {
        Some(endpoint) => deliver(ctx, endpoint),
        None => NEXT,
    }
}

/// Packets of no current flow.
#[inline(always)]
fn slow(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let skb = ctx.skb.skb;
    if packet.class == Class::IcmpError {
        return Decision::from_word(open::from_uplink_icmp_error(skb, packet, work));
    }
    let decision = Decision::from_word(open::from_uplink_open(skb, packet, work));
    if decision == Decision::AGAIN {
        return again(ctx, packet);
    }
    decision
}

/// Not current after all when it was changed again in between: the next packet finds out how it is then.
#[inline(never)]
fn again(ctx: &TcContext, packet: &Packet) -> Decision {
    let decision = established(ctx, packet);
    if decision.is_none() {
        return Decision::drop(Verdict::DestinationNotReady);
    }
    decision
}

/// Reads the headers. False for what is left to the stack.
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
    if understood.is_err() || packet.class == Class::LinkControl || packet.to_many() || packet.to_link_local() {
        return false;
    }
    packet.is_whole() || fragment::resolve(OUTSIDE, Direction::FromUplink, packet).is_ok()
}

/// The pod that the packet's flow belongs to, if everything it was judged on still holds.
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

/// Whether the row's endpoint is there and as it was when the flow was judged.
#[inline(always)]
fn is_current(there: &EndpointRow, found: &FlowValue) -> bool {
    found.kind == KIND_UPLINK
        && endpoint::is_ready(there)
        && there.generation == found.destination_generation
        && flow::is_live(found)
}

/// What every packet of a judged flow gets.
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
    // Last: it may take the row away.
    if flow::is_turning(packet, found) {
        flow::flow_turn(OUTSIDE, packet, found);
    }
    Decision::local(endpoint)
}

/// Writes the MAC addresses that the pod expects and sends the packet into its namespace.
#[inline(always)]
fn deliver(ctx: &TcContext, destination: u32) -> i32 {
    let length = ctx.len();
    // Both were there a moment ago, and neither goes away while the program runs.
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return DROP;
    };
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.mac);
    eth.source = mac_words(&row.host_mac);
    if endpoint::is_shaped(row) {
        return endpoint::through_host_end(ctx, row.ifindex);
    }
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    #[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
    // SAFETY: a helper with plain arguments.
    unsafe {
        bpf_redirect_peer(row.ifindex, 0) as i32
    }
}
