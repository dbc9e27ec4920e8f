//! Finds endpoints: by the interface that a program runs on, and by network and address.

use aya_ebpf::{helpers::bpf_redirect, programs::TcContext};
use kni_common::{
    IFINDEX_BASE,
    address::{AddressKey, AddressValue, bytes},
    endpoint::{EndpointRow, FLAG_PLUGIN, FLAG_READY, FLAG_SHAPED, JUDGED_MARK},
};

use crate::{
    maps::{ADDRESSES, ENDPOINTS, INTERFACES},
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

/// The endpoint of a CNI plugin's interface, whose index the kernel assigned, counting up from 1.
#[inline(never)]
fn of_plugin_interface(ifindex: u32) -> u32 {
    // SAFETY: user space replaces rows whole; a row that is removed meanwhile stays readable (RCU).
    match unsafe { INTERFACES.get(ifindex) } {
        Some(endpoint) => *endpoint,
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
    skb::set_mark(ctx, JUDGED_MARK);
    #[expect(clippy::cast_possible_truncation, reason = "the helper returns a TC action")]
    // SAFETY: a helper with plain arguments.
    unsafe {
        bpf_redirect(ifindex, 0) as i32
    }
}

/// The holder of the address in the network, as of the time when the row was written.
#[inline(always)]
pub fn by_address(network: u32, address: [u32; 4]) -> Option<&'static AddressValue> {
    // SAFETY: user space replaces rows whole; a row that is replaced meanwhile stays readable (RCU), and the caller
    // compares its incarnation with the endpoint's.
    unsafe {
        ADDRESSES.get(AddressKey {
            network,
            address: bytes(address),
        })
    }
}

/// The endpoint's generation, read before the data that it covers: the agent writes it last.
#[inline(always)]
pub fn generation(row: &EndpointRow) -> u32 {
    // SAFETY: an aligned word of a row that stays mapped.
    unsafe { core::ptr::read_volatile(&raw const row.generation) }
}

/// Whether the row still belongs to the owner that the address row names.
#[inline(always)]
pub fn is_current(row: &EndpointRow, network: u32, found: &AddressValue) -> bool {
    row.network == network && row.incarnation == found.incarnation && is_ready(row)
}
