//! The address table: which local endpoint has an address of a network.

use crate::layout::map_types;

map_types! {
    /// Key of `ADDRESSES`.
    pub struct AddressKey {
        /// Network id.
        pub network: u32,
        /// Address in network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u32; 4],
    }

    /// Value of `ADDRESSES`.
    pub struct AddressValue {
        /// Id of the local endpoint.
        pub endpoint: u32,
        /// The endpoint's generation when the row was written. A row whose generation is not the endpoint's is stale.
        pub generation: u32,
    }
}

/// Third word of a v4-mapped address, in memory order.
pub const V4_MAPPED: u32 = u32::from_be(0xffff);

/// An IPv4 address (network byte order, as read from a packet) in the 16-byte form of the tables.
#[inline(always)]
#[must_use]
pub const fn mapped(v4: u32) -> [u32; 4] {
    [0, 0, V4_MAPPED, v4]
}

/// 16 bytes in network order as the four words that the tables hold.
#[inline(always)]
#[must_use]
pub const fn words(bytes: [u8; 16]) -> [u32; 4] {
    [
        u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        u32::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
        u32::from_ne_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]),
    ]
}

/// The words of a table address for a standard address.
#[cfg(any(test, feature = "user"))]
#[must_use]
pub fn from_ip(ip: std::net::IpAddr) -> [u32; 4] {
    match ip {
        std::net::IpAddr::V4(v4) => mapped(u32::from_ne_bytes(v4.octets())),
        std::net::IpAddr::V6(v6) => words(v6.octets()),
    }
}

/// The standard address of table words; a v4-mapped one is IPv4.
#[cfg(any(test, feature = "user"))]
#[must_use]
pub fn to_ip(address: [u32; 4]) -> std::net::IpAddr {
    let mut bytes = [0_u8; 16];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(address) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    std::net::Ipv6Addr::from(bytes).to_canonical()
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
        assert_eq!(
            from_ip("1.2.3.4".parse().unwrap()),
            words(*b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x01\x02\x03\x04")
        );
    }
}
