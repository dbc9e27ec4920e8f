//! Defines the address table, which maps an address of a network to a local endpoint or a service.

use crate::map_types::map_types;

map_types! {
    /// Key of `ADDRESSES`.
    pub struct AddressKey {
        /// Network id. [`crate::uplink::OUTSIDE`]: an address that pods of other nodes reach through the network that
        /// the nodes share, without a tunnel, which would name the pod's network.
        pub network: u32,
        /// Address in network byte order, IPv4 as `::ffff:a.b.c.d`: in a dump the last four bytes are the IPv4 address.
        pub address: [u8; 16],
    }

    /// Value of `ADDRESSES`.
    pub struct AddressValue {
        /// Id of the local endpoint, or [`ADDRESS_OF_SERVICE`].
        pub endpoint: u32,
        /// The endpoint's incarnation when the row was written, 0 for a service. A row with another incarnation than
        /// the endpoint's is stale.
        pub incarnation: u32,
    }
}

/// In place of an endpoint id: the address is a virtual one, and `SERVICES` holds its ports.
pub const ADDRESS_OF_SERVICE: u32 = u32::MAX;

/// Third word of a v4-mapped address, in memory order.
pub const V4_MAPPED: u32 = u32::from_be(0xffff);

/// An IPv4 address (network byte order, as read from a packet) as four words in memory order.
#[inline(always)]
#[must_use]
pub const fn mapped(v4: u32) -> [u32; 4] {
    [0, 0, V4_MAPPED, v4]
}

/// 16 bytes in network order as four words in memory order, for comparison with words read from a packet.
#[inline(always)]
#[must_use]
pub const fn words(bytes: [u8; 16]) -> [u32; 4] {
    // SAFETY: as in `bytes`.
    unsafe { core::mem::transmute(bytes) }
}

/// The bytes of words that were read from a packet.
#[inline(always)]
#[must_use]
pub const fn bytes(words: [u32; 4]) -> [u8; 16] {
    // SAFETY: both types have 16 bytes, and every bit pattern is valid in both. A conversion byte by byte would not
    // keep the stores whole: it makes the programs a fifth larger.
    unsafe { core::mem::transmute(words) }
}

/// The table form of a standard address.
#[cfg(any(test, feature = "user"))]
#[must_use]
pub fn from_ip(ip: std::net::IpAddr) -> [u8; 16] {
    match ip {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    }
}

/// The standard address of the table form; a v4-mapped address is returned as IPv4.
#[cfg(any(test, feature = "user"))]
#[must_use]
pub fn to_ip(address: [u8; 16]) -> std::net::IpAddr {
    std::net::Ipv6Addr::from(address).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["10.1.2.3", "0.0.0.0", "255.255.255.255", "fd00::1", "::", "fe80::1"] {
            let ip: std::net::IpAddr = text.parse().unwrap();
            assert_eq!(to_ip(from_ip(ip)), ip);
        }
        let v4 = u32::from_ne_bytes([1, 2, 3, 4]);
        assert_eq!(from_ip("1.2.3.4".parse().unwrap()), bytes(mapped(v4)));
        assert_eq!(words(bytes(mapped(v4))), mapped(v4));
    }
}
