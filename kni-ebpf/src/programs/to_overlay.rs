//! Sends packets of the node's stack to pods of other nodes through the tunnel.
//!
//! - Hook: TC egress of the tunnel device.
//! - Reads `OVERLAY`, `ADDRESSES`, `ROUTES`, `NODES`, `NUMBERS`, `CONFIG`; counts drops.
//! - `from_pod` gives its packets their tunnel itself and marks them. All others come from the node's stack, by a route
//!   to the device: they belong to the network with host access. The receiver's node checks that they have the address
//!   of this node or of one of its pods, and this program that a pod's address is that of the pod that sent the packet:
//!   processes of the node may open sockets with any address (`IPV6_FREEBIND`), and have none of a pod.
//! - Link control (the stack announces its multicast groups at every device, RFC 3810) ends here. It is for no pod, and
//!   is not counted as a drop.
//! - Falls through to: the tunnel.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    address::ADDRESS_OF_SERVICE,
    route::{ROUTE_NODE, RouteValue},
};

use crate::{
    action::{DROP, NEXT},
    config, count,
    decision::Reason,
    endpoint,
    packet::{self, Class, Packet},
    remote,
    skb::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    work::{self, Place},
};

/// Gives the packet its tunnel, or drops it.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    if config::is_evaluated(skb::mark(ctx)) {
        return NEXT;
    }
    let mut packet = Packet::unknown();
    let mut place = Place::unknown(Direction::ToOverlay);
    match encapsulate(ctx, &mut place, &mut packet) {
        Ok(()) => NEXT,
        Err(reason) if reason.word() == Verdict::Absorbed as u32 => DROP,
        Err(reason) => match work::begin(&place, &packet) {
            #[expect(clippy::cast_possible_truncation, reason = "the code of a verdict")]
            Some(work) => count::dropped(ctx, &mut work.event, reason.word() as u16),
            None => DROP,
        },
    }
}

#[inline(always)]
fn encapsulate(ctx: &TcContext, place: &mut Place, packet: &mut Packet) -> Result<(), Reason> {
    let eth: EthHeader = skb::read(ctx, 0)?;
    place.ethertype = u16::from_be(eth.ethertype);
    match eth.ethertype {
        ETHERTYPE_IPV4 => packet::ipv4(ctx, packet)?,
        ETHERTYPE_IPV6 => packet::ipv6(ctx, packet)?,
        _ => return Err(Verdict::UnsupportedEthertype.into()),
    }
    if packet.class == Class::LinkControl {
        return Err(Verdict::Absorbed.into());
    }
    let network = remote::overlay().map_or(0, |overlay| overlay.host_network);
    if network == 0 {
        return Err(Verdict::HostNotAllowed.into());
    }
    place.network = network;
    if packet.is_multicast() {
        return Err(Verdict::Multicast.into());
    }
    let route = remote::route(network, &packet.destination).ok_or(Verdict::NoDestination)?;
    has_source(ctx, network, packet, route)?;
    let way = remote::way(route).ok_or(Verdict::NoDestination)?;
    let node = remote::row(way).ok_or(Verdict::NoNode)?;
    let number = remote::number_of(network).ok_or(Verdict::NoNode)?;
    if way.is_overlay() && remote::set_tunnel_key(ctx, number, node) {
        Ok(())
    } else {
        Err(Verdict::NoNode.into())
    }
}

/// Whether the node may send or forward a packet with the source: the receiver's node believes this one for all of its
/// pods. The agent asks other nodes for echo replies with an address that no pod has, which can mislead no pod.
#[inline(always)]
fn has_source(ctx: &TcContext, network: u32, packet: &Packet, route: &RouteValue) -> Result<(), Reason> {
    let ingress = skb::ingress_ifindex(ctx);
    match endpoint::by_address(network, packet.source) {
        Some(found) if found.endpoint != ADDRESS_OF_SERVICE && endpoint::ifindex(found.endpoint) == ingress => Ok(()),
        Some(_) => Err(Verdict::SourceAddress.into()),
        None if ingress == remote::NODE && route.flags & ROUTE_NODE != 0 => Ok(()),
        None => remote::admit(network, &packet.source, ingress).map(|_way| ()),
    }
}
