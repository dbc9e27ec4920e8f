//! Defines the reasons why an address cannot be leased.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use kni_model::NetworkName;

use super::to_v4;

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// A lease that is refused. The caller adds the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IpamError {
    /// The network is unknown.
    #[error("network {network} is not known")]
    UnknownNetwork {
        /// The network.
        network: NetworkName,
    },
    /// Every address of the family is leased.
    #[error("network {network} has no free {family} address: of {total} on this node, 0 are free")]
    Exhausted {
        /// The network.
        network: NetworkName,
        /// The family that has run out.
        family: Family,
        /// Addresses of the family that can be leased on this node, in use or not.
        total: u128,
    },
    /// The address is leased to another owner.
    #[error("address {address} of network {network} is in use by {owner}")]
    AddressInUse {
        /// The network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// The current owner.
        owner: String,
    },
    /// The network never hands out the address.
    #[error("address {address} cannot be leased from network {network}: {reason}")]
    AddressNotInNetwork {
        /// The network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// Why it is never handed out.
        reason: LeaseError,
    },
    /// More than one address of one family was requested.
    #[error("{count} {family} addresses were requested in network {network}; an interface has one")]
    TooManyAddresses {
        /// The network.
        network: NetworkName,
        /// The family.
        family: Family,
        /// How many were requested.
        count: usize,
    },
}

/// Why a network never hands out an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseError {
    /// The network has no subnet of this family.
    NoSuchFamily,
    /// It is in none of the subnets.
    OutsideSubnets,
    /// The operator excluded it.
    Excluded,
    /// It is the first address of a subnet: IPv4 network address, IPv6 subnet-router anycast address.
    NetworkAddress,
    /// It is the gateway of a subnet.
    Gateway,
    /// It is the last address of an IPv4 subnet.
    Broadcast,
    /// It is in none of the node's address blocks.
    OtherNode,
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSuchFamily => "the network has no subnet of its family",
            Self::OutsideSubnets => "it is outside the network's subnets",
            Self::Excluded => "it is excluded",
            Self::NetworkAddress => "it is the network's own address",
            Self::Gateway => "it is the gateway",
            Self::Broadcast => "it is the broadcast address",
            Self::OtherNode => "it is in no address block of this node",
        })
    }
}

/// An error of a single pool, without network and family.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PoolError {
    Exhausted { total: u128 },
    InUse { address: u128, owner: String },
    NotHere { address: u128, reason: LeaseError },
}

impl PoolError {
    pub(super) fn at(self, network: &NetworkName, family: Family) -> IpamError {
        let network = network.clone();
        let ip = |number| match family {
            Family::Ipv4 => IpAddr::V4(to_v4(number)),
            Family::Ipv6 => IpAddr::V6(Ipv6Addr::from(number)),
        };
        match self {
            Self::Exhausted { total } => IpamError::Exhausted { network, family, total },
            Self::InUse { address, owner } => IpamError::AddressInUse {
                network,
                address: ip(address),
                owner,
            },
            Self::NotHere { address, reason } => IpamError::AddressNotInNetwork {
                network,
                address: ip(address),
                reason,
            },
        }
    }
}
