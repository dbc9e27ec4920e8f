//! Computes which addresses of a network may be leased, and why others may not.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::NetworkSpec;

use super::{
    error::{Family, LeaseError},
    from_v4,
    interval::IntervalSet,
};

/// The ranges of one family of one network.
#[derive(Debug, Clone, Default)]
pub(super) struct Usable {
    /// Addresses that may be leased.
    pub(super) addresses: IntervalSet,
    subnets: Vec<Subnet>,
    /// Addresses that may be leased on other nodes.
    elsewhere: IntervalSet,
}

#[derive(Debug, Clone, Copy)]
struct Subnet {
    first: u128,
    last: u128,
    gateway: u128,
    /// IPv4 has a broadcast address, IPv6 does not.
    has_broadcast: bool,
}

impl Usable {
    pub(super) fn of(spec: &NetworkSpec, family: Family) -> Self {
        let of_family = |net: &&IpNet| matches!(net, IpNet::V4(_)) == (family == Family::Ipv4);
        let subnets: Vec<Subnet> = spec.subnets.iter().filter(of_family).map(Subnet::of).collect();
        let mut addresses = IntervalSet::default();
        for subnet in &subnets {
            addresses.insert(subnet.first, subnet.last);
        }
        for subnet in &subnets {
            addresses.remove(subnet.first, subnet.first);
            addresses.remove(subnet.gateway, subnet.gateway);
            if subnet.has_broadcast {
                addresses.remove(subnet.last, subnet.last);
            }
        }
        for exclude in spec.exclude_subnets.iter().filter(of_family) {
            addresses.remove(number(exclude.network()), number(exclude.broadcast()));
        }
        let mut elsewhere = IntervalSet::default();
        if let Some(blocks) = &spec.blocks {
            elsewhere.clone_from(&addresses);
            let blocks = blocks.iter().filter(of_family);
            addresses = addresses.within(blocks.map(|block| (number(block.network()), number(block.broadcast()))));
        }
        Self {
            addresses,
            subnets,
            elsewhere,
        }
    }

    /// Whether the network has subnets of the family.
    pub(super) fn has_subnets(&self) -> bool {
        !self.subnets.is_empty()
    }

    /// Why the address may not be leased; `None` if it may.
    pub(super) fn lease_error(&self, address: u128) -> Option<LeaseError> {
        if self.addresses.contains(address) {
            return None;
        }
        if !self.has_subnets() {
            return Some(LeaseError::NoSuchFamily);
        }
        if self.elsewhere.contains(address) {
            return Some(LeaseError::OtherNode);
        }
        let inside = self
            .subnets
            .iter()
            .find(|subnet| subnet.first <= address && address <= subnet.last);
        Some(match inside {
            None => LeaseError::OutsideSubnets,
            Some(subnet) if address == subnet.first => LeaseError::NetworkAddress,
            Some(subnet) if address == subnet.gateway => LeaseError::Gateway,
            Some(subnet) if subnet.has_broadcast && address == subnet.last => LeaseError::Broadcast,
            Some(_) => LeaseError::Excluded,
        })
    }
}

impl Subnet {
    fn of(net: &IpNet) -> Self {
        Self {
            first: number(net.network()),
            last: number(net.broadcast()),
            gateway: number(NetworkSpec::gateway(net)),
            has_broadcast: matches!(net, IpNet::V4(_)),
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => from_v4(v4),
        IpAddr::V6(v6) => v6.into(),
    }
}
