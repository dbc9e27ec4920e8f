//! Delivers packets that other nodes send to pods through the tunnel, and forwards those that leave by this node.
//!
//! - Hook: TC ingress of the tunnel device, which takes the metadata of tunnels (`external`).
//! - Reads `NETWORKS`, `OVERLAY`, `ENDPOINTS`, `ADDRESSES`, `HOST_PORTS`, `ROUTES`, `NODES`, `EGRESS_SHARES`, `POLICY`,
//!   `PORTS`, `IDENTITIES`, `CONFIG`; reads and writes `FLOWS4`, `FLOWS6`, `NAT4`, `NAT6`, `FLOW_SHARES`,
//!   `FRAGMENTS_OUTSIDE`; counts.
//! - Order: tunnel, headers, link control, destination, the node that has the source, fragment, port of the node, flow,
//!   then (for a packet without a current flow) ingress policy of the receiver, share of the flow tables. Before all
//!   but the tunnel a straight path: a packet of a current flow that opens no connection is of the pod that the flow's
//!   row names, if the sender of the tunnel is the node that the row names.
//! - Falls through to: the node's stack, for packets of pods of the network with host access to the node's own address,
//!   where no port of it leads to a pod. Everything else that is not for a pod is dropped.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::words,
    endpoint::EndpointRow,
    flow::END_LOCAL,
    route::{ACTION_STACK, ROUTE_NODE},
    uplink::EGRESS_NUMBER,
};

use super::{
    from_node::{self, ARRIVED, Arrival, FOLLOWED, straight},
    from_uplink,
};
use crate::{
    action::NEXT,
    config,
    decision::Reason,
    egress, endpoint, flow, fragment, host_port,
    packet::{self, Class, Packet},
    related, remote,
    skb::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    work::{self, Place},
};

/// Decides, counts and carries out.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::FromOverlay);
    let mut arrival = Arrival::unknown();
    let mut tunnel = Tunnel::unknown();
    let mut found = from_overlay_follow(ctx.skb.skb, &raw mut place, &raw mut tunnel);
    if found == FOLLOWED {
        return from_node::hand_over(ctx, &place);
    }
    if found == GENERAL {
        found = from_overlay_arrive(
            ctx.skb.skb,
            &raw mut place,
            &raw mut packet,
            &raw mut arrival,
            &raw const tunnel,
        );
    }
    if found == FOR_STACK {
        found = from_overlay_to_port(ctx.skb.skb, &raw mut place, &raw const packet, &raw mut arrival);
    }
    match found {
        ARRIVED => from_node::deliver(ctx, &place, &packet, &arrival),
        egress::LEAVES => egress::forward(ctx),
        egress::RETURNS => from_uplink::deliver_returned(ctx, &place, &packet),
        FOR_STACK => {
            if config::is_dry_run() {
                return from_node::explain(ctx, &place, &packet);
            }
            from_node::accept(ctx);
            NEXT
        }
        reason => from_node::refuse(ctx, &place, &packet, reason),
    }
}

/// A result of functions that find an arrival, below all codes of drops: for the node itself, by its stack.
const FOR_STACK: u32 = 2;

/// A result of [`from_overlay_follow`]: the packet is left to the general path.
const GENERAL: u32 = 0;

/// The tunnel that a packet came through.
#[repr(C)]
struct Tunnel {
    /// The number of the virtual network.
    number: u32,
    /// The address of the sender in the underlay.
    sender: [u32; 4],
}

impl Tunnel {
    /// Nothing is known yet.
    #[inline(always)]
    const fn unknown() -> Self {
        Self {
            number: 0,
            sender: [0; 4],
        }
    }
}

/// Finds the tunnel and its network, and takes the straight path. Returns [`FOLLOWED`], [`GENERAL`], or the code of the
/// reason to drop the packet.
///
/// VERIFIER: a global function, see `global`, to save stack.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_overlay_follow(skb: *mut __sk_buff, place: *mut Place, tunnel: *mut Tunnel) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_mut() };
    // SAFETY: as above.
    let tunnel = unsafe { tunnel.as_mut() };
    let (Some(place), Some(tunnel)) = (place, tunnel) else {
        return Verdict::Truncated as u32;
    };
    match follow(&TcContext::new(skb), place, tunnel) {
        Ok(found) => found,
        Err(reason) => reason as u32,
    }
}

/// [`from_overlay_follow`].
#[inline(always)]
fn follow(ctx: &TcContext, place: &mut Place, tunnel: &mut Tunnel) -> Result<u32, Verdict> {
    let (number, sender) = remote::tunnel(ctx).ok_or(Verdict::ForeignNode)?;
    (tunnel.number, tunnel.sender) = (number, sender);
    // A dry run changes no flow; packets to and from the outside are not explained here.
    if number == EGRESS_NUMBER && !config::is_dry_run() {
        return Ok(GENERAL);
    }
    place.network = remote::network_of(number).ok_or(Verdict::UnknownNetwork)?;
    let receiver = straight::arrive(ctx, place.network, |node| words(node.underlay) == sender);
    Ok(match receiver {
        Some(endpoint) => {
            place.endpoint = endpoint;
            FOLLOWED
        }
        None => GENERAL,
    })
}

