//! Reads and sets the tunnel key of a packet: the network and the other end.

use core::mem::size_of;

use aya_ebpf::{
    bindings::{BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    helpers::{bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key},
    programs::TcContext,
};
use kni_common::{
    address::{mapped, words},
    flow::NodeRow,
};

use super::{ipv4, overlay};
use crate::{config, skb};

/// Hop limit of the outer header, the kernel's default.
const HOPS: u8 = 64;

/// `struct bpf_tunnel_key` without the local address.
#[repr(C)]
struct TunnelKey {
    /// Number of the virtual network, host byte order.
    network: u32,
    /// IPv6 in network byte order, IPv4 in host byte order in the first word.
    remote: [u32; 4],
    tos: u8,
    ttl: u8,
    extension: u16,
    label: u32,
}

/// `struct bpf_tunnel_key` with the local address: kernels before it (5.19) are older than what KNI runs on.
#[repr(C)]
struct FullTunnelKey {
    key: TunnelKey,
    /// As [`TunnelKey::remote`].
    local: [u32; 4],
}

const _: () = assert!(size_of::<FullTunnelKey>() == 44 && size_of::<TunnelKey>() == 28);

/// Gives the tunnel device the network's number and the node, and marks the packet for `to_uplink`, which lets nothing
/// else out to the port of tunnels. The outer UDP header has a checksum where the protocol demands it, over IPv6.
#[inline(always)]
pub fn set_tunnel_key(ctx: &TcContext, number: u32, row: &NodeRow) -> bool {
    let Some(overlay) = overlay() else {
        return false;
    };
    let v4 = ipv4(row);
    let (remote, local) = match v4 {
        Some(address) => (
            [u32::from_be(address), 0, 0, 0],
            [u32::from_be_bytes(overlay.ipv4), 0, 0, 0],
        ),
        None => (words(row.underlay), words(overlay.ipv6)),
    };
    let mut key = FullTunnelKey {
        key: TunnelKey {
            network: number,
            remote,
            tos: 0,
            ttl: HOPS,
            extension: 0,
            label: 0,
        },
        local,
    };
    let flags = if v4.is_some() {
        BPF_F_ZERO_CSUM_TX
    } else {
        BPF_F_TUNINFO_IPV6
    };
    #[expect(clippy::cast_possible_truncation, reason = "44")]
    let size = size_of::<FullTunnelKey>() as u32;
    skb::set_mark(ctx, config::evaluated_mark());
    // SAFETY: the context pointer that the kernel hands to the program, and one of the helper's structures with its
    // size.
    unsafe { bpf_skb_set_tunnel_key(ctx.skb.skb, (&raw mut key).cast(), size, u64::from(flags)) == 0 }
}

/// The network and the sender of the tunnel that the packet came through.
#[inline(always)]
pub fn tunnel(ctx: &TcContext) -> Option<(u32, [u32; 4])> {
    if config::is_dry_run() {
        return Some(skb::supposed_tunnel(ctx));
    }
    if let Some(TunnelKey { network, remote, .. }) = tunnel_key(ctx, 0) {
        let [address, ..] = remote;
        return Some((network, mapped(address.to_be())));
    }
    let TunnelKey { network, remote, .. } = tunnel_key(ctx, BPF_F_TUNINFO_IPV6)?;
    Some((network, remote))
}

/// VERIFIER: inlined, so that both calls use one key's stack.
#[inline(always)]
fn tunnel_key(ctx: &TcContext, flags: u32) -> Option<TunnelKey> {
    let mut key = TunnelKey {
        network: 0,
        remote: [0; 4],
        tos: 0,
        ttl: 0,
        extension: 0,
        label: 0,
    };
    #[expect(clippy::cast_possible_truncation, reason = "28")]
    let size = size_of::<TunnelKey>() as u32;
    // SAFETY: as in `set_tunnel_key`.
    let result = unsafe { bpf_skb_get_tunnel_key(ctx.skb.skb, (&raw mut key).cast(), size, u64::from(flags)) };
    (result == 0).then_some(key)
}
