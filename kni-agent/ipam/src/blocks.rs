//! Divides the subnets of a network into units, names them, and chooses units for a node.
//!
//! A subnet has units of one size: a function of the subnet and of `perNodePrefix`, neither of which ever changes. Two
//! units of a network are therefore equal or apart, and since the name of a unit is its range, two objects with
//! different names never have an address in common.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kni_model::NetworkName;

use super::{from_v4, interval::IntervalSet};

/// Prefix length of IPv4 units by default: 64 addresses. Part of the API: a change would give subnets in use units of
/// two sizes.
const DEFAULT_V4: u8 = 26;
/// Prefix length of IPv6 units by default: 64 addresses. Part of the API, as [`DEFAULT_V4`] is.
const DEFAULT_V6: u8 = 122;
/// A subnet that is smaller than a unit is divided among four nodes: two more prefix bits. Part of the API.
const SHARE: u8 = 2;
/// Units that are tried first: enough to make conflicts rare, and few enough to keep IPv6 addresses short.
const NEAR_BITS: u32 = 20;
/// Units that are probed at random before the gaps between taken ones are walked through.
const PROBES: u128 = 64;

/// A prefix length for each family, where there is one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// IPv4.
    pub ipv4: Option<u8>,
    /// IPv6.
    pub ipv6: Option<u8>,
}

impl Prefixes {
    /// That of a family.
    pub fn of(self, ipv4: bool) -> Option<u8> {
        if ipv4 { self.ipv4 } else { self.ipv6 }
    }
}

/// The prefix length of the units of a subnet. `asked` is the network's `perNodePrefix` of the family.
pub fn unit_prefix(subnet: &IpNet, asked: Option<u8>) -> u8 {
    let default = if subnet.addr().is_ipv4() {
        DEFAULT_V4
    } else {
        DEFAULT_V6
    };
    match asked {
        Some(asked) => asked.clamp(subnet.prefix_len(), subnet.max_prefix_len()),
        None => default
            .max(subnet.prefix_len().saturating_add(SHARE))
            .min(subnet.max_prefix_len()),
    }
}

/// The unit that contains an address; `None` outside of the subnets. `asked` is the network's `perNodePrefix`.
pub fn unit_of(subnets: &[IpNet], asked: Prefixes, address: IpAddr) -> Option<IpNet> {
    let subnet = subnets.iter().find(|subnet| subnet.contains(&address))?;
    IpNet::new(address, unit_prefix(subnet, asked.of(address.is_ipv4())))
        .ok()
        .map(|net| net.trunc())
}

/// Whether a range is one of the units of these subnets.
pub fn is_unit(subnets: &[IpNet], asked: Prefixes, range: &IpNet) -> bool {
    unit_of(subnets, asked, range.addr()) == Some(*range)
}

/// The name of the object for a unit: `NETWORK.v4-10-10-0-64-26`, the range with `-` in place of `.`, `:` and `/`.
///
/// At most 97 characters, and unique: a network's name has no dot, and the family shows which characters were replaced.
pub fn object_name(network: &NetworkName, unit: &IpNet) -> String {
    let family = if unit.addr().is_ipv4() { 4 } else { 6 };
    let range = unit.trunc().to_string().replace(['.', ':', '/'], "-");
    format!("{network}.v{family}-{range}")
}

/// The network and the range of an object's name; `None` if it is not a name that [`object_name`] gives.
pub fn parse_object_name(name: &str) -> Option<(NetworkName, IpNet)> {
    let (network, range) = name.split_once('.')?;
    let network: NetworkName = network.parse().ok()?;
    let (address, prefix) = range.get(3..)?.rsplit_once('-')?;
    let prefix = prefix.parse().ok()?;
    let unit: IpNet = match range.get(..3)? {
        "v4-" => Ipv4Net::new(address.replace('-', ".").parse().ok()?, prefix)
            .ok()?
            .into(),
        "v6-" => Ipv6Net::new(address.replace('-', ":").parse().ok()?, prefix)
            .ok()?
            .into(),
        _ => return None,
    };
    (object_name(&network, &unit) == name).then_some((network, unit))
}

/// Ranges that are not available. Ranges may contain each other.
#[derive(Debug, Clone, Default)]
pub struct Taken {
    ipv4: IntervalSet,
    ipv6: IntervalSet,
}

impl Taken {
    fn of(&self, ipv4: bool) -> &IntervalSet {
        if ipv4 { &self.ipv4 } else { &self.ipv6 }
    }

    /// Adds a range.
    pub fn insert(&mut self, range: &IpNet) {
        let set = if range.addr().is_ipv4() {
            &mut self.ipv4
        } else {
            &mut self.ipv6
        };
        set.insert(number(range.network()), number(range.broadcast()));
    }

    /// Whether a range has an address in common with one of these.
    pub fn overlaps(&self, range: &IpNet) -> bool {
        self.last_in(range).is_some()
    }

    /// The last address of the last run of taken addresses that begins before the end of a range and reaches into it.
    fn last_in(&self, range: &IpNet) -> Option<u128> {
        let of_family = self.of(range.addr().is_ipv4());
        of_family.last_reaching(number(range.network()), number(range.broadcast()))
    }

