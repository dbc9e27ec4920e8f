//! Delivers packets that other nodes send to pods through the tunnel.
//!
//! - Hook: TC ingress of the tunnel device, which takes the metadata of tunnels (`external`).
//! - Reads `ENDPOINTS`, `ADDRESSES`, `ROUTES`, `NODES`, `POLICY`, `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`,
//!   `FLOWS6`, `FLOW_SHARES`, `FRAGMENTS_OUTSIDE`; counts.
//! - Order: tunnel, headers, link control, destination, the node that has the source, fragment, flow, then (for a packet
//!   without a current flow) ingress policy of the receiver, share of the flow tables.
//! - Falls through to: nothing. What is not for a pod is dropped.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{Direction, Verdict, address::words, uplink::OUTSIDE};

use super::from_node::{self, ARRIVED, Arrival};
use crate::{
    decision::Reason,
    endpoint, fragment,
    packet::{self, Class, Packet},
    remote,
    skb::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    work::Place,
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::FromOverlay);
    let mut arrival = Arrival::unknown();
    match from_overlay_arrive(ctx.skb.skb, &raw mut place, &raw mut packet, &raw mut arrival) {
        ARRIVED => from_node::deliver(ctx, &place, &packet, &arrival),
        reason => from_node::refuse(ctx, &place, &packet, reason),
    }
}

/// Parses the packet, and finds its receiver and the sender's node. Returns [`ARRIVED`] or the code of the reason to drop it.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_overlay_arrive(
    skb: *mut __sk_buff,
    place: *mut Place,
    packet: *mut Packet,
    arrival: *mut Arrival,
) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_mut() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_mut() };
    // SAFETY: as above.
    let arrival = unsafe { arrival.as_mut() };
    let (Some(place), Some(packet), Some(arrival)) = (place, packet, arrival) else {
        return Verdict::Truncated as u32;
    };
    match arrive(&TcContext::new(skb), place, packet, arrival) {
        Ok(()) => ARRIVED,
        Err(reason) => reason.word(),
    }
}

#[inline(always)]
fn arrive(ctx: &TcContext, place: &mut Place, packet: &mut Packet, arrival: &mut Arrival) -> Result<(), Reason> {
    let (network, underlay) = remote::tunnel(ctx).ok_or(Verdict::ForeignNode)?;
    if network == OUTSIDE {
        return Err(Verdict::UnknownNetwork.into());
    }
    place.network = network;
    read(ctx, place, packet)?;
    let found = endpoint::by_address(network, packet.destination).ok_or_else(|| missing(network, packet))?;
    let row = endpoint::row(found.endpoint).ok_or(Verdict::NoDestination)?;
    place.endpoint = found.endpoint;
    place.generation = endpoint::generation(row);
    place.epoch = endpoint::epoch(row);
    if !endpoint::is_current(row, network, found) {
        return Err(Verdict::DestinationNotReady.into());
    }
    let way = remote::route(network, &packet.source)
        .and_then(remote::way)
        .ok_or(Verdict::ForeignNode)?;
    let node = remote::row(way).ok_or(Verdict::ForeignNode)?;
    if !way.is_overlay() || words(node.underlay) != underlay {
        return Err(Verdict::ForeignNode.into());
    }
    if packet.is_later() {
        fragment::lookup(network, Direction::FromOverlay, packet)?;
    }
    arrival.way = way;
    arrival.sender = remote::end(way, node, place.epoch);
    Ok(())
}

/// Parses the headers.
#[inline(always)]
fn read(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> Result<(), Reason> {
    if skb::has_vlan_tag(ctx) {
        return Err(Verdict::VlanTagged.into());
    }
    let eth: EthHeader = skb::read(ctx, 0)?;
    place.ethertype = u16::from_be(eth.ethertype);
    match eth.ethertype {
        ETHERTYPE_IPV4 => packet::ipv4(ctx, packet)?,
        ETHERTYPE_IPV6 => packet::ipv6(ctx, packet)?,
        _ => return Err(Verdict::UnsupportedEthertype.into()),
    }
    if packet.is_multicast() {
        return Err(Verdict::Multicast.into());
    }
    if packet.class == Class::LinkControl || packet.to_link_local() {
        return Err(Verdict::LinkLocal.into());
    }
    Ok(())
}

/// Why no endpoint has the destination: a network that has a pod here has a route for all its addresses.
#[inline(always)]
fn missing(network: u32, packet: &Packet) -> Verdict {
    if remote::route(network, &packet.destination).is_none() {
        Verdict::UnknownNetwork
    } else {
        Verdict::NoDestination
    }
}
