//! Parses addresses and address ranges, and refuses reserved ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::invalid::{FieldError, at, read_each, shown};

/// A range without host bits.
pub(super) fn read_cidr(text: &str) -> Result<IpNet, String> {
    let net = parse(text)?;
    if net != net.trunc() {
        return Err(format!("{net} has host bits set; write {}", net.trunc()));
    }
    Ok(net)
}

/// A range as Kubernetes parses it: host bits are ignored.
pub(super) fn read_cidr_truncated(text: &str) -> Result<IpNet, String> {
    let net = parse(text)?.trunc();
    // No packet carries an IPv4-mapped address: treat the range as IPv4.
    if overlap(&net, &mapped()) && net.prefix_len() >= mapped().prefix_len() {
        return Err(format!("{net} is IPv4-mapped; write the IPv4 range"));
    }
    Ok(net)
}

/// Parses a list of at least `min` and at most `max` ranges without host bits.
pub(super) fn read_cidrs(field: &str, list: &[String], min: usize, max: usize) -> Result<Vec<IpNet>, FieldError> {
    if list.len() < min || list.len() > max {
        return Err(at(field, format!("has {} entries, not {min} to {max}", list.len())));
    }
    read_each(field, list, |path, text| {
        read_cidr(text).map_err(|reason| at(path, reason))
    })
}

/// Parses addresses that a host may have, at most one of each family.
pub(super) fn read_addresses(field: &str, list: &[String]) -> Result<Vec<IpAddr>, FieldError> {
    let addresses = read_each(field, list, |path, text| {
        read_address(text).map_err(|reason| at(path, reason))
    })?;
    for (index, address) in addresses.iter().enumerate() {
        let earlier = addresses.get(..index).unwrap_or_default();
        if let Some(other) = earlier.iter().find(|other| other.is_ipv4() == address.is_ipv4()) {
            let reason = format!("{address} is of the same family as {other}");
            return Err(at(format!("{field}[{index}]"), reason));
        }
    }
    Ok(addresses)
}

/// Parses an address that a host may have.
pub(super) fn read_address(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text
        .parse()
        .map_err(|error| format!("{:?} is not an address: {error}", shown(text)))?;
    match reserved_ranges()
        .into_iter()
        .find(|(range, _)| range.contains(&address))
    {
        Some((_, what)) => Err(format!("{address} is {what}")),
        None => Ok(address),
    }
}

fn parse(text: &str) -> Result<IpNet, String> {
    text.parse()
        .map_err(|error| format!("{:?} is not in CIDR notation: {error}", shown(text)))
}

/// Checks a range of addresses for pods or services: its size, that it is not reserved, and that it overlaps none of
/// `others`.
pub(super) fn check_range(range: &IpNet, others: &[IpNet]) -> Result<(), String> {
    let lengths = prefix_lengths(range);
    if !lengths.contains(&range.prefix_len()) {
        let (min, max) = (lengths.start(), lengths.end());
        return Err(format!("{range} has a prefix length outside {min} to {max}"));
    }
    if let Some((reserved, what)) = reserved_range(range) {
        return Err(format!("{range} overlaps {reserved}, which is {what}"));
    }
    match others.iter().find(|other| overlap(other, range)) {
        Some(other) => Err(format!("{range} overlaps {other} of the same network")),
        None => Ok(()),
    }
}

/// The longest prefix leaves at least one pod address beside the reserved ones (IPv4: network, gateway and broadcast;
/// IPv6: subnet-router anycast and gateway). The shortest is the largest private IPv4 block, 10.0.0.0/8; for IPv6,
/// anything shorter than 16 covers most of the allocated space and can only be a typing error.
fn prefix_lengths(range: &IpNet) -> std::ops::RangeInclusive<u8> {
    match range {
        IpNet::V4(_) => 8..=30,
        IpNet::V6(_) => 16..=126,
    }
}

/// Ranges that pod addresses must not be in. Link-local covers the gateways that every pod has (`169.254.1.1` and
/// `fe80::1`).
fn reserved_ranges() -> [(IpNet, &'static str); 10] {
    let v4 = |addr: [u8; 4], len| IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from(addr), len));
    let v6 = |addr: u128, len| IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from(addr), len));
    [
        (v4([0, 0, 0, 0], 8), "unspecified (\"this network\")"),
        (v4([127, 0, 0, 0], 8), "loopback"),
        (v4([169, 254, 0, 0], 16), "link-local"),
        (v4([255, 255, 255, 255], 32), "broadcast"),
        (v4([224, 0, 0, 0], 4), "multicast"),
        (v6(0, 128), "unspecified"),
        (v6(1, 128), "loopback"),
        (mapped(), "IPv4-mapped"),
        (v6(0xfe80 << 112, 10), "link-local"),
        (v6(0xff00 << 112, 8), "multicast"),
    ]
}

/// The reserved range that a range overlaps, and what it is.
pub(super) fn reserved_range(range: &IpNet) -> Option<(IpNet, &'static str)> {
    reserved_ranges()
        .into_iter()
        .find(|(reserved, _)| overlap(reserved, range))
}

fn mapped() -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from(0xffff_0000_0000), 96))
}

pub(super) fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_ignores_host_bits_and_we_do_not() {
        assert_eq!(read_cidr_truncated("10.1.2.3/24").unwrap().to_string(), "10.1.2.0/24");
        assert_eq!(read_cidr_truncated("fd00::1/64").unwrap().to_string(), "fd00::/64");
        assert_eq!(read_cidr_truncated("::/0").unwrap().to_string(), "::/0");
        assert!(read_cidr("10.1.2.3/24").unwrap_err().contains("write 10.1.2.0/24"));
        // Leading zeros are decimal, as in the API server.
        assert_eq!(read_cidr_truncated("010.0.0.0/8").unwrap().to_string(), "10.0.0.0/8");
        for bad in ["10.1.2.3", "10.0.0.0/33", "", "fd00::/129", "::ffff:10.0.0.0/104"] {
            assert!(read_cidr_truncated(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_usable_and_one_per_family() {
        let read = |list: &[&str]| {
            let list: Vec<String> = list.iter().map(|text| (*text).to_owned()).collect();
            read_addresses("f", &list)
        };
        assert_eq!(read(&["192.0.2.1", "2001:db8::1"]).unwrap().len(), 2);
        assert!(read(&[]).unwrap().is_empty());
        for (list, field, why) in [
            (["192.0.2.1", "192.0.2.2"], "f[1]", "same family as 192.0.2.1"),
            (["fd00::1", "fd00::2"], "f[1]", "same family"),
            (["192.0.2.1", "fe80::1"], "f[1]", "link-local"),
            (["127.0.0.1", "fd00::1"], "f[0]", "loopback"),
            (["0.0.0.0", "fd00::1"], "f[0]", "unspecified"),
            (["255.255.255.255", "fd00::1"], "f[0]", "broadcast"),
            (["192.0.2.1", "::ffff:192.0.2.1"], "f[1]", "IPv4-mapped"),
            (["192.0.2.1/32", "fd00::1"], "f[0]", "not an address"),
        ] {
            let (at, reason) = read(&list).unwrap_err();
            assert_eq!(at, field, "{list:?}");
            assert!(reason.contains(why), "{list:?}: {reason}");
        }
    }
}
