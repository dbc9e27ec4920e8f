//! Forwards packets that leave by another node than the pod's, which is responsible for their egress address.
//!
//! A pod's own node translates its packets, and has their flows. It sends them through the tunnel, in a virtual network
//! of their own ([`EGRESS_NUMBER`]), to the node that is responsible for the address, which forwards them without a
//! flow: a reply's port names the node that it is for.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_redirect_neigh, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::words,
    route::{ACTION_MASQUERADE, ACTION_STACK, ROUTE_NODE},
    uplink::{EGRESS_NUMBER, OUTSIDE, SHARE_OTHER, SHARE_OWN, unit_of},
};

use crate::{
    action::{DROP, NEXT},
    config, count,
    decision::{Decision, Reason},
    fragment, masquerade,
    packet::{self, Class, Packet},
    remote,
    shares::{share, way},
    skb, translate,
    work::{self, Place},
};

/// Checks and prepares a packet, not translated yet, that leaves with the source; returns its way, or the reason to
/// drop it.
#[inline(always)]
pub fn leave(ctx: &TcContext, packet: &Packet, endpoint: u32, source: &[u32; 4]) -> Decision {
    let way = way(endpoint, packet.v4, source);
    let checked = match way.answering() {
        Some(node) => {
            remote::prepare(ctx, packet, Decision::node(node, true)).and_then(|()| Ok(translate::hop(ctx, packet.v4)?))
        }
        None if way == Decision::UPLINK => masquerade::prepare_egress(ctx, packet.v4).map_err(Reason::from),
        None => return way,
    };
    match checked {
        Ok(()) => way,
        Err(reason) => Decision::refused(reason),
    }
}

/// Sends the packet through the tunnel to the node that is responsible for an egress address, or has one of its units.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn send(ctx: &TcContext, node: u32) -> i32 {
    skb::clear_priority(ctx);
    remote::send_as(ctx, EGRESS_NUMBER, Decision::node(node, true))
}

/// Results of [`arrive`] below all codes of drops: for a host outside.
pub const LEAVES: u32 = 4;
/// For the pod of this node that opened the flow.
pub const RETURNS: u32 = 5;

/// The unit of a port in network byte order.
#[inline(always)]
fn unit([high, low]: [u8; 2]) -> u8 {
    unit_of(u16::from_be_bytes([high, low]))
}

/// The units of the packet's source and destination port, the latter in the second byte. An ICMP error has those of the
/// quoted packet's other direction.
///
/// VERIFIER: one word, and not inlined, to save stack.
#[inline(never)]
fn units(ctx: &TcContext, place: &Place, packet: &Packet) -> u32 {
    let ports = if packet.class == Class::IcmpError {
        let Some(work) = work::begin(place, packet) else {
            return 0;
        };
        work.inner = Packet::unknown();
        if packet::quoted(ctx, packet, &mut work.inner).is_err() {
            return 0;
        }
        work.inner.ports.rotate_left(16)
    } else {
        packet.ports
    };
    let [a, b, c, d] = ports.to_ne_bytes();
    u32::from(unit([a, b])) | u32::from(unit([c, d])) << 8
}

/// Evaluates a packet that another node, by its address in the underlay, sent with or to an egress address: [`LEAVES`]
/// or [`RETURNS`]. What leaves is checked against the uplink as it will be.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "two bytes")]
pub fn arrive(ctx: &TcContext, place: &Place, packet: &mut Packet, underlay: &[u32; 4]) -> Result<u32, Reason> {
    if packet.to_loopback() {
        return Err(Verdict::Loopback.into());
    }
    if packet.is_later() {
        fragment::lookup(OUTSIDE, Direction::FromOverlay, packet)?;
    }
    let units = units(ctx, place, packet);
    let role = find(packet, units as u8, SHARE_OTHER, underlay);
    if role == ELSEWHERE {
        let back = find(packet, (units >> 8) as u8, SHARE_OWN, underlay);
        return match back {
            ELSEWHERE => Err(Verdict::EgressAddress.into()),
            0 => {
                vouch(packet);
                Ok(RETURNS)
            }
            _ => Err(Verdict::ForeignNode.into()),
        };
    }
    if role != 0 {
        return Err(Verdict::ForeignNode.into());
    }
    if is_inside(packet) {
        return Err(Verdict::NoDestination.into());
    }
    if remote::is_to_tunnel(packet.protocol, packet.destination_port()) {
        return Err(Verdict::OverlayPort.into());
    }
    vouch(packet);
    masquerade::prepare_egress(ctx, packet.v4)?;
    Ok(LEAVES)
}

