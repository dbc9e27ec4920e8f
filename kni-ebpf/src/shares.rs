//! Finds the nodes that share an egress address: the one that is responsible for it, and those whose pods leave with
//! it.

use aya_ebpf::btf_maps::lpm_trie::Key;
use kni_common::{
    Verdict,
    address::bytes,
    uplink::{EgressShareData, EgressShareValue, SHARE_LEAVE, SHARE_PREFIX, SHARED_V4, SHARED_V6},
};

use crate::{
    decision::Decision,
    maps::{EGRESS_SHARES, SHARED_EGRESS},
};

/// The row of an address and a unit of its ports; unit 0: what leaves from this node.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn share(address: &[u32; 4], unit: u8) -> Option<&'static EgressShareValue> {
    let key = Key::new(
        SHARE_PREFIX,
        EgressShareData {
            address: bytes(*address),
            unit: u32::from(unit).to_be_bytes(),
        },
    );
    // The reference outlives the program's run: a removed row is freed after all programs that may have found it.
    EGRESS_SHARES.get(&key)
}

/// Whether the endpoint's address of the family is one that several nodes share.
#[inline(always)]
fn is_shared(endpoint: u32, v4: bool) -> bool {
    let family = if v4 { SHARED_V4 } else { SHARED_V6 };
    SHARED_EGRESS
        .get(endpoint)
        .is_some_and(|families| families & family != 0)
}

/// The node that packets of the endpoint leave by with this source: [`Decision::UPLINK`] for this one, or
/// [`Decision::owner`].
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn way(endpoint: u32, v4: bool, source: &[u32; 4]) -> Decision {
    if !is_shared(endpoint, v4) {
        return Decision::UPLINK;
    }
    match share(source, 0) {
        Some(row) if row.role == SHARE_LEAVE && row.node != 0 => Decision::owner(row.node),
        Some(row) if row.role == SHARE_LEAVE => Decision::UPLINK,
        _ => Decision::drop(Verdict::EgressAddress),
    }
}

/// The ports that packets of the endpoint leave with, where its address is shared: the first one, and the last one in
/// the upper half. 0 where it is not.
///
/// VERIFIER: one word: a function that is not inlined returns no structure.
#[inline(never)]
pub fn ports(endpoint: u32, v4: bool, source: &[u32; 4]) -> Result<u32, Verdict> {
    if !is_shared(endpoint, v4) {
        return Ok(0);
    }
    match share(source, 0) {
        Some(row) if row.role == SHARE_LEAVE => Ok(u32::from(row.first) | u32::from(row.last) << 16),
        _ => Err(Verdict::EgressAddress),
    }
}

/// Whether replies to a port of the address reach the endpoint: another node that is responsible for the address sends
/// it those to its own unit only.
#[inline(always)]
pub fn has_port(endpoint: u32, v4: bool, source: &[u32; 4], port: u16) -> Result<bool, Verdict> {
    if !is_shared(endpoint, v4) {
        return Ok(true);
    }
    match share(source, 0) {
        // This node finds its own flows first.
        Some(row) if row.role == SHARE_LEAVE => Ok(row.node == 0 || (row.first <= port && port <= row.last)),
        _ => Err(Verdict::EgressAddress),
    }
}
