//! Validates a `PodNetwork` and converts it into a network of the model.

use kni_model::{Fabric, NetworkName, NetworkSpec, network::EgressMode};
use kube::ResourceExt as _;

use super::{
    PodNetwork, Topology,
    access::read_access,
    cidr::{check_range, read_cidrs},
    egress_network::{read_egress, read_service_subnets},
    from_object::FromObject,
    invalid::FieldError,
    provider_rules::{fewest_subnets, read_provider},
};

/// Maximum number of subnets of one network.
const MAX_SUBNETS: usize = 16;
/// Maximum number of excluded ranges of one network.
const MAX_EXCLUDES: usize = 256;
/// MTU limits: the minimum that IPv6 requires of every link, and the maximum of the IP length field.
const MTU: std::ops::RangeInclusive<u32> = 1280..=65535;

/// A refused `PodNetwork`; names the network, the field and the violated rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("network {network}: {field}: {reason}")]
pub struct InvalidNetwork {
    /// Name of the network, as given; may be invalid itself.
    pub network: String,
    /// Path of the field, such as `spec.subnets[1]`.
    pub field: String,
    /// The violated rule.
    pub reason: String,
}

impl FromObject<PodNetwork> for NetworkSpec {
    type Error = InvalidNetwork;

    fn from_object(object: &PodNetwork) -> Result<Self, InvalidNetwork> {
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
    let subnets = read_cidrs("spec.subnets", &spec.subnets, fewest_subnets(spec), MAX_SUBNETS)?;
    for (index, subnet) in subnets.iter().enumerate() {
        let earlier = subnets.get(..index).unwrap_or_default();
        check_range(subnet, earlier).map_err(|reason| (format!("spec.subnets[{index}]"), reason))?;
    }
    let mut exclude_subnets = read_cidrs("spec.excludeSubnets", &spec.exclude_subnets, 0, MAX_EXCLUDES)?;
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
    let service_subnets = read_service_subnets(spec, &subnets)?;
    let ours: Vec<_> = subnets.iter().chain(&service_subnets).copied().collect();
    let provider = read_provider(spec, &subnets)?;
    exclude_subnets.extend(provider.gateways().iter().copied().map(ipnet::IpNet::from));
    let (egress, egress_addresses) = if provider.is_ebpf() {
        read_egress(spec, &ours)?
    } else {
        (EgressMode::None, Vec::new())
    };
    let access = read_access(spec, &subnets)?;
    Ok(NetworkSpec {
        name,
        default: spec.default,
        enabled: spec.enabled,
        subnets,
        exclude_subnets,
        mtu: spec.mtu,
        egress,
        egress_addresses,
        service_subnets,
        xdp: spec.xdp,
        provider,
        blocks: None,
        access,
        number: None,
        fabric: read_fabric(object),
    })
}

/// What kni-controller decided. The spec alone decides nothing: nodes would read it at different times.
fn read_fabric(object: &PodNetwork) -> Fabric {
    match object.status.as_ref().and_then(|status| status.fabric) {
        Some(kni_api::Fabric::Overlay) => Fabric::Overlay,
        Some(kni_api::Fabric::Native) => Fabric::Native,
        Some(kni_api::Fabric::None) | None => Fabric::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        PodNetworkSpec,
        pod_network::{Egress, EgressChoice},
    };

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
                egress: None,
                service_subnets: Vec::new(),
                xdp: false,
                provider: None,
                namespace_selector: None,
                per_node_prefix: None,
                extended_resource: false,
                access: None,
                fabric: None,
            },
        )
    }

    fn refused(object: &PodNetwork) -> InvalidNetwork {
        NetworkSpec::from_object(object).expect_err("refused")
    }

    #[test]
    fn a_valid_network_keeps_everything_it_says() {
        let mut object = network(&["10.10.0.0/16", "fd10::/64"]);
        object.spec.exclude_subnets = vec!["10.10.255.0/24".to_owned(), "fd10::5/128".to_owned()];
        object.spec.mtu = 9000;
        let spec = NetworkSpec::from_object(&object).unwrap();
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
            NetworkSpec::from_object(&network(&[good])).unwrap();
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
    fn egress(mode: Option<EgressChoice>, addresses: &[&str]) -> Egress {
        let addresses = addresses.iter().map(|text| (*text).to_owned()).collect();
        Egress { mode, addresses }
    }

    #[test]
    fn the_way_out_depends_on_the_network_unless_it_says() {
        let mode = |default: bool, egress: Option<Egress>| {
            let mut object = network(&["10.0.0.0/16"]);
            object.spec.default = default;
            object.spec.egress = egress;
            NetworkSpec::from_object(&object).map(|spec| spec.egress)
        };
        for (default, choice, expect) in [
            (true, None, EgressMode::Route),
            (false, None, EgressMode::None),
            (true, Some(EgressChoice::Route), EgressMode::Route),
            (true, Some(EgressChoice::None), EgressMode::None),
            (true, Some(EgressChoice::Masquerade), EgressMode::Masquerade),
            (false, Some(EgressChoice::None), EgressMode::None),
            (false, Some(EgressChoice::Masquerade), EgressMode::Masquerade),
        ] {
            assert_eq!(
                mode(default, Some(egress(choice, &[]))).unwrap(),
                expect,
                "{default} {choice:?}"
            );
        }
        assert_eq!(mode(true, None).unwrap(), EgressMode::Route);
        assert_eq!(mode(false, None).unwrap(), EgressMode::None);
        let error = mode(false, Some(egress(Some(EgressChoice::Route), &[]))).unwrap_err();
        assert_eq!(error.field, "spec.egress.mode");
        assert!(error.reason.contains("default network"), "{error}");
    }

    #[test]
    fn source_addresses_are_for_masquerade_and_from_outside() {
        let mut object = network(&["10.0.0.0/16"]);
        object.spec.service_subnets = vec!["10.96.0.0/16".to_owned()];
        object.spec.egress = Some(egress(Some(EgressChoice::Masquerade), &["192.0.2.1", "2001:db8::1"]));
        assert_eq!(NetworkSpec::from_object(&object).unwrap().egress_addresses.len(), 2);
        for (mode, addresses, field, why) in [
            (
                None,
                ["192.0.2.1"].as_slice(),
                "spec.egress.addresses",
                "Masquerade only",
            ),
            (
                Some(EgressChoice::None),
                &["192.0.2.1"],
                "spec.egress.addresses",
                "Masquerade only",
            ),
            (
                Some(EgressChoice::Masquerade),
                &["192.0.2.1", "192.0.2.2"],
                "spec.egress.addresses[1]",
                "same family",
            ),
            (
                Some(EgressChoice::Masquerade),
                &["127.0.0.1"],
                "spec.egress.addresses[0]",
                "loopback",
            ),
            (
                Some(EgressChoice::Masquerade),
                &["fd00::1", "10.0.0.1"],
                "spec.egress.addresses[1]",
                "10.0.0.0/16",
            ),
            (
                Some(EgressChoice::Masquerade),
                &["10.96.0.1"],
                "spec.egress.addresses[0]",
                "10.96.0.0/16",
            ),
        ] {
            object.spec.egress = Some(egress(mode, addresses));
            let error = refused(&object);
            assert_eq!(error.field, field, "{error}");
            assert!(error.reason.contains(why), "{error}");
        }
    }

    #[test]
    fn service_subnets_are_beside_the_subnets() {
        let mut object = network(&["10.0.0.0/16"]);
        object.spec.service_subnets = vec!["10.96.0.0/12".to_owned(), "fd00:96::/112".to_owned()];
        let spec = NetworkSpec::from_object(&object).unwrap();
        assert_eq!((spec.service_subnets.len(), spec.xdp), (2, false));
        object.spec.xdp = true;
        assert!(NetworkSpec::from_object(&object).unwrap().xdp);
        object.spec.xdp = false;
        for (bad, why) in [
            ("10.0.128.0/17", "overlaps 10.0.0.0/16"),
            ("10.0.0.0/8", "overlaps 10.0.0.0/16"),
            ("10.96.1.0/24", "overlaps 10.96.0.0/12"),
            ("169.254.0.0/16", "link-local"),
            ("10.1.0.1/16", "host bits"),
            ("10.1.0.0", "CIDR"),
        ] {
            object.spec.service_subnets = vec!["10.96.0.0/12".to_owned(), bad.to_owned()];
            let error = refused(&object);
            assert_eq!(error.field, "spec.serviceSubnets[1]", "{error}");
            assert!(error.reason.contains(why), "{error}");
        }
        object.spec.service_subnets = (0..17).map(|i| format!("10.{}.0.0/16", 100 + i)).collect();
        assert_eq!(refused(&object).field, "spec.serviceSubnets");
    }
}
