//! Computes the desired egress rows of the dataplane; without side effects.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
};

use ipnet::IpNet;
use kni_common::{Verdict, uplink::HostPortKey};
use kni_dataplane::{EgressSource, HostPort, host_port_key};
use kni_model::{
    NetworkSpec, PortMapping, PortProtocol,
    network::EgressMode,
    policy::{PolicyInterface, PolicyPod},
};

use super::node::NodeNetwork;

/// Ports of an address that only pods use: all except the privileged ones.
const DEDICATED_PORTS: RangeInclusive<u16> = 1024..=65535;

/// The properties of a pod that egress depends on.
#[derive(Debug, Clone)]
pub(super) struct UplinkPod {
    pub(super) pod: PolicyPod,
    pub(super) mappings: Vec<PortMapping>,
}

/// The source address of an interface for egress, and the addresses of it that are not the node's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Egress {
    pub(super) source: Option<EgressSource>,
    pub(super) dedicated: BTreeSet<IpAddr>,
}

/// Computes the egress of an interface. `requested` are the addresses that policies request; `own` are the node's own.
pub(super) fn egress(
    node: &NodeNetwork,
    own: &BTreeSet<IpAddr>,
    spec: &NetworkSpec,
    interface: &PolicyInterface,
    requested: &[IpAddr],
    ports: &RangeInclusive<u16>,
) -> Egress {
    let Some(uplink) = node.uplink.as_ref().filter(|_| spec.egress == EgressMode::Masquerade) else {
        return Egress::default();
    };
    let chosen = |v4: bool, nodes: Option<IpAddr>| {
        let of_family = |list: &[IpAddr]| list.iter().find(|address| address.is_ipv4() == v4).copied();
        of_family(requested)
            .or_else(|| of_family(&spec.egress_addresses))
            .or(nodes)
    };
    // Only the families that the pod has: both share one range of ports.
    let v4 = interface.ipv4.and_then(|_| chosen(true, uplink.ipv4.map(IpAddr::V4)));
    let v6 = interface.ipv6.and_then(|_| chosen(false, uplink.ipv6.map(IpAddr::V6)));
    let used = || v4.into_iter().chain(v6);
    let dedicated: BTreeSet<IpAddr> = used().filter(|address| !own.contains(address)).collect();
    let all_dedicated = !dedicated.is_empty() && used().all(|address| dedicated.contains(&address));
    let ports = if all_dedicated { &DEDICATED_PORTS } else { ports };
    let source = EgressSource {
        ipv4: v4.and_then(|address| if let IpAddr::V4(v4) = address { Some(v4) } else { None }),
        ipv6: v6.and_then(|address| if let IpAddr::V6(v6) = address { Some(v6) } else { None }),
        first: *ports.start(),
        last: *ports.end(),
    };
    Egress {
        source: used().next().map(|_any| source),
        dedicated,
    }
}

/// All host ports that lead to a primary interface of a pod. `own` are the node's own addresses.
pub(super) fn host_ports<'a>(
    pods: impl Iterator<Item = &'a UplinkPod>,
    own: &BTreeSet<IpAddr>,
) -> BTreeMap<HostPortKey, HostPort> {
    let mut rows = BTreeMap::new();
    for UplinkPod { pod, mappings } in pods {
        let Some(primary) = pod.interfaces.iter().find(|interface| interface.primary) else {
            continue;
        };
        let Some(endpoint) = primary.endpoint else { continue };
        let has_family = |address: &&IpAddr| match address {
            IpAddr::V4(_) => primary.ipv4.is_some(),
            IpAddr::V6(_) => primary.ipv6.is_some(),
        };
        for mapping in mappings.iter().filter(|mapping| mapping.host_port != 0) {
            let requested = own
                .iter()
                .filter(has_family)
                .filter(|address| takes(mapping.host_ip, **address));
            for address in requested {
                let key = host_port_key(*address, number(mapping.protocol), mapping.host_port);
                let target = HostPort {
                    endpoint,
                    port: mapping.container_port,
                };
                rows.insert(key, target);
            }
        }
    }
    rows
}

/// The unspecified address matches every address of its family.
fn takes(requested: Option<IpAddr>, address: IpAddr) -> bool {
    match requested {
        None => true,
        Some(any) if any.is_unspecified() => any.is_ipv4() == address.is_ipv4(),
        Some(one) => one == address,
    }
}

