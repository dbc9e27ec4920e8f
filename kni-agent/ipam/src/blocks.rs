//! Divides the subnets of a network into units, names them, and chooses units for a node.
//!
//! A subnet has units of one size: a function of the subnet and of `perNodePrefix`, neither of which ever changes. Two
//! units of a network are therefore equal or apart, and since the name of a unit is its range, two objects with
//! different names never have an address in common.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kni_model::NetworkName;

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

/// Ranges that are not available, indexed by address. Ranges may contain each other.
#[derive(Debug, Clone, Default)]
pub struct Taken {
    /// First address to last address; of ranges with the same first address the longest one.
    ranges: BTreeMap<IpAddr, IpAddr>,
    /// The shortest prefix length of a range.
    widest: Prefixes,
}

impl Taken {
    /// Adds a range.
    pub fn insert(&mut self, range: &IpNet) {
        let last = range.broadcast();
        let end = self.ranges.entry(range.network()).or_insert(last);
        *end = (*end).max(last);
        let widest = if range.addr().is_ipv4() {
            &mut self.widest.ipv4
        } else {
            &mut self.widest.ipv6
        };
        *widest = Some(widest.map_or(range.prefix_len(), |known| known.min(range.prefix_len())));
    }

    /// Whether a range has an address in common with one of these.
    pub fn overlaps(&self, range: &IpNet) -> bool {
        let Some(widest) = self.widest.of(range.addr().is_ipv4()) else {
            return false;
        };
        // Prefixes contain each other or are apart, so a range that contains the first address begins at one of its
        // prefixes, and any other overlapping range begins inside.
        let inside = self.ranges.range(range.network()..=range.broadcast()).next().is_some();
        inside
            || (widest..range.prefix_len()).any(|length| {
                let start = IpNet::new(range.network(), length).map(|net| net.network());
                start.is_ok_and(|start| self.ranges.get(&start).is_some_and(|last| *last >= range.network()))
            })
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

/// The first free unit from `start` to the end of the subnet. Each step passes a taken range as a whole.
fn first_gap(subnet: &IpNet, taken: &Taken, start: IpNet, is_free: &impl Fn(&IpNet) -> bool) -> Option<IpNet> {
    let mut unit = start;
    loop {
        if is_free(&unit) {
            return Some(unit);
        }
        let inside = taken.ranges.range(unit.network()..=unit.broadcast());
        let passed = inside.map(|(_, last)| *last).max().unwrap_or(unit.broadcast());
        let containing = (subnet.prefix_len()..unit.prefix_len()).filter_map(|length| {
            let first = IpNet::new(unit.network(), length).ok()?.network();
            taken.ranges.get(&first).copied()
        });
        let last = containing.fold(passed.max(unit.broadcast()), IpAddr::max);
        if last >= subnet.broadcast() {
            return None;
        }
        unit = IpNet::new(next(last)?, unit.prefix_len()).ok()?.trunc();
    }
}

fn next(address: IpAddr) -> Option<IpAddr> {
    Some(match address {
        IpAddr::V4(v4) => Ipv4Addr::from(u32::from(v4).checked_add(1)?).into(),
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6).checked_add(1)?).into(),
    })
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
    let hosts = unit.max_prefix_len() - unit.prefix_len();
    let at_start = unit.network() == subnet.network();
    let at_end = unit.addr().is_ipv4() && unit.broadcast() == subnet.broadcast();
    (hosts <= 1 && at_start) || (hosts == 0 && at_end)
}

#[cfg(test)]
mod tests;
