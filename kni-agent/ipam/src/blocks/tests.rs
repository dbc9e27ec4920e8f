//! Tests that units of a network never overlap, that names exclude overlap, and that every unit is found.

use proptest::prelude::*;

use super::*;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[test]
fn sizes_follow_from_the_subnet_unless_asked_for() {
    for (subnet, asked, prefix) in [
        ("10.0.0.0/16", None, 26),
        ("10.0.0.0/16", Some(24), 24),
        ("10.0.0.0/28", None, 30),
        ("10.0.0.0/30", None, 32),
        ("10.0.0.0/28", Some(24), 28),
        ("fd00::/64", None, 122),
        ("fd00::/124", None, 126),
    ] {
        assert_eq!(
            unit_prefix(&subnet.parse().unwrap(), asked),
            prefix,
            "{subnet} {asked:?}"
        );
    }
}

#[test]
fn a_network_is_used_up_to_its_last_address() {
    let subnets = nets(&["10.0.0.0/29"]);
    let mut found = Vec::new();
    while let Some(unit) = next_unit(&subnets, &found.iter().collect(), true, None, 7) {
        found.push(unit);
    }
    found.sort();
    // The first two addresses are the network's and the gateway's.
    assert_eq!(found, nets(&["10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/31"]));
    assert_eq!(
        next_unit(&subnets, &Taken::default(), false, None, 7),
        None,
        "there is no IPv6 subnet"
    );
}

#[test]
fn the_last_free_unit_of_a_full_range_is_found() {
    let subnets = nets(&["10.0.0.0/8"]);
    for free in ["10.0.0.0/26", "10.200.17.64/26", "10.255.255.192/26"] {
        let free: IpNet = free.parse().unwrap();
        let mut taken = Taken::default();
        for index in 0..1 << 18 {
            let unit = unit_at(&subnets[0], index, 26).unwrap();
            if unit != free {
                taken.insert(&unit);
            }
        }
        assert_eq!(next_unit(&subnets, &taken, true, None, 99), Some(free));
        taken.insert(&free);
        assert_eq!(next_unit(&subnets, &taken, true, None, 99), None);
    }
}

#[test]
fn units_of_one_address_are_used_up_but_for_those_that_no_pod_can_have() {
    for (subnet, prefix, usable) in [("10.0.0.0/24", 32, 253), ("fd00::/120", 128, 254)] {
        let subnets = nets(&[subnet]);
        let ipv4 = prefix == 32;
        let mut taken = Taken::default();
        let mut found = 0;
        while let Some(unit) = next_unit(&subnets, &taken, ipv4, Some(prefix), found) {
            assert_eq!(unit.prefix_len(), prefix);
            let name = object_name(&"blue".parse().unwrap(), &unit);
            assert_eq!(parse_object_name(&name).map(|(_, unit)| unit), Some(unit), "{name}");
            assert!(is_unit(
                &subnets,
                Prefixes {
                    ipv4: Some(prefix),
                    ipv6: Some(prefix)
                },
                &unit
            ));
            taken.insert(&unit);
            found += 1;
        }
        assert_eq!(found, usable, "{subnet}");
        assert_eq!(taken.count_in(&subnets[0]), u128::from(usable));
    }
}

/// With nearly all of 65 536 units taken a search costs steps by run, not by unit: otherwise this takes minutes.
#[test]
fn a_search_among_many_small_units_is_quick() {
    let subnets = nets(&["10.0.0.0/16"]);
    let mut taken = Taken::default();
    let free: IpNet = "10.0.77.7/32".parse().unwrap();
    for number in 0..1 << 16 {
        let unit = unit_at(&subnets[0], number, 32).unwrap();
        if unit != free {
            taken.insert(&unit);
        }
    }
    for seed in 0..10_000 {
        assert_eq!(next_unit(&subnets, &taken, true, Some(32), seed), Some(free));
    }
}

#[test]
fn names_are_legal_and_end_with_the_longest_network() {
    let longest = "a".repeat(50);
    let network: NetworkName = longest.parse().unwrap();
    let unit: IpNet = "2001:db80:1234:5678:9abc:def0:1234:5600/120".parse().unwrap();
    let name = object_name(&network, &unit);
    assert_eq!(
        name,
        format!("{longest}.v6-2001-db80-1234-5678-9abc-def0-1234-5600-120")
    );
    assert!(name.len() <= 97);
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    for label in name.split('.') {
        assert!(label.bytes().all(is_plain) && !label.starts_with('-') && !label.ends_with('-'));
    }
    for bad in [
        "blue",
        "blue.v4-10-0-0-0",
        "blue.v4-10-0-0-1-26",
        "blue.v6-fd00-0--40-122",
        "Blue.v4-10-0-0-0-26",
        "",
    ] {
        assert_eq!(parse_object_name(bad), None, "{bad}");
    }
}