const fn number(protocol: PortProtocol) -> u8 {
    match protocol {
        PortProtocol::Tcp => 6,
        PortProtocol::Udp => 17,
        PortProtocol::Sctp => 132,
    }
}

/// The sources to block at the uplink: the deny list, and subnets that only pods use. Subnets of networks that overlap
/// a directly connected subnet are not blocked, as that would cut off the node; the second part of the result lists
/// them.
pub(super) fn sources<'a>(
    deny: &[IpNet],
    networks: Option<impl Iterator<Item = &'a NetworkSpec>>,
    connected: &[IpNet],
) -> (BTreeMap<IpNet, Verdict>, Vec<IpNet>) {
    let overlaps = |one: &IpNet, other: &IpNet| one.contains(other) || other.contains(one);
    let bogons = networks.into_iter().flatten();
    let bogons = bogons.filter(|spec| spec.egress != EgressMode::Route);
    let (real, bogons): (Vec<IpNet>, Vec<IpNet>) = bogons
        .flat_map(|spec| spec.subnets.iter().copied())
        .partition(|subnet| connected.iter().any(|net| overlaps(net, subnet)));
    let bogons = bogons.into_iter().map(|subnet| (subnet, Verdict::BogonSource));
    let denied = deny.iter().map(|range| (range.trunc(), Verdict::DenyListed));
    (bogons.chain(denied).collect(), real)
}

#[cfg(test)]
mod tests {
    use kni_model::{EndpointId, PodRef};

    use super::*;
    use crate::node::UplinkLink;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn node() -> NodeNetwork {
        NodeNetwork {
            uplink: Some(UplinkLink {
                ifname: "eth0".to_owned(),
                ifindex: 2,
                ipv4: Some([192, 0, 2, 9].into()),
                ipv6: None,
            }),
            addresses: Vec::new(),
        }
    }

    fn spec(egress: EgressMode, addresses: &[&str]) -> NetworkSpec {
        NetworkSpec {
            name: "blue".parse().unwrap(),
            default: false,
            enabled: true,
            subnets: vec!["10.1.0.0/16".parse().unwrap()],
            exclude_subnets: Vec::new(),
            mtu: 1500,
            egress,
            egress_addresses: addresses.iter().map(|text| ip(text)).collect(),
            service_subnets: Vec::new(),
            xdp: false,
            provider: kni_model::Provider::Ebpf,
            blocks: None,
            access: kni_model::Access::default(),
        }
    }

    fn interface(ipv4: Option<&str>, ipv6: Option<&str>) -> PolicyInterface {
        PolicyInterface {
            endpoint: Some(EndpointId(5)),
            ifname: "eth0".parse().unwrap(),
            network: "blue".parse().unwrap(),
            network_id: 1.try_into().unwrap(),
            primary: true,
            ipv4: ipv4.map(|text| text.parse().unwrap()),
            ipv6: ipv6.map(|text| text.parse().unwrap()),
        }
    }

    fn out(spec: &NetworkSpec, interface: &PolicyInterface, requested: &[&str]) -> Egress {
        let own = [ip("192.0.2.9"), ip("192.0.2.10")].into();
        let requested: Vec<IpAddr> = requested.iter().map(|text| ip(text)).collect();
        egress(&node(), &own, spec, interface, &requested, &(61_000..=65_535))
    }

    #[test]
    fn policy_goes_before_network_goes_before_node() {
        let v4 = interface(Some("10.1.0.5"), None);
        let source = |spec: &NetworkSpec, requested: &[&str]| {
            let source = out(spec, &v4, requested).source.unwrap();
            (source.ipv4.unwrap().to_string(), source.first)
        };
        let plain = spec(EgressMode::Masquerade, &[]);
        let with = spec(EgressMode::Masquerade, &["192.0.2.50"]);
        assert_eq!(source(&plain, &[]), ("192.0.2.9".to_owned(), 61_000));
        assert_eq!(source(&with, &[]), ("192.0.2.50".to_owned(), 1024));
        assert_eq!(source(&with, &["192.0.2.60"]), ("192.0.2.60".to_owned(), 1024));
        assert_eq!(
            source(&plain, &["192.0.2.10"]),
            ("192.0.2.10".to_owned(), 61_000),
            "the node's own"
        );
        assert_eq!(out(&with, &v4, &[]).dedicated, [ip("192.0.2.50")].into());
        assert!(out(&plain, &v4, &["192.0.2.10"]).dedicated.is_empty());
    }

