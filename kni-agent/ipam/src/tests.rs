//! Checks every rule with examples; `model` compares the allocator with a simple model at random.

use std::collections::BTreeSet;

use super::*;

mod model;

const START: Duration = Duration::from_secs(100);

fn name(text: &str) -> NetworkName {
    text.parse().unwrap()
}

fn network(subnets: &[&str], excludes: &[&str]) -> NetworkSpec {
    NetworkSpec {
        name: name("blue"),
        default: false,
        enabled: true,
        subnets: subnets.iter().map(|s| s.parse().unwrap()).collect(),
        exclude_subnets: excludes.iter().map(|s| s.parse().unwrap()).collect(),
        mtu: 1500,
        egress: kni_model::network::EgressMode::None,
        egress_addresses: Vec::new(),
        service_subnets: Vec::new(),
        xdp: false,
        provider: kni_model::Provider::Ebpf,
        blocks: None,
        access: kni_model::Access::default(),
        number: None,
        fabric: kni_model::Fabric::None,
    }
}

fn ipam(subnets: &[&str], excludes: &[&str]) -> Ipam {
    let mut ipam = Ipam::new();
    ipam.set_network(&network(subnets, excludes));
    ipam
}

fn next4(ipam: &mut Ipam) -> String {
    ipam.lease(&name("blue"), "pod", &[], START)
        .unwrap()
        .ipv4
        .unwrap()
        .to_string()
}

fn fixed(ipam: &mut Ipam, address: &str) -> Result<Lease, IpamError> {
    ipam.lease(&name("blue"), "pod", &[address.parse().unwrap()], START)
}

#[test]
fn one_address_per_family() {
    let mut both = ipam(&["10.0.0.0/24", "fd00::/64"], &[]);
    let first = both.lease(&name("blue"), "a", &[], START).unwrap();
    assert_eq!(first.ipv4, Some("10.0.0.2".parse().unwrap()));
    assert_eq!(first.ipv6, Some("fd00::2".parse().unwrap()));
    let mut only6 = ipam(&["fd00::/64"], &[]);
    let lease = only6.lease(&name("blue"), "a", &[], START).unwrap();
    assert_eq!((lease.ipv4, lease.ipv6), (None, Some("fd00::2".parse().unwrap())));
}

#[test]
fn overlapping_networks_are_independent() {
    let mut ipam = ipam(&["10.0.0.0/24"], &[]);
    ipam.set_network(&NetworkSpec {
        name: name("red"),
        ..network(&["10.0.0.0/24"], &[])
    });
    let blue = ipam.lease(&name("blue"), "a", &[], START).unwrap();
    assert_eq!(ipam.lease(&name("red"), "b", &[], START).unwrap(), blue);
}

#[test]
fn a_pod_gets_an_address_twice_only_where_there_is_no_other() {
    // 10.0.0.2 to 10.0.0.4 can be leased.
    let mut ipam = ipam(&["10.0.0.0/29"], &["10.0.0.5/32", "10.0.0.6/32"]);
    let has = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
    let next = |ipam: &mut Ipam, beside: &[&str]| {
        let lease = ipam.lease_beside(&has(beside), &name("blue"), "pod", &[], START);
        lease.map(|lease| lease.ipv4.unwrap().to_string())
    };
    assert_eq!(next(&mut ipam, &["10.0.0.2", "fd00::3"]).unwrap(), "10.0.0.3");
    // The search continues behind it, and comes back to the address that was left out.
    assert_eq!(next(&mut ipam, &["10.0.0.2"]).unwrap(), "10.0.0.4");
    assert_eq!(
        next(&mut ipam, &["10.0.0.2", "10.0.0.3"]).unwrap(),
        "10.0.0.2",
        "the last one"
    );
    assert!(next(&mut ipam, &["10.0.0.2"]).is_err());
    // Also of released ones, of which the one released longest ago would be the next.
    for address in ["10.0.0.3", "10.0.0.4"] {
        ipam.release(&name("blue"), Some(address.parse().unwrap()), None);
    }
    assert_eq!(next(&mut ipam, &["10.0.0.3"]).unwrap(), "10.0.0.4");
    // A request counts.
    let wanted = has(&["10.0.0.3"]);
    let lease = ipam
        .lease_beside(&wanted, &name("blue"), "pod", &wanted, START)
        .unwrap();
    assert_eq!(lease.ipv4.map(IpAddr::V4), Some(wanted[0]));
}

