//! Sends connections and datagrams of the node's own processes to a host port to the pod that has it.
//!
//! - Hook: `connect`, `sendmsg` and `recvmsg` of sockets in the root of cgroup2. Sockets of other network namespaces
//!   than the node's are left alone, and so is every destination that is no host port.
//! - Reads `NODE_PORTS`, `ENDPOINTS`; reads and writes `NODE_PEERS`.
//! - No packet is translated: the kernel chooses route and source for the pod's address, and `to_pod` decides as about
//!   any packet of the node.

use aya_ebpf::{
    EbpfContext as _, Global,
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use kni_common::{
    address::{V4_MAPPED, bytes, mapped, words},
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    uplink::{HostPortKey, HostPortValue, NodePeerKey, NodePeerValue},
};

use crate::{
    endpoint,
    maps::{NODE_PEERS, NODE_PORTS},
    packet::{TCP, UDP},
    socket::{self, Peer},
};

/// Cookie of the network namespace whose sockets are the node's own: that of the agent, which sets it before it loads
/// the programs.
// SAFETY: the loader looks for this name; nothing else defines it.
#[unsafe(no_mangle)]
static NODE_NAMESPACE: Global<u64> = Global::new(0);

/// The result that lets the call continue.
pub const CONTINUE: i32 = 1;

/// The loopback address of IPv6.
const LOOPBACK6: [u32; 4] = [0, 0, 0, u32::from_be(1)];
/// The loopback address of IPv4.
const LOOPBACK4: [u32; 4] = mapped(u32::from_be(0x7f00_0001));

/// Redirects `connect` or `sendmsg` of an IPv4 socket.
#[inline(always)]
pub fn redirect4(ctx: &SockAddrContext) {
    if !is_of_node(ctx) {
        return;
    }
    if let Some(pod) = redirected(ctx, socket::read4(ctx), socket::own4) {
        socket::write4(ctx, pod);
    }
}

/// Redirects `connect` or `sendmsg` of an IPv6 socket, also to an IPv4 address.
#[inline(always)]
pub fn redirect6(ctx: &SockAddrContext) {
    if !is_of_node(ctx) {
        return;
    }
    if let Some(pod) = redirected(ctx, socket::read6(ctx), socket::own6) {
        socket::write6(ctx, pod);
    }
}

/// Restores the source of a datagram that an IPv4 socket receives.
#[inline(always)]
pub fn restore4(ctx: &SockAddrContext) {
    if !is_of_node(ctx) {
        return;
    }
    if let Some(node) = original(ctx, socket::read4(ctx)) {
        socket::write4(ctx, node);
    }
}

/// Restores the source of a datagram that an IPv6 socket receives, also from an IPv4 address.
#[inline(always)]
pub fn restore6(ctx: &SockAddrContext) {
    if !is_of_node(ctx) {
        return;
    }
    if let Some(node) = original(ctx, socket::read6(ctx)) {
        socket::write6(ctx, node);
    }
}

/// Whether the socket is in the node's network namespace.
#[inline(always)]
fn is_of_node(ctx: &SockAddrContext) -> bool {
    let node = NODE_NAMESPACE.load();
    // SAFETY: a helper that takes the context.
    node != 0 && unsafe { bpf_get_netns_cookie(ctx.as_ptr()) } == node
}

/// The pod that gets what the socket sends to the peer; `None` where the peer stays. `own` reads the address that the
/// socket is bound to: no pod can reply from a loopback address.
///
/// VERIFIER: one function for each family; a choice between two fields of the socket would be arithmetic on its
/// pointer.
#[inline(always)]
fn redirected(ctx: &SockAddrContext, peer: Peer, own: impl Fn(&SockAddrContext) -> [u32; 4]) -> Option<Peer> {
    let protocol = socket::protocol(ctx);
    if protocol != u32::from(TCP) && protocol != u32::from(UDP) {
        return None;
    }
    let mapping = host_port(peer, protocol)?;
    let there = endpoint::row(mapping.endpoint)?;
    if there.incarnation != mapping.incarnation
        || !endpoint::is_ready(there)
        || there.flags & FLAG_HOST_ACCESS == 0
        || is_loopback(own(ctx))
    {
        return None;
    }
    let pod = Peer {
        address: address_of(there, is_v4(peer.address))?,
        port: mapping.port,
    };
    if protocol == u32::from(UDP) {
        remember(ctx, peer, pod, &mapping);
    }
    Some(pod)
}

/// The row of a port of the node. The unspecified address means the loopback address, as in `connect`.
#[inline(always)]
fn host_port(peer: Peer, protocol: u32) -> Option<HostPortValue> {
    let v4 = is_v4(peer.address);
    let any = if v4 { mapped(0) } else { [0; 4] };
    let address = match peer.address {
        unspecified if unspecified == any => {
            if v4 {
                LOOPBACK4
            } else {
                LOOPBACK6
            }
        }
        other => other,
    };
    let mut key = HostPortKey {
        address: bytes(address),
        port: peer.port,
        #[expect(
            clippy::cast_possible_truncation,
            reason = "compared with numbers of one byte before"
        )]
        protocol: protocol as u16,
    };
    let mut row = NODE_PORTS.get_ptr(key);
    if row.is_none() && is_loopback(address) {
        key.address = bytes(any);
        row = NODE_PORTS.get_ptr(key);
    }
    // SAFETY: memory of the table, copied once: the kernel may reuse a removed row for another key at once. The caller
    // compares the incarnation with the endpoint's.
    Some(unsafe { row?.read_volatile() })
}