    #[test]
    fn without_an_address_or_a_way_out_there_is_no_source() {
        let v6 = interface(None, Some("fd01::5"));
        assert_eq!(out(&spec(EgressMode::Masquerade, &[]), &v6, &[]), Egress::default());
        for egress in [EgressMode::None, EgressMode::Route] {
            let v4 = interface(Some("10.1.0.5"), None);
            assert_eq!(out(&spec(egress, &[]), &v4, &["192.0.2.60"]), Egress::default());
        }
        // One family dedicated, the other the node's: the ports of the node.
        let both = interface(Some("10.1.0.5"), Some("fd01::5"));
        let mixed = out(&spec(EgressMode::Masquerade, &["2001:db8::50"]), &both, &[]);
        assert_eq!(mixed.source.unwrap().first, 61_000);
        assert_eq!(mixed.dedicated, [ip("2001:db8::50")].into());
    }

    #[test]
    fn a_host_port_has_a_row_for_each_address_that_it_asks_for() {
        let own: BTreeSet<IpAddr> = ["192.0.2.9", "192.0.2.10", "2001:db8::9"].map(ip).into();
        let pod = |ipv6: Option<&str>, host_ip: Option<&str>| UplinkPod {
            pod: PolicyPod {
                sandbox: "s".parse().unwrap(),
                pod: PodRef::default(),
                labels: BTreeMap::new(),
                ports: Vec::new(),
                interfaces: vec![interface(Some("10.1.0.5"), ipv6)],
            },
            mappings: [(8080, 80), (0, 81)]
                .map(|(host_port, container_port)| PortMapping {
                    protocol: PortProtocol::Udp,
                    container_port,
                    host_port,
                    host_ip: host_ip.map(ip),
                })
                .to_vec(),
        };
        let found = |ipv6, host_ip| -> Vec<String> {
            let rows = host_ports([&pod(ipv6, host_ip)].into_iter(), &own);
            assert!(rows.values().all(|target| target.port == 80));
            assert!(rows.keys().all(|key| key.port == [0x1f, 0x90] && key.protocol == 17));
            rows.keys()
                .map(|key| kni_common::address::to_ip(key.address).to_string())
                .collect()
        };
        assert_eq!(found(Some("fd01::5"), None), ["192.0.2.9", "192.0.2.10", "2001:db8::9"]);
        assert_eq!(found(None, None), ["192.0.2.9", "192.0.2.10"]);
        assert_eq!(found(Some("fd01::5"), Some("0.0.0.0")), ["192.0.2.9", "192.0.2.10"]);
        assert_eq!(found(Some("fd01::5"), Some("::")), ["2001:db8::9"]);
        assert_eq!(found(Some("fd01::5"), Some("192.0.2.10")), ["192.0.2.10"]);
        assert!(found(Some("fd01::5"), Some("203.0.113.1")).is_empty(), "not the node's");
    }

    #[test]
    fn subnets_of_networks_that_do_not_route_never_come_from_outside() {
        let range = |text: &str| text.parse::<IpNet>().unwrap();
        let networks = [spec(EgressMode::Masquerade, &[]), {
            let mut routed = spec(EgressMode::Route, &[]);
            routed.subnets = vec![range("10.2.0.0/16")];
            routed
        }];
        let deny = [range("203.0.113.0/24"), range("10.1.0.0/16")];
        let (rows, _) = sources(&deny[..1], Some(networks.iter()), &[]);
        assert_eq!(
            rows,
            [
                (range("10.1.0.0/16"), Verdict::BogonSource),
                (range("203.0.113.0/24"), Verdict::DenyListed)
            ]
            .into()
        );
        let (rows, _) = sources(&deny, Some(networks.iter()), &[]);
        assert_eq!(
            rows[&range("10.1.0.0/16")],
            Verdict::DenyListed,
            "the operator's word counts"
        );
        let (rows, real) = sources(&[], Some(networks.iter()), &[range("10.1.4.0/24")]);
        assert!(rows.is_empty());
        assert_eq!(real, [range("10.1.0.0/16")], "the node itself is there");
        assert!(
            sources(&[], None::<std::slice::Iter<'_, NetworkSpec>>, &[])
                .0
                .is_empty()
        );
    }
}
