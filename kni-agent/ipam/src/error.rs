//! Defines the reasons why an address cannot be leased.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use kni_model::NetworkName;

use super::{REST, to_v4};

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
    /// Every address of the family is leased, or rests after another owner.
    #[error(
        "network {network} has no free {family} address now: of {total} on this node, 0 are free and {resting} rest \
         after their last pod; the next one {}", is_free(*.next)
    )]
    AllRest {
        /// The network.
        network: NetworkName,
        /// The family without a free address.
        family: Family,
        /// Addresses of the family that can be leased on this node, in use or not.
        total: u128,
        /// How many rest.
        resting: usize,
        /// How long the shortest rest lasts; `None` while no other node is known to have learned that a pod is gone.
        next: Option<Duration>,
    },
    /// The requested address rests after another owner.
    #[error("address {address} of network {network} rests after its last pod; it {}", is_free(*.next))]
    AddressRests {
        /// The network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// How long it rests; `None` as in [`Self::AllRest`].
        next: Option<Duration>,
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

fn is_free(next: Option<Duration>) -> String {
    match next {
        // Rounded up: a repeated call must not be early.
        Some(next) => format!("is free in {} s", next.as_millis().div_ceil(1000)),
        None => format!(
            "is free {} s after the API server has confirmed that the pod is gone",
            REST.as_secs()
        ),
    }
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
    Exhausted {
        total: u128,
    },
    InUse {
        address: u128,
        owner: String,
    },
    NotHere {
        address: u128,
        reason: LeaseError,
    },
    AllRest {
        total: u128,
        resting: usize,
        end: Option<Duration>,
    },
    Rests {
        address: u128,
        end: Option<Duration>,
    },
}

impl PoolError {
    pub(super) fn at(self, network: &NetworkName, family: Family, now: Duration) -> IpamError {
        let network = network.clone();
        let left = |end: Option<Duration>| end.map(|end| end.saturating_sub(now));
        let ip = |number| match family {
            Family::Ipv4 => IpAddr::V4(to_v4(number)),
            Family::Ipv6 => IpAddr::V6(Ipv6Addr::from(number)),
        };
        match self {
            Self::Exhausted { total } => IpamError::Exhausted { network, family, total },
            Self::AllRest { total, resting, end } => IpamError::AllRest {
                network,
                family,
                total,
                resting,
                next: left(end),
            },
            Self::Rests { address, end } => IpamError::AddressRests {
                network,
                address: ip(address),
                next: left(end),
            },
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