/// The endpoint's address of the family, if it has one.
#[inline(always)]
fn address_of(there: &EndpointRow, v4: bool) -> Option<[u32; 4]> {
    let address = if v4 {
        mapped(u32::from_ne_bytes(there.ipv4))
    } else {
        words(there.ipv6)
    };
    (address != [0; 4] && address != mapped(0)).then_some(address)
}

/// Records where the socket sent the datagram, so that the reply comes from there. Without room the reply comes from
/// the pod's address.
#[inline(always)]
fn remember(ctx: &SockAddrContext, peer: Peer, pod: Peer, mapping: &HostPortValue) {
    let value = NodePeerValue {
        address: bytes(peer.address),
        endpoint: mapping.endpoint,
        incarnation: mapping.incarnation,
        port: peer.port,
        zero: 0,
    };
    let _without_room = NODE_PEERS.insert(peer_key(ctx, pod), value, 0);
}

/// The destination of the datagrams that the pod replies to, while it is the same pod.
#[inline(always)]
fn original(ctx: &SockAddrContext, pod: Peer) -> Option<Peer> {
    if socket::protocol(ctx) != u32::from(UDP) {
        return None;
    }
    let row = NODE_PEERS.get_ptr(peer_key(ctx, pod))?;
    // SAFETY: memory of the table, copied once, as in `host_port`.
    let found = unsafe { row.read_volatile() };
    let there = endpoint::row(found.endpoint)?;
    (there.incarnation == found.incarnation && endpoint::is_ready(there)).then_some(Peer {
        address: words(found.address),
        port: found.port,
    })
}

#[inline(always)]
fn peer_key(ctx: &SockAddrContext, pod: Peer) -> NodePeerKey {
    // SAFETY: a helper that takes the context.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    NodePeerKey {
        address: bytes(pod.address),
        #[expect(clippy::cast_possible_truncation, reason = "the low half")]
        socket: [cookie as u32, (cookie >> 32) as u32],
        port: pod.port,
        zero: 0,
    }
}

#[inline(always)]
fn is_loopback(address: [u32; 4]) -> bool {
    let [.., last] = address;
    address == LOOPBACK6 || is_v4(address) && last.to_ne_bytes()[0] == 127
}

#[inline(always)]
const fn is_v4([first, second, third, _]: [u32; 4]) -> bool {
    first == 0 && second == 0 && third == V4_MAPPED
}
