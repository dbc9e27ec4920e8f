//! Defines prefixes of addresses in the dataplane's form.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_common::{
    address,
    policy::{IdentityData, IdentityKey},
};

/// Bits of an address in the dataplane's form, and of the part before an IPv4 address.
const BITS: u8 = 128;
const V4_BITS: u8 = 96;

/// Bits of the network before the address.
const NETWORK_BITS: u32 = 32;

/// A prefix of addresses in the dataplane's form. Sorts before everything that it contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Prefix {
    bits: u128,
    length: u8,
}

impl Prefix {
    /// The addresses of a range.
    pub(super) fn of(range: &IpNet) -> Self {
        let before = if range.addr().is_ipv4() { V4_BITS } else { 0 };
        Self::cut(bits(range.addr()), before + range.prefix_len())
    }

    /// One address.
    pub(super) fn host(address: IpAddr) -> Self {
        Self::cut(bits(address), BITS)
    }

    /// All of IPv4.
    pub(super) fn v4() -> Self {
        Self::of(&IpNet::V4(ipnet::Ipv4Net::default()))
    }

    /// The prefix of the first `length` bits.
    fn cut(bits: u128, length: u8) -> Self {
        let mask = u128::MAX.checked_shl(u32::from(BITS - length)).unwrap_or(0);
        Self {
            bits: bits & mask,
            length,
        }
    }

    /// The prefix shortened to this length, which must not exceed its own.
    pub(super) fn shortened(&self, length: u8) -> Self {
        Self::cut(self.bits, length)
    }

    /// Number of bits.
    pub(super) fn length(&self) -> u8 {
        self.length
    }

    /// Whether this prefix contains the other one or is equal to it.
    pub(super) fn contains(&self, other: &Self) -> bool {
        self.length <= other.length && Self::cut(other.bits, self.length) == *self
    }

    pub(super) fn is_v4(&self) -> bool {
        Self::v4().contains(self)
    }

    /// The dataplane's key for it.
    pub(super) fn key(&self, network: u32) -> IdentityKey {
        IdentityKey {
            prefix_length: NETWORK_BITS + u32::from(self.length),
            data: IdentityData {
                network: network.to_be_bytes(),
                address: self.bits.to_be_bytes(),
            },
        }
    }
}

fn bits(address: IpAddr) -> u128 {
    u128::from_be_bytes(address::from_ip(address))
}

/// Network and number of significant address bits of a key.
pub(super) fn parts(key: &IdentityKey) -> (u32, u32) {
    (
        u32::from_be_bytes(key.data.network),
        key.prefix_length.saturating_sub(NETWORK_BITS),
    )
}

/// The least key of a network and a number of significant address bits.
pub(super) fn least(network: u32, length: u32) -> IdentityKey {
    IdentityKey {
        prefix_length: NETWORK_BITS + length,
        data: IdentityData {
            network: network.to_be_bytes(),
            address: [0; 16],
        },
    }
}

/// The key of the first `length` bits of the address in `key`.
pub(super) fn shortened(key: &IdentityKey, length: u32) -> IdentityKey {
    let (network, _) = parts(key);
    let length = u8::try_from(length).unwrap_or(BITS).min(BITS);
    Prefix::cut(u128::from_be_bytes(key.data.address), length).key(network)
}
