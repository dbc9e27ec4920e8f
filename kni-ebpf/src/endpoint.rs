//! Finds endpoints: by the interface a program runs on, and by network and address.

use aya_ebpf::programs::TcContext;
use kni_common::{
    IFINDEX_BASE,
    address::{AddressKey, AddressValue, bytes},
    endpoint::{EndpointRow, FLAG_READY},
};

use crate::{
    maps::{ADDRESSES, ENDPOINTS},
    skb,
};

/// Id of the endpoint whose host interface the program runs on. May be out of range: the row lookup tells.
#[inline(always)]
pub fn of_interface(ctx: &TcContext) -> u32 {
    skb::ifindex(ctx).wrapping_sub(IFINDEX_BASE)
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

/// Who has the address in the network, as it was when the row was written.
#[inline(always)]
pub fn by_address(network: u32, address: [u32; 4]) -> Option<&'static AddressValue> {
    // SAFETY: user space replaces rows whole; one that is replaced meanwhile stays readable (RCU), and the caller
    // compares its generation with the endpoint's.
    unsafe {
        ADDRESSES.get(AddressKey {
            network,
            address: bytes(address),
        })
    }
}

/// Whether the row still belongs to whom the address row names.
#[inline(always)]
pub fn is_current(row: &EndpointRow, network: u32, found: &AddressValue) -> bool {
    row.network == network && row.generation == found.generation && is_ready(row)
}
