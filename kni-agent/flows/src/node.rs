//! Recognises the node's own addresses and its uplink.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;

/// What the node would have received a packet from.
const NODE_ITSELF: u32 = 0;

/// The loopback device: some interface that is no pod's.
const LOOPBACK: u32 = 1;

/// The interface that a packet from this address, which no pod has, would have come in by: none for the node itself.
pub(super) fn ingress_of(source: IpAddr) -> u32 {
    if is_nodes(source) { NODE_ITSELF } else { LOOPBACK }
}

fn is_nodes(address: IpAddr) -> bool {
    let Ok(found) = getifaddrs() else { return false };
    found.filter_map(|entry| entry.address).any(|held| {
        let v4 = held.as_sockaddr_in().map(|held| IpAddr::V4(held.ip()));
        let v6 = held.as_sockaddr_in6().map(|held| IpAddr::V6(held.ip()));
        v4.or(v6) == Some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_interface_has_comes_from_outside() {
        assert_eq!(ingress_of("192.0.2.77".parse().unwrap()), LOOPBACK);
        for own in getifaddrs().unwrap().filter_map(|entry| entry.address) {
            if let Some(v4) = own.as_sockaddr_in() {
                assert_eq!(ingress_of(v4.ip().into()), NODE_ITSELF);
            }
        }
    }
}
