//! Matches addresses with address blocks, bit by bit.

use std::net::IpAddr;

use k8s_openapi::api::networking::v1::IPBlock;

/// Whether the block contains the address and none of its exceptions does.
pub(super) fn contains(block: &IPBlock, address: IpAddr) -> bool {
    let mut excepts = block.except.iter().flatten();
    inside(&block.cidr, address) && !excepts.any(|cidr| inside(cidr, address))
}

/// Whether the address starts with the bits of `cidr`; false for another family.
fn inside(cidr: &str, address: IpAddr) -> bool {
    let (network, length) = cidr
        .split_once('/')
        .unwrap_or_else(|| panic!("no prefix length in {cidr:?}"));
    let network: IpAddr = network.parse().unwrap_or_else(|e| panic!("{cidr:?}: {e}"));
    let length: u32 = length.parse().unwrap_or_else(|e| panic!("{cidr:?}: {e}"));
    let differing = match (network, address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
    };
    differing >= length
}
