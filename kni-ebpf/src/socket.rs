//! Accesses the fields of `bpf_sock_addr` and `bpf_sock`; no other module does.

use aya_ebpf::{bindings::bpf_sock, programs::SockAddrContext};
use kni_common::address::mapped;

/// The other end of a socket: four words in memory order, IPv4 mapped, and a port in network byte order.
#[derive(Clone, Copy)]
pub struct Peer {
    /// The address.
    pub address: [u32; 4],
    /// The port.
    pub port: [u8; 2],
}

/// Reads a field of the kernel's structure.
///
/// VERIFIER: each field by one access of its own width; without `volatile` the compiler merges neighbours.
macro_rules! get {
    ($pointer:expr, $($field:tt)+) => {
        // SAFETY: the context and its socket are valid while the program runs.
        unsafe { (&raw const (*$pointer).$($field)+).read_volatile() }
    };
}

/// Writes a field of the context, likewise.
macro_rules! set {
    ($ctx:expr, $value:expr, $($field:tt)+) => {
        // SAFETY: as in `get`; programs of these types may write the field.
        unsafe { (&raw mut (*$ctx.sock_addr).$($field)+).write_volatile($value) }
    };
}

/// Number of the socket's protocol.
#[inline(always)]
pub fn protocol(ctx: &SockAddrContext) -> u32 {
    get!(ctx.sock_addr, protocol)
}

/// The other end in an IPv4 call.
#[inline(always)]
pub fn read4(ctx: &SockAddrContext) -> Peer {
    Peer {
        address: mapped(get!(ctx.sock_addr, user_ip4)),
        port: port(ctx),
    }
}

/// The other end in an IPv6 call.
#[inline(always)]
pub fn read6(ctx: &SockAddrContext) -> Peer {
    Peer {
        address: [
            get!(ctx.sock_addr, user_ip6[0]),
            get!(ctx.sock_addr, user_ip6[1]),
            get!(ctx.sock_addr, user_ip6[2]),
            get!(ctx.sock_addr, user_ip6[3]),
        ],
        port: port(ctx),
    }
}

/// Replaces the other end in an IPv4 call.
#[inline(always)]
pub fn write4(ctx: &SockAddrContext, peer: Peer) {
    let [.., v4] = peer.address;
    set!(ctx, v4, user_ip4);
    write_port(ctx, peer);
}

/// Replaces the other end in an IPv6 call, by an address that is IPv4 mapped if, and only if, the former one is.
#[inline(always)]
pub fn write6(ctx: &SockAddrContext, peer: Peer) {
    let [first, second, third, fourth] = peer.address;
    set!(ctx, first, user_ip6[0]);
    set!(ctx, second, user_ip6[1]);
    set!(ctx, third, user_ip6[2]);
    set!(ctx, fourth, user_ip6[3]);
    write_port(ctx, peer);
}

/// The address that a socket is bound to in an IPv4 call, the unspecified one for none.
#[inline(always)]
pub fn own4(ctx: &SockAddrContext) -> [u32; 4] {
    mapped(get!(socket(ctx), src_ip4))
}

/// The same in an IPv6 call. Not the socket's IPv4 address: the kernel writes 127.0.0.6 there when the socket is bound
/// to an IPv6 address.
#[inline(always)]
pub fn own6(ctx: &SockAddrContext) -> [u32; 4] {
    let socket = socket(ctx);
    [
        get!(socket, src_ip6[0]),
        get!(socket, src_ip6[1]),
        get!(socket, src_ip6[2]),
        get!(socket, src_ip6[3]),
    ]
}

#[inline(always)]
fn socket(ctx: &SockAddrContext) -> *const bpf_sock {
    get!(ctx.sock_addr, __bindgen_anon_1.sk).cast_const()
}

#[inline(always)]
fn port(ctx: &SockAddrContext) -> [u8; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "16 bits in network byte order")]
    let port = get!(ctx.sock_addr, user_port) as u16;
    port.to_ne_bytes()
}

#[inline(always)]
fn write_port(ctx: &SockAddrContext, peer: Peer) {
    set!(ctx, u32::from(u16::from_ne_bytes(peer.port)), user_port);
}
