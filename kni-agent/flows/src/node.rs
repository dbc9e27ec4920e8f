//! Recognises the node's own addresses and its uplink.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;

/// Ingress interface of packets that the node itself sends.
const NODE_ITSELF: u32 = 0;

/// The loopback device, in place of any interface that belongs to no pod.
const LOOPBACK: u32 = 1;

/// The ingress interface of a packet from an address that no pod has: none for the node itself.
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
