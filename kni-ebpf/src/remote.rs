//! Finds the nodes of remote pods, and sends packets to them.

mod tunnel;

use core::mem::size_of;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_redir_neigh},
    btf_maps::lpm_trie::Key,
    helpers::{bpf_redirect, bpf_redirect_neigh},
    programs::TcContext,
};
use kni_common::{
    Verdict,
    address::{ADDRESS_OF_SERVICE, V4_MAPPED, bytes, words},
    flow::{END_REMOTE, END_ROUTED, FlowEnd, NodeRow, remote_generation},
    overlay::Overlay,
    route::{
        ACTION_REMOTE, ACTION_UNREACHABLE, FULL_PREFIX, ROUTE_NODE, ROUTE_OVERLAY, ROUTE_OWNED, RouteData, RouteValue,
    },
};

use crate::{
    action::DROP,
    config,
    decision::{Decision, Reason},
    endpoint,
    maps::{NETWORKS, NODES, NUMBERS, OVERLAY, ROUTES},
    packet::{Packet, TCP, UDP},
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
    translate,
};
pub use tunnel::{set_tunnel_key, tunnel};

/// Address families.
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// `struct bpf_redir_neigh`.
#[repr(C)]
struct NextHop {
    family: u32,
    /// Network byte order, IPv4 in the first word.
    address: [u32; 4],
}

const _: () = assert!(size_of::<NextHop>() == size_of::<bpf_redir_neigh>());

/// The route of the network's packets to an address.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn route(network: u32, address: &[u32; 4]) -> Option<&'static RouteValue> {
    let key = Key::new(
        FULL_PREFIX,
        RouteData {
            network: network.to_be_bytes(),
            address: bytes(*address),
        },
    );
    // The reference outlives the program's run: a removed row is freed after all programs that may have found it.
    ROUTES.get(&key)
}

/// The settings of the tunnel.
#[inline(always)]
pub fn overlay() -> Option<&'static Overlay> {
    // The reference outlives the program's run: array map values are freed only with the map.
    OVERLAY.get(0)
}

/// Whether nodes have tunnels to each other; this one may be without.
#[inline(always)]
#[must_use]
pub fn has_tunnel() -> bool {
    overlay().is_some_and(|overlay| overlay.port != [0; 2])
}

/// Whether the packet, with the protocol and ports as it would leave the node, is for the tunnel of a node.
#[inline(always)]
pub fn is_to_tunnel(protocol: u8, port: [u8; 2]) -> bool {
    protocol == UDP && overlay().is_some_and(|overlay| overlay.port == port && port != [0; 2])
}

/// Whether a frame whose headers have their usual length is a datagram to this node's end of the tunnel. The kernel
/// gives it to the tunnel device, which hands what is inside to `from_overlay`.
#[inline(always)]
pub fn is_arriving(ctx: &TcContext, ethertype: u16) -> bool {
    /// Version 4, five words.
    const NO_OPTIONS: u8 = 0x45;
    /// More fragments, and the offset, without "don't fragment".
    const FRAGMENT: u16 = u16::from_be(0x3fff);
    const IPV4_LEN: usize = 20;
    const IPV6_LEN: usize = 40;
    const UDP_LEN: usize = 8;
    let Some(overlay) = overlay() else {
        return false;
    };
    let port = u16::from_ne_bytes(overlay.port);
    if port == 0 {
        return false;
    }
    if ethertype == ETHERTYPE_IPV4 {
        return skb::holds(ctx, ETH_LEN + IPV4_LEN + UDP_LEN)
            && skb::peek::<u16>(ctx, ETH_LEN + IPV4_LEN + 2) == port
            && skb::peek::<u8>(ctx, ETH_LEN + 9) == UDP
            && skb::peek::<u32>(ctx, ETH_LEN + 16) == u32::from_ne_bytes(overlay.ipv4)
            && skb::peek::<u8>(ctx, ETH_LEN) == NO_OPTIONS
            && skb::peek::<u16>(ctx, ETH_LEN + 6) & FRAGMENT == 0;
    }
    ethertype == ETHERTYPE_IPV6
        && skb::holds(ctx, ETH_LEN + IPV6_LEN + UDP_LEN)
        && skb::peek::<u16>(ctx, ETH_LEN + IPV6_LEN + 2) == port
        && skb::peek::<u8>(ctx, ETH_LEN + 6) == UDP
        && skb::peek::<[u32; 4]>(ctx, ETH_LEN + 24) == words(overlay.ipv6)
        && skb::peek::<u8>(ctx, ETH_LEN) >> 4 == 6
}

/// The network with this number in the cluster.
#[inline(always)]
pub fn network_of(number: u32) -> Option<u32> {
    // SAFETY: a copy of a word, which the agent replaces as a whole.
    unsafe { NETWORKS.get(number) }.copied()
}