#[test]
fn fixed_addresses_must_be_leasable() {
    let mut ipam = ipam(&["10.0.0.0/24", "10.0.2.0/24"], &["10.0.0.128/25"]);
    fixed(&mut ipam, "10.0.0.77").unwrap();
    let in_use = fixed(&mut ipam, "10.0.0.77").unwrap_err();
    assert_eq!(in_use.to_string(), "address 10.0.0.77 of network blue is in use by pod");
    for (address, why) in [
        ("10.0.0.0", LeaseError::NetworkAddress),
        ("10.0.2.1", LeaseError::Gateway),
        ("10.0.2.255", LeaseError::Broadcast),
        ("10.0.0.200", LeaseError::Excluded),
        ("10.0.1.5", LeaseError::OutsideSubnets),
        ("fd00::5", LeaseError::NoSuchFamily),
    ] {
        let expected = IpamError::AddressNotInNetwork {
            network: name("blue"),
            address: address.parse().unwrap(),
            reason: why,
        };
        assert_eq!(fixed(&mut ipam, address), Err(expected));
    }
    let two: Vec<IpAddr> = vec!["10.0.0.9".parse().unwrap(), "10.0.0.10".parse().unwrap()];
    let error = ipam.lease(&name("blue"), "pod", &two, START).unwrap_err();
    assert_eq!(
        error,
        IpamError::TooManyAddresses {
            network: name("blue"),
            family: Family::Ipv4,
            count: 2
        }
    );
}

#[test]
fn ipv6_keeps_anycast_and_gateway_out_but_has_no_broadcast() {
    let mut ipam = ipam(&["fd00::/126"], &[]);
    assert!(
        fixed(&mut ipam, "fd00::")
            .unwrap_err()
            .to_string()
            .contains("network's own address")
    );
    assert!(fixed(&mut ipam, "fd00::1").unwrap_err().to_string().contains("gateway"));
    fixed(&mut ipam, "fd00::3").unwrap();
}

#[test]
fn a_lease_is_all_or_nothing() {
    let mut ipam = ipam(&["10.0.0.0/24", "fd00::/126"], &[]);
    for _ in 0..2 {
        ipam.lease(&name("blue"), "a", &[], START).unwrap();
    }
    let before = ipam.usage(&name("blue"));
    let error = ipam.lease(&name("blue"), "b", &[], START).unwrap_err();
    assert_eq!(
        error,
        IpamError::Exhausted {
            network: name("blue"),
            family: Family::Ipv6,
            total: 2,
        }
    );
    assert_eq!(
        error.to_string(),
        "network blue has no free IPv6 address: of 2 on this node, 0 are free"
    );
    assert_eq!(ipam.usage(&name("blue")), before);
    assert_eq!(
        ipam.lease(&name("red"), "b", &[], START),
        Err(IpamError::UnknownNetwork { network: name("red") })
    );
}

#[test]
fn released_addresses_are_reused_last_and_oldest_first() {
    let mut ipam = ipam(&["10.0.0.0/29"], &[]);
    let release = |ipam: &mut Ipam, last| ipam.release(&name("blue"), Some(Ipv4Addr::new(10, 0, 0, last)), None);
    assert_eq!([next4(&mut ipam), next4(&mut ipam)], ["10.0.0.2", "10.0.0.3"]);
    release(&mut ipam, 3);
    release(&mut ipam, 2);
    release(&mut ipam, 2);
    let more: Vec<_> = (0..5).map(|_| next4(&mut ipam)).collect();
    assert_eq!(more, ["10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.3", "10.0.0.2"]);
    assert!(ipam.lease(&name("blue"), "pod", &[], START).is_err());
}