    /// How many addresses of a subnet are taken.
    pub fn count_in(&self, subnet: &IpNet) -> u128 {
        let of_family = self.of(subnet.addr().is_ipv4());
        let both = of_family.within(std::iter::once((number(subnet.network()), number(subnet.broadcast()))));
        both.count()
    }
}

impl<'a> FromIterator<&'a IpNet> for Taken {
    fn from_iter<I: IntoIterator<Item = &'a IpNet>>(ranges: I) -> Self {
        let mut taken = Self::default();
        for range in ranges {
            taken.insert(range);
        }
        taken
    }
}

/// A free unit of one family; `None` if none is left.
///
/// `taken` holds the units of all nodes and the ranges that are never leased. Units are probed in an order that derives
/// from `seed`, so that concurrent searches of nodes rarely choose the same one; only where most units are taken, the
/// gaps are walked through in order.
pub fn next_unit(subnets: &[IpNet], taken: &Taken, ipv4: bool, asked: Option<u8>, seed: u64) -> Option<IpNet> {
    let mut of_family = subnets.iter().filter(|subnet| subnet.addr().is_ipv4() == ipv4);
    of_family.find_map(|subnet| free_in(subnet, taken, unit_prefix(subnet, asked), seed))
}

fn free_in(subnet: &IpNet, taken: &Taken, prefix: u8, seed: u64) -> Option<IpNet> {
    let bits = u32::from(prefix.saturating_sub(subnet.prefix_len()));
    let is_free = |unit: &IpNet| !is_useless(subnet, unit) && !taken.overlaps(unit);
    let near = bits.min(NEAR_BITS);
    let probed = [near, bits].into_iter().find_map(|bits| {
        let count = 1_u128.checked_shl(bits)?;
        let probes = (0..count.min(PROBES)).filter_map(|step| unit_at(subnet, shuffled(step, bits, seed), prefix));
        probes.into_iter().find(is_free)
    });
    probed.or_else(|| {
        let start = unit_at(subnet, shuffled(0, bits, seed), prefix)?;
        first_gap(subnet, taken, start, &is_free).or_else(|| {
            let first = IpNet::new(subnet.network(), prefix).ok()?;
            first_gap(subnet, taken, first, &is_free)
        })
    })
}

/// A permutation of the numbers below 2^bits: an odd multiplier and an offset, both from the seed.
fn shuffled(step: u128, bits: u32, seed: u64) -> u128 {
    let mask = 1_u128.checked_shl(bits).map_or(u128::MAX, |count| count - 1);
    let mixed = mix(seed);
    let multiplier = (u128::from(mix(mixed)) << 64 | u128::from(mixed)) | 1;
    let offset = u128::from(mix(mixed ^ 1)) << 64 | u128::from(mix(seed ^ 2));
    step.wrapping_mul(multiplier).wrapping_add(offset) & mask
}

/// The finaliser of splitmix64: every bit of the result depends on every bit of the input.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The first free unit from `start` to the end of the subnet. Each step passes a run of taken addresses as a whole,
/// however many ranges it consists of.
fn first_gap(subnet: &IpNet, taken: &Taken, start: IpNet, is_free: &impl Fn(&IpNet) -> bool) -> Option<IpNet> {
    let end = number(subnet.broadcast());
    let mut unit = start;
    loop {
        if is_free(&unit) {
            return Some(unit);
        }
        let passed = number(unit.broadcast());
        let last = taken.last_in(&unit).map_or(passed, |last| last.max(passed));
        if last >= end {
            return None;
        }
        let next = address(last + 1, unit.addr().is_ipv4())?;
        unit = IpNet::new(next, unit.prefix_len()).ok()?.trunc();
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => from_v4(v4),
        IpAddr::V6(v6) => v6.into(),
    }
}

fn address(number: u128, ipv4: bool) -> Option<IpAddr> {
    if ipv4 {
        Some(Ipv4Addr::from(u32::try_from(number).ok()?).into())
    } else {
        Some(Ipv6Addr::from(number).into())
    }
}

fn unit_at(subnet: &IpNet, index: u128, prefix: u8) -> Option<IpNet> {
    let shift = u32::from(subnet.max_prefix_len().saturating_sub(prefix));
    let offset = index.checked_shl(shift).unwrap_or(0);
    match subnet {
        IpNet::V4(net) => {
            let address = u32::from(net.network()).checked_add(u32::try_from(offset).ok()?)?;
            Some(Ipv4Net::new(address.into(), prefix).ok()?.into())
        }
        IpNet::V6(net) => {
            let address = u128::from(net.network()).checked_add(offset)?;
            Some(Ipv6Net::new(address.into(), prefix).ok()?.into())
        }
    }
}

/// Whether no address of the unit can be leased: they are the subnet's network, gateway or broadcast address.
fn is_useless(subnet: &IpNet, unit: &IpNet) -> bool {
    let first = number(unit.network());
    let last = number(unit.broadcast());
    // The network's own address and the gateway.
    let reserved = number(subnet.network()).saturating_add(1);
    let is_broadcast = unit.addr().is_ipv4() && first == number(subnet.broadcast());
    last <= reserved || (first == last && is_broadcast)
}

#[cfg(test)]
mod tests;
