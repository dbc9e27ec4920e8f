//! Finds endpoints: by the interface that a program runs on, and by network and address.

use aya_ebpf::{helpers::bpf_redirect, programs::TcContext};
use kni_common::{
    IFINDEX_BASE,
    address::{AddressKey, AddressValue, bytes},
    endpoint::{EndpointPolicy, EndpointRow, FLAG_PLUGIN, FLAG_READY, FLAG_SHAPED},
};

use crate::{
    config,
    maps::{ADDRESSES, ENDPOINT_POLICIES, ENDPOINTS, INTERFACES},
    skb,
};

/// Id of the endpoint whose host interface the program runs on. It may be out of range: the row lookup checks it.
#[inline(always)]
pub fn of_interface(ctx: &TcContext) -> u32 {
    let ifindex = skb::ifindex(ctx);
    if ifindex < IFINDEX_BASE {
        return of_plugin_interface(ifindex);
    }
    ifindex - IFINDEX_BASE
}

/// [`of_interface`], for interfaces that no CNI plugin created: out of range for others.
#[inline(always)]
pub fn of_own_interface(ctx: &TcContext) -> u32 {
    skb::ifindex(ctx).wrapping_sub(IFINDEX_BASE)
}

/// The endpoint of a CNI plugin's interface, whose index the kernel assigned, counting up from 1.
#[inline(never)]
fn of_plugin_interface(ifindex: u32) -> u32 {
    match INTERFACES.get_ptr(ifindex) {
        // SAFETY: memory of the table, read once: the kernel may reuse a removed row for another interface at once, and
        // then the program runs for a pod that has just been detached.
        Some(endpoint) => unsafe { endpoint.read_volatile() },
        None => u32::MAX,
    }
}

/// Whether a CNI plugin's datapath forwards the endpoint's packets.
#[inline(always)]
pub fn is_plugin(row: &EndpointRow) -> bool {
    row.flags & FLAG_PLUGIN != 0
}

/// The row of an endpoint, if it exists.
#[inline(always)]
pub fn row(endpoint: u32) -> Option<&'static EndpointRow> {
    // The reference outlives the program's run: array map values are freed only with the map.
    ENDPOINTS.get(endpoint)
}

/// The policy words of an endpoint. Read them after the generation that covers them.
#[inline(always)]
pub fn policy(endpoint: u32) -> Option<&'static EndpointPolicy> {
    // As in `row`.
    ENDPOINT_POLICIES.get(endpoint)
}

/// Index of the host interface of an endpoint that no CNI plugin created.
#[inline(always)]
pub fn ifindex(endpoint: u32) -> u32 {
    IFINDEX_BASE.wrapping_add(endpoint)
}

/// Whether traffic may flow (I1: no ready row, no traffic).
#[inline(always)]
pub fn is_ready(row: &EndpointRow) -> bool {
    row.flags & FLAG_READY != 0
}

/// Whether packets for the endpoint must pass the queueing discipline of its host end.
#[inline(always)]
pub fn is_shaped(row: &EndpointRow) -> bool {
    row.flags & FLAG_SHAPED != 0
}

/// Sends a packet that passed policy and has the pod's MAC addresses out of the host end; `to_pod` lets it through.
#[inline(never)]
pub fn redirect_through_host_end(ctx: &TcContext, ifindex: u32) -> i32 {
    skb::set_mark(ctx, config::evaluated_mark());
    #[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
    // SAFETY: a helper with plain arguments.
    unsafe {
        bpf_redirect(ifindex, 0) as i32
    }
}

/// The holder of the address in the network, as of the time when the row was written.
#[inline(always)]
pub fn by_address(network: u32, address: [u32; 4]) -> Option<AddressValue> {
    let row = ADDRESSES.get_ptr(AddressKey {
        network,
        address: bytes(address),
    })?;
    // SAFETY: memory of the table, copied once: the kernel may reuse a removed row for another address at once. The
    // caller compares the incarnation with the endpoint's, and checks its network.
    Some(unsafe { row.read_volatile() })
}

/// The endpoint's generation, read before the data that it covers: the agent writes it last.
#[inline(always)]
pub fn generation(row: &EndpointRow) -> u32 {
    let [_, generation] = ordered((&raw const row.network).cast());
    generation
}

/// The generation of what is known about peers that are no endpoint of this node, read before the peers' identities.
#[inline(always)]
pub fn epoch(row: &EndpointRow) -> u32 {
    let [_, epoch] = ordered((&raw const row.incarnation).cast());
    epoch
}

const _: () = assert!(
    core::mem::offset_of!(EndpointRow, network) == 24
        && core::mem::offset_of!(EndpointRow, generation) == 28
        && core::mem::offset_of!(EndpointRow, incarnation) == 32
        && core::mem::offset_of!(EndpointRow, epoch) == 36
);

/// Reads two words of a row before everything that follows. x86-64 keeps the order of loads.
#[cfg(not(bpf_target_arch = "aarch64"))]
#[inline(always)]
fn ordered(words: *const [u32; 2]) -> [u32; 2] {
    // SAFETY: aligned words of a row that stays mapped.
    unsafe { core::ptr::read_volatile(words) }
}

/// Reads two words of a row before everything that follows. arm64 may reorder plain loads; there an atomic operation
/// that returns a value is an acquire and a release, on all kernels that can run the programs (a load-acquire needs
/// Linux
/// 6.15).
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
fn ordered(words: *const [u32; 2]) -> [u32; 2] {
    // SAFETY: eight bytes of a row that stays mapped, aligned to eight. They are written back unchanged, atomically.
    let both = unsafe { crate::atomic::fetch_or(words.cast_mut().cast(), 0) };
    let [a, b, c, d, e, f, g, h] = both.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

/// Whether the row still belongs to the owner that the address row names.
#[inline(always)]
pub fn is_current(row: &EndpointRow, network: u32, found: AddressValue) -> bool {
    row.network == network && row.incarnation == found.incarnation && is_ready(row)
}