/// The number of the network in the cluster.
#[inline(always)]
pub fn number_of(network: u32) -> Option<u32> {
    // SAFETY: as in `network_of`.
    unsafe { NUMBERS.get(network) }.copied()
}

/// The node that has the pods of a route, and the way there.
#[inline(always)]
pub fn way(route: &RouteValue) -> Option<Decision> {
    (route.action == ACTION_REMOTE).then(|| Decision::node(route.node, route.flags & ROUTE_OVERLAY != 0))
}

/// The node's row, if there is such a node.
#[inline(always)]
pub fn row(way: Decision) -> Option<&'static NodeRow> {
    let number = way.number()?;
    // The reference outlives the program's run: array map values are freed only with the map.
    let row = NODES.get(number)?;
    (number != 0 && row.ifindex != 0).then_some(row)
}

/// `skb::ingress_ifindex` of a packet that the node sent.
pub const NODE: u32 = 0;

/// Whether a packet that this node got by the interface, past `from_overlay`, or sent itself ([`NODE`]), may have the
/// source, which no endpoint of this node has: the interface by which alone it may come, 0 for any. A pod of another
/// node sends by the way that leads to it, and by no other. Nodes also send without a tunnel, with their own addresses.
#[inline(always)]
pub fn admit(network: u32, source: &[u32; 4], ingress: u32) -> Result<u32, Reason> {
    match remote_admit(network, source, ingress) {
        ON_ITS_WAY => Ok(ingress),
        code => Reason::check(code).map(|()| 0),
    }
}

/// [`admit`] of a packet that the node sent, whatever has the address. With that of a Service it only replies, where
/// the stack has translated the request.
#[inline(always)]
pub fn admit_own(network: u32, source: &[u32; 4], is_reply: bool) -> Result<(), Reason> {
    match endpoint::by_address(network, *source) {
        Some(found) if is_reply && found.endpoint == ADDRESS_OF_SERVICE => Ok(()),
        Some(_) => Err(Verdict::SourceAddress.into()),
        None => admit(network, source, NODE).map(|_way| ()),
    }
}

/// A result of [`remote_admit`], below all codes of drops.
const ON_ITS_WAY: u32 = 1;

/// [`admit`]; 0 for a source that may come by any interface, [`ON_ITS_WAY`], or the code of the reason.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn remote_admit(network: u32, source: *const [u32; 4], ingress: u32) -> u32 {
    // SAFETY: the caller's own memory.
    let Some(source) = (unsafe { source.as_ref() }) else {
        return Verdict::OwnerUnknown as u32;
    };
    match route(network, source) {
        Some(route) if route.flags & ROUTE_NODE != 0 => 0,
        Some(route) if route.flags & ROUTE_OWNED != 0 && route.action == ACTION_UNREACHABLE => {
            Verdict::OwnerUnknown as u32
        }
        Some(route) => match way(route) {
            Some(way) if row(way).is_some_and(|node| node.ifindex == ingress) => ON_ITS_WAY,
            Some(_) => Verdict::ForeignNode as u32,
            None => 0,
        },
        None => 0,
    }
}

/// The kind of a pod there as an end of a flow.
#[inline(always)]
#[must_use]
pub const fn kind(way: Decision) -> u8 {
    if way.is_overlay() { END_REMOTE } else { END_ROUTED }
}

/// Whether an end of this kind is reached through the tunnel.
#[inline(always)]
#[must_use]
pub const fn is_tunnel(kind: u8) -> bool {
    kind == END_REMOTE
}

/// A pod of the node as an end of a flow; `epoch` is that of the endpoint at the other end.
#[inline(always)]
pub fn end(way: Decision, row: &NodeRow, epoch: u32) -> FlowEnd {
    // SAFETY: an aligned word of a row that stays mapped, read before what is known about the node's pods.
    let generation = unsafe { core::ptr::read_volatile(&raw const row.generation) };
    FlowEnd {
        id: way.number().unwrap_or(0),
        generation: remote_generation(epoch, generation),
    }
}

/// The way to the pod at the other end of a flow, if nothing that is known about it and its node has changed since the
/// flow was evaluated.
#[inline(always)]
pub fn current(kind: u8, end: FlowEnd, epoch: u32) -> Decision {
    Decision::from_word(remote_current(
        u32::from(kind == END_REMOTE),
        end.id,
        end.generation,
        epoch,
    ))
}

/// [`current`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn remote_current(overlay: u32, number: u32, generation: u32, epoch: u32) -> u32 {
    let way = Decision::node(number, overlay != 0);
    match row(way) {
        Some(row) if end(way, row, epoch).generation == generation => way.word(),
        _ => Decision::NONE.word(),
    }
}