#[test]
fn a_pool_as_small_as_its_pods_goes_on_working() {
    let mut ipam = ipam(&["10.0.0.0/30"], &[]);
    for _ in 0..100 {
        assert_eq!(next4(&mut ipam), "10.0.0.2");
        assert!(ipam.lease(&name("blue"), "other", &[], START).is_err());
        ipam.release(&name("blue"), Some(Ipv4Addr::new(10, 0, 0, 2)), None);
    }
}

#[test]
fn leases_survive_a_change_and_a_removal_of_their_network() {
    let mut ipam = ipam(&["10.0.0.0/24"], &[]);
    assert_eq!(next4(&mut ipam), "10.0.0.2");
    ipam.set_network(&network(&["10.9.0.0/30"], &[]));
    let usage = ipam.usage(&name("blue")).unwrap();
    assert_eq!((usage.total, usage.used, usage.ipv4.free), (1, 1, 1));
    ipam.remove_network(&name("blue"));
    assert!(matches!(
        ipam.lease(&name("blue"), "b", &[], START),
        Err(IpamError::UnknownNetwork { .. })
    ));
    ipam.set_network(&network(&["10.0.0.0/29"], &["10.0.0.3/32"]));
    assert!(matches!(
        fixed(&mut ipam, "10.0.0.2"),
        Err(IpamError::AddressInUse { .. })
    ));
    assert_eq!(next4(&mut ipam), "10.0.0.4");
    ipam.remove_network(&name("blue"));
    ipam.release(&name("blue"), Some(Ipv4Addr::new(10, 0, 0, 2)), None);
    assert!(ipam.usage(&name("blue")).is_some());
    ipam.release(&name("blue"), Some(Ipv4Addr::new(10, 0, 0, 4)), None);
    assert_eq!(ipam.usage(&name("blue")), None);
}

#[test]
fn adopted_leases_need_neither_range_nor_network() {
    let mut ipam = Ipam::new();
    let v4 = |last| Some(Ipv4Addr::new(10, 0, 0, last));
    ipam.adopt(&name("blue"), "old", v4(5), Some("fd00::5".parse().unwrap()))
        .unwrap();
    let twice = ipam
        .adopt(&name("blue"), "new", v4(6), Some("fd00::5".parse().unwrap()))
        .unwrap_err();
    assert!(matches!(twice, IpamError::AddressInUse { owner, .. } if owner == "old"));
    assert_eq!(
        ipam.usage(&name("blue")).unwrap().used,
        2,
        "the refused adoption took its IPv4 address"
    );
    ipam.set_network(&network(&["10.0.0.0/24"], &["10.0.0.0/28"]));
    ipam.adopt(&name("blue"), "excluded", v4(7), None).unwrap();
    assert_eq!(next4(&mut ipam), "10.0.0.16");
}

#[test]
fn a_restart_goes_on_behind_the_adopted_leases() {
    let mut ipam = ipam(&["10.0.0.0/24"], &[]);
    ipam.adopt(&name("blue"), "old", Some(Ipv4Addr::new(10, 0, 0, 9)), None)
        .unwrap();
    assert_eq!(next4(&mut ipam), "10.0.0.10");
}

#[test]
fn huge_subnets_are_counted_not_enumerated() {
    let mut ipam = ipam(&["fd00::/16", "2001:db8::/32"], &["fd00::/17"]);
    let usage = ipam.usage(&name("blue")).unwrap();
    assert_eq!(usage.ipv6.total, (1_u128 << 111) + (1 << 96) - 2);
    let first = ipam.lease(&name("blue"), "a", &[], START).unwrap().ipv6.unwrap();
    assert_eq!(first, "2001:db8::2".parse::<Ipv6Addr>().unwrap());
}