/// A result of [`find`].
const ELSEWHERE: u32 = 1;
/// A result of [`find`].
const FOREIGN: u32 = 2;

/// Whether this node has the part `role` in the packet's egress address, which is its source with [`SHARE_OTHER`], and
/// the sender of the tunnel is the node of the row: 0. [`ELSEWHERE`] or [`FOREIGN`] otherwise.
#[inline(always)]
fn find(packet: &Packet, unit: u8, role: u32, underlay: &[u32; 4]) -> u32 {
    let address = if role == SHARE_OTHER {
        &packet.source
    } else {
        &packet.destination
    };
    match share(address, unit) {
        Some(row) if row.role == role => match remote::row(Decision::node(row.node, true)) {
            Some(node) if words(node.underlay) == *underlay => 0,
            _ => FOREIGN,
        },
        _ => ELSEWHERE,
    }
}

/// Lets the later fragments of a datagram follow its first one.
#[inline(always)]
fn vouch(packet: &Packet) {
    if packet.is_first() {
        fragment::record(OUTSIDE, Direction::FromOverlay, packet);
    }
}

/// Whether the destination is in the network whose pods share the nodes' address space, or is an address of this node.
#[inline(always)]
fn is_inside(packet: &Packet) -> bool {
    let network = remote::overlay().map_or(0, |overlay| overlay.host_network);
    network != 0
        && remote::route(network, &packet.destination).is_some_and(|route| match route.action {
            ACTION_STACK => route.flags & ROUTE_NODE != 0,
            ACTION_MASQUERADE => false,
            // Pods of other nodes reach other nodes themselves with their own addresses.
            _ => route.flags & ROUTE_NODE == 0,
        })
}

/// Sends a packet of [`LEAVES`] out of the node, marked for `to_uplink`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
pub fn forward(ctx: &TcContext) -> i32 {
    let Some(config) = config::get() else {
        return DROP;
    };
    skb::clear_priority(ctx);
    skb::set_mark(ctx, config::evaluated_mark());
    // SAFETY: a helper with plain arguments.
    unsafe { bpf_redirect_neigh(config.uplink, core::ptr::null_mut(), 0, 0) as i32 }
}

/// Sends a packet from outside that is for no pod of this node to the node that has the port of the egress address, and
/// drops it where the way there is not known. All others are left to the stack.
#[inline(always)]
pub fn pass_on(ctx: &TcContext, place: &Place, packet: &Packet) -> i32 {
    if remote::overlay().is_none_or(|overlay| overlay.forwards_egress == 0) {
        return NEXT;
    }
    let Some(node) = Decision::from_word(egress_receiver(ctx.skb.skb, place, packet)).answering() else {
        return NEXT;
    };
    if remote::row(Decision::node(node, true)).is_none() {
        // The stack would reset the connection, which it does not have.
        return match work::begin(place, packet) {
            Some(work) => count::dropped(ctx, &mut work.event, Verdict::NoNode as u16),
            None => DROP,
        };
    }
    if packet.is_first() {
        fragment::record(OUTSIDE, Direction::FromUplink, packet);
    }
    send(ctx, node)
}

/// The node that has the unit of the packet's destination port, as [`Decision::owner`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn egress_receiver(skb: *mut __sk_buff, place: *const Place, packet: *const Packet) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let place = unsafe { place.as_ref() };
    // SAFETY: as above.
    let packet = unsafe { packet.as_ref() };
    let (Some(place), Some(packet)) = (place, packet) else {
        return Decision::NONE.word();
    };
    #[expect(clippy::cast_possible_truncation, reason = "one byte")]
    let unit = (units(&TcContext::new(skb), place, packet) >> 8) as u8;
    match share(&packet.destination, unit) {
        Some(row) if row.role == SHARE_OTHER => Decision::owner(row.node).word(),
        _ => Decision::NONE.word(),
    }
}