/// Checks the packet, or each segment that it stands for, against the MTU towards the node. Without a tunnel the node
/// is the packet's next hop, and the hop limit decreases.
#[inline(always)]
pub fn prepare(ctx: &TcContext, packet: &Packet, way: Decision) -> Result<(), Reason> {
    Reason::check(remote_prepare(ctx.skb.skb, packet, way.word()))
}

/// [`prepare`]; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn remote_prepare(skb: *mut __sk_buff, packet: *const Packet, way: u32) -> u32 {
    let way = Decision::from_word(way);
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let packet = unsafe { packet.as_ref() };
    let (Some(packet), Some(row)) = (packet, row(way)) else {
        return Verdict::NoNode as u32;
    };
    Reason::code(check(&TcContext::new(skb), packet, way, row))
}

/// [`prepare`], where the row of the node is at hand.
#[inline(always)]
pub fn check(ctx: &TcContext, packet: &Packet, way: Decision, row: &NodeRow) -> Result<(), Verdict> {
    if length(ctx, packet)? > row.mtu {
        skb::set_exceeded_mtu(ctx, row.mtu);
        return Err(Verdict::TooBig);
    }
    if way.is_overlay() {
        return Ok(());
    }
    if !is_next_hop(packet.v4, row) {
        return Err(Verdict::NoNode);
    }
    translate::hop(ctx, packet.v4)
}

/// Whether packets of the family may have the node as next hop.
#[inline(always)]
pub fn is_next_hop(v4: bool, row: &NodeRow) -> bool {
    v4 || ipv4(row).is_none()
}

/// Bytes of the IP packet, or of the longest of those that it stands for.
#[inline(always)]
fn length(ctx: &TcContext, packet: &Packet) -> Result<u32, Verdict> {
    const UDP_LEN: u32 = 8;
    const TCP_OFFSET: usize = 12;
    let segment = skb::gso_size(ctx);
    #[expect(clippy::cast_possible_truncation, reason = "offsets in a packet")]
    let [transport, end] = [packet.transport(), packet.end()].map(|offset| offset.saturating_sub(ETH_LEN) as u32);
    if segment == 0 {
        return Ok(end);
    }
    let header = if packet.protocol == TCP {
        let offset: u8 = skb::load(ctx, packet.transport() + TCP_OFFSET)?;
        u32::from(offset >> 4) * 4
    } else {
        UDP_LEN
    };
    Ok(transport + header + segment)
}

/// The node's address, where it is of IPv4.
#[inline(always)]
fn ipv4(row: &NodeRow) -> Option<u32> {
    let [a, b, c, address] = words(row.underlay);
    (a == 0 && b == 0 && c == V4_MAPPED).then_some(address)
}

/// Sends a packet of the network to the node, and returns the action.
#[inline(always)]
pub fn send(ctx: &TcContext, network: u32, way: Decision) -> i32 {
    if way.is_overlay() {
        // The agent removes a number after the routes that need it.
        return match number_of(network) {
            Some(number) => send_as(ctx, number, way),
            None => DROP,
        };
    }
    match row(way) {
        Some(row) => to_next_hop(ctx, row),
        // It was there a moment ago.
        None => DROP,
    }
}

/// Sends a packet without a tunnel to a node, and returns the action.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
pub fn to_next_hop(ctx: &TcContext, row: &NodeRow) -> i32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a small size"
    )]
    const SIZE: core::ffi::c_int = size_of::<NextHop>() as core::ffi::c_int;
    // For `to_uplink`, which keeps pods' addresses inside.
    skb::set_mark(ctx, config::evaluated_mark());
    let mut next = match ipv4(row) {
        Some(address) => NextHop {
            family: AF_INET,
            address: [address, 0, 0, 0],
        },
        None => NextHop {
            family: AF_INET6,
            address: words(row.underlay),
        },
    };
    // SAFETY: the structure that the helper expects, of its size; it outlives the call.
    unsafe { bpf_redirect_neigh(row.ifindex, (&raw mut next).cast(), SIZE, 0) as i32 }
}

/// Sends a packet through the tunnel with the number of a virtual network, and returns the action.
#[inline(always)]
pub fn send_as(ctx: &TcContext, number: u32, way: Decision) -> i32 {
    match row(way) {
        Some(row) => through_tunnel(ctx, number, row),
        None => DROP,
    }
}

/// [`send_as`], where the row of the node is at hand.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
pub fn through_tunnel(ctx: &TcContext, number: u32, row: &NodeRow) -> i32 {
    if set_tunnel_key(ctx, number, row) {
        // SAFETY: a helper with plain arguments.
        unsafe { bpf_redirect(row.ifindex, 0) as i32 }
    } else {
        DROP
    }
}