/// Parses the packet, and finds its receiver and the sender's node. Returns [`ARRIVED`], [`FOR_STACK`], or the code of
/// the reason to drop it.
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
    tunnel: *const Tunnel,
) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_mut() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_mut() };
    // SAFETY: as above.
    let arrival = unsafe { arrival.as_mut() };
    // SAFETY: as above.
    let tunnel = unsafe { tunnel.as_ref() };
    let (Some(place), Some(packet), Some(arrival), Some(tunnel)) = (place, packet, arrival, tunnel) else {
        return Verdict::Truncated as u32;
    };
    match arrive(&TcContext::new(skb), place, packet, arrival, tunnel) {
        Ok(found) => found,
        Err(reason) => reason.word(),
    }
}

/// [`from_overlay_arrive`].
#[inline(always)]
fn arrive(
    ctx: &TcContext,
    place: &mut Place,
    packet: &mut Packet,
    arrival: &mut Arrival,
    tunnel: &Tunnel,
) -> Result<u32, Reason> {
    read(ctx, place, packet)?;
    if tunnel.number == EGRESS_NUMBER && !config::is_dry_run() {
        return egress::arrive(ctx, place, packet, &tunnel.sender);
    }
    let network = place.network;
    let found = endpoint::by_address(network, packet.destination);
    if let Some(found) = found {
        let row = endpoint::row(found.endpoint).ok_or(Verdict::NoDestination)?;
        place.endpoint = found.endpoint;
        place.generation = endpoint::generation(row);
        place.epoch = endpoint::epoch(row);
        if !endpoint::is_current(row, network, found) {
            return Err(Verdict::DestinationNotReady.into());
        }
    } else if !is_own(network, packet) {
        return Err(Verdict::NoDestination.into());
    }
    let route = remote::route(network, &packet.source).ok_or(Verdict::OwnerUnknown)?;
    let way = remote::way(route).ok_or(Verdict::OwnerUnknown)?;
    let node = remote::row(way).ok_or(Verdict::OwnerUnknown)?;
    if !way.is_overlay() || words(node.underlay) != tunnel.sender {
        return Err(Verdict::ForeignNode.into());
    }
    if packet.is_later() {
        fragment::lookup(network, Direction::FromOverlay, packet)?;
    }
    if found.is_none() {
        if packet.is_first() {
            fragment::record(network, Direction::FromOverlay, packet);
        }
        if route.flags & ROUTE_NODE != 0 {
            return Err(Verdict::NoDestination.into());
        }
        if remote::is_to_tunnel(packet.protocol, packet.destination_port()) {
            return Err(Verdict::OverlayPort.into());
        }
        arrival.way = way;
        return Ok(FOR_STACK);
    }
    arrival.way = way;
    arrival.sender = remote::end(way, node, place.epoch);
    Ok(ARRIVED)
}

/// Finds the pod that a packet to the node itself is for: one that a port of the node leads to, or one that sent the
/// packet which an ICMP error quotes through such a port. Returns [`ARRIVED`], [`FOR_STACK`] without a pod, or the code
/// of the reason to drop the packet.
///
/// VERIFIER: a global function, see `global`, and called by the program itself, to save stack.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_overlay_to_port(
    skb: *mut __sk_buff,
    place: *mut Place,
    packet: *const Packet,
    arrival: *mut Arrival,
) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_mut() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let arrival = unsafe { arrival.as_mut() };
    let (Some(place), Some(packet), Some(arrival)) = (place, packet, arrival) else {
        return Verdict::Truncated as u32;
    };
    let found = if packet.class == Class::IcmpError {
        of_error(&TcContext::new(skb), place, packet)
    } else {
        match host_port::find_within(place.network, packet) {
            Ok(Some((mapping, there))) => {
                arrival.port = u32::from(u16::from_ne_bytes(mapping.port));
                Some((mapping.endpoint, there))
            }
            Ok(None) => None,
            Err(reason) => return reason as u32,
        }
    };
    let (Some((endpoint, there)), Some(node)) = (found, remote::row(arrival.way)) else {
        return FOR_STACK;
    };
    place.endpoint = endpoint;
    place.generation = endpoint::generation(there);
    place.epoch = endpoint::epoch(there);
    arrival.sender = remote::end(arrival.way, node, place.epoch);
    ARRIVED
}

/// The pod that sent the packet which the error quotes. The error itself is evaluated as those to pods.
#[inline(always)]
fn of_error(ctx: &TcContext, place: &Place, packet: &Packet) -> Option<(u32, &'static EndpointRow)> {
    let work = work::begin(place, packet)?;
    related::quoted(ctx, packet, work).ok()?;
    let replies = flow::find_reply(place.network, &work.inner)?;
    let (to, receiver) = replies.receiver(flow::is_reply_second(&work.inner));
    let there = endpoint::row(receiver.id)?;
    let is_pod = to == END_LOCAL && there.network == place.network && endpoint::is_ready(there);
    is_pod.then_some((receiver.id, there))
}

/// Whether the destination is the node's own address, in the network whose pods may send to nodes.
#[inline(always)]
fn is_own(network: u32, packet: &Packet) -> bool {
    let has_access = matches!(remote::overlay(), Some(overlay) if overlay.host_network == network);
    has_access
        && remote::route(network, &packet.destination)
            .is_some_and(|route| route.action == ACTION_STACK && route.flags & ROUTE_NODE != 0)
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