fn any_subnet() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<u32>(), 8_u8..=30)
        .prop_map(|(address, prefix)| IpNet::from(Ipv4Net::new(address.into(), prefix).unwrap().trunc()));
    let v6 = (any::<u128>(), 16_u8..=126)
        .prop_map(|(address, prefix)| IpNet::from(Ipv6Net::new(address.into(), prefix).unwrap().trunc()));
    prop_oneof![v4, v6]
}

fn prefix_length() -> impl Strategy<Value = Option<u8>> {
    proptest::option::of(8_u8..=128)
}

proptest! {
    /// Two units of a subnet are equal or apart, and their names are equal or different accordingly.
    #[test]
    fn names_exclude_overlap(
        subnet in any_subnet(), asked in prefix_length(), places in proptest::collection::vec(any::<u128>(), 2..20),
    ) {
        let network: NetworkName = "blue".parse().unwrap();
        let mask = match subnet {
            IpNet::V4(net) => u128::from(u32::from(net.hostmask())),
            IpNet::V6(net) => u128::from(net.hostmask()),
        };
        let prefixes = Prefixes { ipv4: asked, ipv6: asked };
        let units: Vec<IpNet> = places.iter().map(|place| {
            let address: IpAddr = match subnet {
                IpNet::V4(net) => Ipv4Addr::from(u32::from(net.network()) | u32::try_from(place & mask).unwrap()).into(),
                IpNet::V6(net) => Ipv6Addr::from(u128::from(net.network()) | (place & mask)).into(),
            };
            unit_of(&[subnet], prefixes, address).unwrap()
        }).collect();
        for a in &units {
            prop_assert!(subnet.contains(a) && is_unit(&[subnet], prefixes, a));
            for b in &units {
                let same = object_name(&network, a) == object_name(&network, b);
                prop_assert_eq!(same, a == b);
                prop_assert_eq!(overlap(a, b), a == b);
            }
        }
    }

    /// A name gives back its network and range.
    #[test]
    fn names_are_parsed_back(subnet in any_subnet(), network in "[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?") {
        prop_assume!(network != "none");
        let network: NetworkName = network.parse().unwrap();
        let name = object_name(&network, &subnet);
        prop_assert!(name.len() <= 97);
        prop_assert_eq!(parse_object_name(&name), Some((network, subnet)));
    }

    /// Nodes that take units one after the other never get the same one, whatever their seed, and find all of them.
    #[test]
    fn no_address_is_in_two_blocks(
        subnet in 20_u8..=30, asked in proptest::option::of(20_u8..=28), seed in any::<u64>(), excluded in 0_u8..4,
    ) {
        let subnet: IpNet = Ipv4Net::new([10, 0, 0, 0].into(), subnet).unwrap().trunc().into();
        let mut taken: Taken = (0..excluded).filter_map(|n| unit_at(&subnet, n.into(), 31)).collect::<Vec<_>>().iter().collect();
        let mut found: Vec<IpNet> = Vec::new();
        while let Some(unit) = next_unit(&[subnet], &taken, true, asked, seed.wrapping_add(found.len() as u64)) {
            let prefixes = Prefixes { ipv4: asked, ipv6: None };
            prop_assert!(is_unit(&[subnet], prefixes, &unit), "{}", unit);
            prop_assert!(!found.iter().any(|other| overlap(other, &unit)));
            found.push(unit);
            taken.insert(&unit);
        }
        let units = 1_usize << (unit_prefix(&subnet, asked) - subnet.prefix_len());
        prop_assert!(found.len() + 12 >= units, "{} of {}", found.len(), units);
    }

    /// The index answers as a comparison with every range does.
    #[test]
    fn the_index_knows_every_overlap(
        ranges in proptest::collection::vec((0_u32..64, 26_u8..=32), 0..12), probe in (0_u32..64, 24_u8..=32),
    ) {
        let net = |(low, prefix): (u32, u8)| -> IpNet {
            Ipv4Net::new((0x0a00_0000 | low).into(), prefix).unwrap().trunc().into()
        };
        let ranges: Vec<IpNet> = ranges.into_iter().map(net).collect();
        let probe = net(probe);
        let taken: Taken = ranges.iter().collect();
        prop_assert_eq!(taken.overlaps(&probe), ranges.iter().any(|range| overlap(range, &probe)));
    }
}
