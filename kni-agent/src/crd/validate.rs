//! The rules that turn a `PodNetwork` into a network the engines can rely on.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kube::ResourceExt as _;

use super::{PodNetwork, Topology};
use crate::model::{NetworkName, NetworkSpec};

/// Most subnets of one network.
const MAX_SUBNETS: usize = 16;
/// Most excluded ranges of one network.
const MAX_EXCLUDES: usize = 256;
/// MTU limits: what IPv6 requires of every link, and what an IP length field can say.
const MTU: std::ops::RangeInclusive<u32> = 1280..=65535;

/// A `PodNetwork` that is refused; names the network, the field and the rule it breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("network {network}: {field}: {reason}")]
pub struct InvalidNetwork {
    /// Name of the network, as given; may be illegal itself.
    pub network: String,
    /// Path of the field, such as `spec.subnets[1]`.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

/// A field's path and what is wrong with it.
type FieldError = (String, String);

impl TryFrom<&PodNetwork> for NetworkSpec {
    type Error = InvalidNetwork;

    fn try_from(object: &PodNetwork) -> Result<Self, InvalidNetwork> {
        convert(object).map_err(|(field, reason)| InvalidNetwork {
            network: object.name_any(),
            field,
            reason,
        })
    }
}

fn convert(object: &PodNetwork) -> Result<NetworkSpec, FieldError> {
    let spec = &object.spec;
    let name: NetworkName = match object.metadata.name.as_deref() {
        Some(name) => name
            .parse()
            .map_err(|error| ("metadata.name".to_owned(), format!("{error}")))?,
        None => return Err(("metadata.name".to_owned(), "is missing".to_owned())),
    };
    match spec.topology {
        Topology::Layer3 => {}
    }
    let subnets = read_list("spec.subnets", &spec.subnets, 1, MAX_SUBNETS)?;
    for (index, subnet) in subnets.iter().enumerate() {
        let earlier = subnets.get(..index).unwrap_or_default();
        check_subnet(subnet, earlier).map_err(|reason| (format!("spec.subnets[{index}]"), reason))?;
    }
    let exclude_subnets = read_list("spec.excludeSubnets", &spec.exclude_subnets, 0, MAX_EXCLUDES)?;
    for (index, exclude) in exclude_subnets.iter().enumerate() {
        if !subnets.iter().any(|subnet| subnet.contains(exclude)) {
            let reason = format!("{exclude} is not inside any of the network's subnets");
            return Err((format!("spec.excludeSubnets[{index}]"), reason));
        }
    }
    if !MTU.contains(&spec.mtu) {
        return Err((
            "spec.mtu".to_owned(),
            format!("{} is not in {} to {}", spec.mtu, MTU.start(), MTU.end()),
        ));
    }
    Ok(NetworkSpec {
        name,
        default: spec.default,
        enabled: spec.enabled,
        subnets,
        exclude_subnets,
        mtu: spec.mtu,
    })
}

fn read_list(field: &str, list: &[String], min: usize, max: usize) -> Result<Vec<IpNet>, FieldError> {
    if list.len() < min || list.len() > max {
        return Err((
            field.to_owned(),
            format!("has {} entries, not {min} to {max}", list.len()),
        ));
    }
    list.iter()
        .enumerate()
        .map(|(index, text)| read_cidr(text).map_err(|reason| (format!("{field}[{index}]"), reason)))
        .collect()
}

fn read_cidr(text: &str) -> Result<IpNet, String> {
    let shown: String = text.chars().take(64).collect();
    let net: IpNet = text
        .parse()
        .map_err(|error| format!("{shown:?} is not in CIDR notation: {error}"))?;
    if net != net.trunc() {
        return Err(format!("{net} has host bits set; write {}", net.trunc()));
    }
    Ok(net)
}

fn check_subnet(subnet: &IpNet, earlier: &[IpNet]) -> Result<(), String> {
    let lengths = prefix_lengths(subnet);
    if !lengths.contains(&subnet.prefix_len()) {
        let (min, max) = (lengths.start(), lengths.end());
        return Err(format!("{subnet} has a prefix length outside {min} to {max}"));
    }
    if let Some((range, what)) = reserved_ranges().into_iter().find(|(range, _)| overlap(range, subnet)) {
        return Err(format!("{subnet} overlaps {range}, which is {what}"));
    }
    match earlier.iter().find(|other| overlap(other, subnet)) {
        Some(other) => Err(format!("{subnet} overlaps {other} of the same network")),
        None => Ok(()),
    }
}

/// The longest prefix leaves at least one pod address beside those that are kept out (IPv4: network, gateway and
/// broadcast; IPv6: subnet-router anycast and gateway). The shortest is the largest private IPv4 block, 10.0.0.0/8;
/// for IPv6, anything shorter than 16 covers most of the allocated space and can only be a slip.
fn prefix_lengths(subnet: &IpNet) -> std::ops::RangeInclusive<u8> {
    match subnet {
        IpNet::V4(_) => 8..=30,
        IpNet::V6(_) => 16..=126,
    }
}

/// Ranges no pod address may lie in. Link-local covers the gateways that every pod has (`169.254.1.1` and `fe80::1`).
fn reserved_ranges() -> [(IpNet, &'static str); 10] {
    let v4 = |addr: [u8; 4], len| IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from(addr), len));
    let v6 = |addr: u128, len| IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from(addr), len));
    [
        (v4([0, 0, 0, 0], 8), "unspecified (\"this network\")"),
        (v4([127, 0, 0, 0], 8), "loopback"),
        (v4([169, 254, 0, 0], 16), "link-local"),
        (v4([224, 0, 0, 0], 4), "multicast"),
        (v4([255, 255, 255, 255], 32), "broadcast"),
        (v6(0, 128), "unspecified"),
        (v6(1, 128), "loopback"),
        (v6(0xffff_0000_0000, 96), "IPv4-mapped"),
        (v6(0xfe80 << 112, 10), "link-local"),
        (v6(0xff00 << 112, 8), "multicast"),
    ]
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::PodNetworkSpec;

    fn network(subnets: &[&str]) -> PodNetwork {
        let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        PodNetwork::new(
            "blue",
            PodNetworkSpec {
                default: true,
                enabled: true,
                topology: Topology::Layer3,
                subnets: strings(subnets),
                exclude_subnets: Vec::new(),
                mtu: 1500,
            },
        )
    }

    fn refused(object: &PodNetwork) -> InvalidNetwork {
        NetworkSpec::try_from(object).expect_err("refused")
    }

    #[test]
    fn a_valid_network_keeps_everything_it_says() {
        let mut object = network(&["10.10.0.0/16", "fd10::/64"]);
        object.spec.exclude_subnets = vec!["10.10.255.0/24".to_owned(), "fd10::5/128".to_owned()];
        object.spec.mtu = 9000;
        let spec = NetworkSpec::try_from(&object).unwrap();
        assert_eq!(spec.name.as_str(), "blue");
        assert_eq!((spec.default, spec.enabled, spec.mtu), (true, true, 9000));
        assert_eq!(
            spec.subnets,
            ["10.10.0.0/16".parse().unwrap(), "fd10::/64".parse().unwrap()]
        );
        assert_eq!(spec.exclude_subnets.len(), 2);
    }

    #[test]
    fn bad_subnets_are_named_by_index() {
        for (bad, why) in [
            ("10.1.0.0", "CIDR"),
            ("nonsense", "CIDR"),
            ("10.1.0.1/16", "host bits set; write 10.1.0.0/16"),
            ("10.1.0.0/31", "8 to 30"),
            ("16.0.0.0/7", "8 to 30"),
            ("fd11::/127", "16 to 126"),
            ("4000::/15", "16 to 126"),
            ("127.0.0.0/16", "loopback"),
            ("169.254.0.0/24", "link-local"),
            ("169.254.1.0/30", "link-local"),
            ("239.0.0.0/8", "multicast"),
            ("255.255.255.252/30", "broadcast"),
            ("0.0.0.0/8", "unspecified"),
            ("::/16", "unspecified"),
            ("fe80::/64", "link-local"),
            ("ff02::/16", "multicast"),
            ("::ffff:0:0/100", "IPv4-mapped"),
            ("10.10.3.0/24", "overlaps 10.10.0.0/16"),
            ("10.0.0.0/8", "overlaps 10.10.0.0/16"),
        ] {
            let error = refused(&network(&["10.10.0.0/16", bad]));
            assert_eq!(
                (error.network.as_str(), error.field.as_str()),
                ("blue", "spec.subnets[1]"),
                "{error}"
            );
            assert!(error.reason.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn edges_that_are_allowed() {
        for good in ["10.0.0.0/8", "192.0.2.0/30", "fd00::/16", "fd00::/126", "2001:db8::/32"] {
            NetworkSpec::try_from(&network(&[good])).unwrap();
        }
    }

    #[test]
    fn counts_names_excludes_and_mtu() {
        assert_eq!(refused(&network(&[])).field, "spec.subnets");
        let many: Vec<String> = (0..17).map(|i| format!("10.{i}.0.0/16")).collect();
        assert_eq!(
            refused(&network(&many.iter().map(String::as_str).collect::<Vec<_>>())).field,
            "spec.subnets"
        );

        let mut object = network(&["10.0.0.0/16"]);
        object.metadata.name = Some("Blue_1".to_owned());
        assert_eq!(refused(&object).field, "metadata.name");
        object.metadata.name = None;
        assert_eq!(refused(&object).reason, "is missing");

        let mut object = network(&["10.0.0.0/16"]);
        object.spec.exclude_subnets = vec!["10.0.1.0/24".to_owned(), "10.0.0.0/15".to_owned()];
        assert_eq!(refused(&object).field, "spec.excludeSubnets[1]");

        for mtu in [1279, 65536] {
            let mut object = network(&["10.0.0.0/16"]);
            object.spec.mtu = mtu;
            assert_eq!(refused(&object).field, "spec.mtu");
        }
    }
}