#[test]
fn a_full_sixteen_is_leased_and_leased_again_quickly() {
    let mut ipam = ipam(&["10.0.0.0/16", "fd00::/64"], &[]);
    let mut seen = BTreeSet::new();
    let mut leases = Vec::new();
    for i in 0..65_533 {
        let lease = ipam.lease(&name("blue"), &format!("pod{i}"), &[], START).unwrap();
        assert!(seen.insert(lease.ipv4) && seen.len() == i + 1);
        leases.push(lease);
    }
    assert!(ipam.lease(&name("blue"), "late", &[], START).is_err());
    for lease in &leases {
        ipam.release(&name("blue"), lease.ipv4, lease.ipv6);
        assert_eq!(ipam.lease(&name("blue"), "again", &[], START).unwrap().ipv4, lease.ipv4);
    }
    // Takes some 100 ms; a linear search would take minutes.
}

#[test]
fn what_the_pool_remembers_is_bounded() {
    let mut ipam = ipam(&["fd00::/64"], &[]);
    for i in 0..70_000_u128 {
        let lease = ipam.lease(&name("blue"), "pod", &[], START).unwrap();
        assert_eq!(lease.ipv6.map(u128::from), Some((0xfd00 << 112) + 2 + i));
        ipam.release(&name("blue"), None, lease.ipv6);
    }
    let usage = ipam.usage(&name("blue")).unwrap();
    assert_eq!((usage.used, usage.ipv6.free), (0, usage.ipv6.total));
}

/// A network of two addresses, each of which is leased by `a` and `b`.
fn small() -> Ipam {
    let mut ipam = ipam(&["10.0.0.0/29"], &["10.0.0.4/30"]);
    for owner in ["a", "b"] {
        ipam.lease(&name("blue"), owner, &[], START).unwrap();
    }
    ipam
}

fn v4(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last)
}

fn seconds(count: u64) -> Duration {
    START + Duration::from_secs(count)
}

#[test]
fn an_address_rests_until_ten_seconds_after_its_withdrawal() {
    let (mut ipam, blue) = (small(), name("blue"));
    ipam.rest(&blue, Some(v4(2)), None);
    ipam.rest(&blue, Some(v4(3)), None);
    let lease = |ipam: &mut Ipam, owner: &str, now| ipam.lease(&blue, owner, &[], now).map(|lease| lease.ipv4);
    let error = lease(&mut ipam, "c", seconds(3600)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "network blue has no free IPv4 address now: of 2 on this node, 0 are free and 2 rest after their last pod; the \
         next one is free 10 s after the API server has confirmed that the pod is gone"
    );
    assert!(ipam.set_withdrawn(&blue, v4(3).into(), Some(seconds(0))));
    assert!(
        !ipam.set_withdrawn(&blue, v4(3).into(), Some(seconds(5))),
        "the first time counts"
    );
    let error = lease(&mut ipam, "c", seconds(3) + Duration::from_millis(1)).unwrap_err();
    assert!(error.to_string().ends_with("the next one is free in 7 s"), "{error}");
    assert_eq!(ipam.end_rests(START + Duration::from_millis(9_999)), []);
    assert_eq!(
        ipam.usage(&blue).unwrap().ipv4,
        FamilyUsage {
            total: 2,
            used: 0,
            free: 0,
            resting: 2
        }
    );
    assert_eq!(ipam.end_rests(seconds(10)), [(blue.clone(), v4(3).into())]);
    assert_eq!(lease(&mut ipam, "c", seconds(10)), Ok(Some(v4(3))));
    assert!(
        lease(&mut ipam, "d", seconds(10)).is_err(),
        "the other one is not withdrawn"
    );
}

#[test]
fn the_last_owner_may_have_a_resting_address_again() {
    let (mut ipam, blue) = (small(), name("blue"));
    ipam.rest(&blue, Some(v4(2)), None);
    let ip: IpAddr = v4(2).into();
    let error = ipam.lease(&blue, "c", &[ip], START).unwrap_err();
    assert!(
        matches!(error, IpamError::AddressRests { address, next: None, .. } if address == ip),
        "{error}"
    );
    assert_eq!(ipam.lease(&blue, "a", &[ip], START).unwrap().ipv4, Some(v4(2)));
    ipam.rest(&blue, Some(v4(2)), None);
    assert_eq!(ipam.lease(&blue, "a", &[], START).unwrap().ipv4, Some(v4(2)));
    assert_eq!(ipam.resting(), BTreeMap::new());
}

#[test]
fn an_address_that_others_know_again_is_not_free() {
    let (mut ipam, blue) = (small(), name("blue"));
    ipam.rest(&blue, Some(v4(2)), None);
    let ip: IpAddr = v4(2).into();
    assert!(ipam.set_withdrawn(&blue, ip, Some(START)));
    assert!(ipam.set_withdrawn(&blue, ip, None));
    assert_eq!(ipam.end_rests(seconds(60)), []);
    assert!(ipam.set_withdrawn(&blue, ip, Some(seconds(60))));
    assert_eq!(ipam.end_rests(seconds(69)), []);
    assert_eq!(ipam.end_rests(seconds(70)).len(), 1);
}

#[test]
fn rests_survive_a_restart_a_change_and_a_removal_of_the_network() {
    let (mut ipam, blue) = (Ipam::new(), name("blue"));
    ipam.adopt(&blue, "a", Some(v4(3)), None).unwrap();
    ipam.adopt_rest(&blue, v4(2).into(), "b", None);
    ipam.adopt_rest(&blue, v4(3).into(), "b", None);
    assert_eq!(
        ipam.resting(),
        BTreeMap::from([(blue.clone(), vec![v4(2).into()])]),
        "a lease counts"
    );
    for blocks in [vec![], vec!["10.0.0.0/30".parse().unwrap()]] {
        ipam.set_network(&NetworkSpec {
            blocks: Some(blocks),
            ..network(&["10.0.0.0/29"], &[])
        });
        assert!(ipam.lease(&blue, "c", &[], START).is_err());
    }
    ipam.remove_network(&blue);
    ipam.release(&blue, Some(v4(3)), None);
    ipam.set_network(&network(&["10.0.0.0/29"], &["10.0.0.3/32", "10.0.0.4/30"]));
    assert!(matches!(
        ipam.lease(&blue, "c", &[], START),
        Err(IpamError::AllRest { resting: 1, .. })
    ));
    ipam.remove_network(&blue);
    assert!(ipam.usage(&blue).is_some());
    ipam.set_withdrawn(&blue, v4(2).into(), Some(START));
    assert_eq!(ipam.end_rests(seconds(10)).len(), 1);
    assert_eq!(ipam.usage(&blue), None);
}

#[test]
fn addresses_that_rested_longest_are_leased_first() {
    let (mut ipam, blue) = (ipam(&["10.0.0.0/29"], &[]), name("blue"));
    let leased: Vec<String> = (0..5).map(|_| next4(&mut ipam)).collect();
    assert_eq!(leased, ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
    for (last, at) in [(5, 0), (3, 1), (4, 2)] {
        ipam.rest(&blue, Some(v4(last)), None);
        ipam.set_withdrawn(&blue, v4(last).into(), Some(seconds(at)));
    }
    assert_eq!(ipam.end_rests(seconds(30)).len(), 3);
    let again: Vec<String> = (0..3).map(|_| next4(&mut ipam)).collect();
    assert_eq!(again, ["10.0.0.5", "10.0.0.3", "10.0.0.4"]);
}
