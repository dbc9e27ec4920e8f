//! Computes the desired egress rows of the dataplane; without side effects.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
};

use ipnet::IpNet;
use kni_common::{Verdict, uplink::HostPortKey};
use kni_dataplane::{EgressSource, HostPort, host_port_key};
use kni_model::{
    Fabric, NetworkSpec, PortMapping, PortProtocol,
    egress::{EgressRefusal, EgressUser, RefusedAddress},
    network::EgressMode,
    policy::{PolicyInterface, PolicyPod, PolicyRef},
};

use super::{EgressRights, node::NodeNetwork};

/// Ports of an address that only pods use: all except the privileged ones.
const DEDICATED_PORTS: RangeInclusive<u16> = 1024..=65535;

/// The properties of a pod that egress depends on.
#[derive(Debug, Clone)]
pub(super) struct UplinkPod {
    pub(super) pod: PolicyPod,
    pub(super) mappings: Vec<PortMapping>,
}

/// The egress of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Egress {
    /// Its source address; `None` without one.
    pub(super) source: Option<EgressSource>,
    /// Addresses of it that are not the node's own and that it may use by this node.
    pub(super) dedicated: BTreeMap<IpAddr, EgressUser>,
    /// Addresses of it whose ports several nodes share.
    pub(super) shared: BTreeSet<IpAddr>,
    /// Addresses that it must leave with and may not use: nothing of it leaves.
    pub(super) refused: Vec<RefusedAddress>,
}

/// What the egress of interfaces depends on.
pub(super) struct Facts<'a> {
    pub(super) node: &'a NodeNetwork,
    /// The node's own addresses.
    pub(super) own: &'a BTreeSet<IpAddr>,
    /// Ports of the node's own addresses.
    pub(super) ports: &'a RangeInclusive<u16>,
    pub(super) rights: &'a EgressRights,
}

impl Facts<'_> {
    /// Computes the egress of an interface. `requested` are the addresses that policies request.
    pub(super) fn egress(
        &self,
        spec: &NetworkSpec,
        interface: &PolicyInterface,
        requested: &[(IpAddr, PolicyRef)],
    ) -> Egress {
        let uplink = self.node.uplink.as_ref();
        let Some(uplink) = uplink.filter(|_| spec.egress == EgressMode::Masquerade) else {
            return Egress::default();
        };
        let mut egress = Egress::default();
        // Only the families that the pod has: both share one range of ports.
        let v4 = interface.ipv4.and_then(|_| {
            let chosen = self.chosen(true, spec, requested, &mut egress);
            chosen.or(uplink.ipv4.map(IpAddr::V4))
        });
        let v6 = interface.ipv6.and_then(|_| {
            let chosen = self.chosen(false, spec, requested, &mut egress);
            chosen.or(uplink.ipv6.map(IpAddr::V6))
        });
        let used = || v4.into_iter().chain(v6);
        let is_shared = |address: &Option<IpAddr>| address.is_some_and(|address| egress.shared.contains(&address));
        let all_dedicated =
            used().all(|address| egress.dedicated.contains_key(&address) || egress.shared.contains(&address));
        let ports = if all_dedicated { &DEDICATED_PORTS } else { self.ports };
        let source = EgressSource {
            ipv4: v4.and_then(|address| if let IpAddr::V4(v4) = address { Some(v4) } else { None }),
            ipv6: v6.and_then(|address| if let IpAddr::V6(v6) = address { Some(v6) } else { None }),
            first: *ports.start(),
            last: *ports.end(),
            shared_v4: is_shared(&v4),
            shared_v6: is_shared(&v6),
        };
        // Without one of its addresses nothing leaves, instead of packets with another address.
        let leaves = egress.refused.is_empty() && used().next().is_some();
        egress.source = leaves.then_some(source);
        egress
    }

    /// The address of a family that a policy or the network demands. `None` where none does.
    fn chosen(
        &self,
        v4: bool,
        spec: &NetworkSpec,
        requested: &[(IpAddr, PolicyRef)],
        egress: &mut Egress,
    ) -> Option<IpAddr> {
        let of_policy = requested.iter().find(|(address, _)| address.is_ipv4() == v4);
        let of_policy = of_policy.map(|(address, policy)| (*address, EgressUser::Policy(policy.clone())));
        let (address, user) = of_policy.or_else(|| {
            let address = spec.egress_addresses.iter().find(|address| address.is_ipv4() == v4)?;
            Some((*address, EgressUser::Network(spec.name.clone())))
        })?;
        let right = match (&user, self.own.contains(&address)) {
            // The administrator chose one of the node's addresses.
            (EgressUser::Network(_), true) => return Some(address),
            (EgressUser::Policy(_), true) => Err(EgressRefusal::Reserved("an address of this node".to_owned())),
            (_, false) => self
                .rights
                .get(&(user.clone(), address))
                .cloned()
                .unwrap_or(Err(EgressRefusal::Unassigned)),
        };
        match right {
            Ok(way) => {
                if way.is_shared() {
                    egress.shared.insert(address);
                }
                if way.is_here() {
                    egress.dedicated.insert(address, user);
                }
            }
            Err(refusal) => egress.refused.push(RefusedAddress { address, user, refusal }),
        }
        Some(address)
    }
}

/// All host ports that lead to a primary interface of a pod. `own` are the node's own addresses.
pub(super) fn host_ports<'a>(
    pods: impl Iterator<Item = &'a UplinkPod>,
    own: &BTreeSet<IpAddr>,
) -> BTreeMap<HostPortKey, HostPort> {
    rows(pods, |mapping| {
        own.iter()
            .copied()
            .filter(|address| takes(mapping.host_ip, *address))
            .collect()
    })
}

/// The same for the node's own sockets, which reach a port at loopback addresses, too.
pub(super) fn node_ports<'a>(
    pods: impl Iterator<Item = &'a UplinkPod>,
    own: &BTreeSet<IpAddr>,
) -> BTreeMap<HostPortKey, HostPort> {
    rows(pods, |mapping| match mapping.host_ip {
        Some(one) if one.is_loopback() => vec![one],
        requested => own
            .iter()
            .chain(&EVERY_LOOPBACK)
            .copied()
            .filter(|address| takes(requested, *address))
            .collect(),
    })
}

/// The addresses and ports of pods that UDP ports of the node lead to.
pub(super) fn udp_targets<'a>(pods: impl Iterator<Item = &'a UplinkPod>) -> BTreeSet<SocketAddr> {
    let mut targets = BTreeSet::new();
    for UplinkPod { pod, mappings } in pods {
        let Some(primary) = pod.interfaces.iter().find(|interface| interface.primary) else {
            continue;
        };
        let is_udp = |mapping: &&PortMapping| mapping.host_port != 0 && mapping.protocol == PortProtocol::Udp;
        for mapping in mappings.iter().filter(is_udp) {
            let v4 = primary.ipv4.map(IpAddr::V4);
            let addresses = v4.into_iter().chain(primary.ipv6.map(IpAddr::V6));
            targets.extend(addresses.map(|address| SocketAddr::new(address, mapping.container_port)));
        }
    }
    targets
}

/// What stands for all loopback addresses of a family in the rows of the node's own sockets.
const EVERY_LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

fn rows<'a>(
    pods: impl Iterator<Item = &'a UplinkPod>,
    addresses: impl Fn(&PortMapping) -> Vec<IpAddr>,
) -> BTreeMap<HostPortKey, HostPort> {
    let mut rows = BTreeMap::new();
    for UplinkPod { pod, mappings } in pods {
        let Some(primary) = pod.interfaces.iter().find(|interface| interface.primary) else {
            continue;
        };
        let Some(endpoint) = primary.endpoint else { continue };
        let has_family = |address: &IpAddr| match address {
            IpAddr::V4(_) => primary.ipv4.is_some(),
            IpAddr::V6(_) => primary.ipv6.is_some(),
        };
        for mapping in mappings.iter().filter(|mapping| mapping.host_port != 0) {
            for address in addresses(mapping).into_iter().filter(has_family) {
                let key = host_port_key(address, number(mapping.protocol), mapping.host_port);
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
    // Pods of other nodes come with their own addresses where there is no tunnel.
    let bogons = bogons.filter(|spec| match spec.fabric {
        Fabric::Overlay => true,
        Fabric::Native => false,
        Fabric::None => spec.egress != EgressMode::Route,
    });
    let (real, bogons): (Vec<IpNet>, Vec<IpNet>) = bogons
        .flat_map(|spec| spec.subnets.iter().copied())
        .partition(|subnet| connected.iter().any(|net| overlaps(net, subnet)));
    let bogons = bogons.into_iter().map(|subnet| (subnet, Verdict::BogonSource));
    let denied = deny.iter().map(|range| (range.trunc(), Verdict::DenyListed));
    (bogons.chain(denied).collect(), real)
}

#[cfg(test)]
mod tests {
    use kni_model::{EndpointId, PodRef, egress::EgressWay, policy::PolicyKind};

    use super::*;
    use crate::node::UplinkLink;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn node() -> NodeNetwork {
        NodeNetwork {
            unusable: None,
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
            number: None,
            fabric: kni_model::Fabric::None,
        }
    }

    fn interface(ipv4: Option<&str>, ipv6: Option<&str>) -> PolicyInterface {
        PolicyInterface {
            endpoint: Some(EndpointId(5)),
            ifname: "eth0".parse().unwrap(),
            network: "blue".parse().unwrap(),
            definition: None,
            network_id: 1.try_into().unwrap(),
            primary: true,
            ipv4: ipv4.map(|text| text.parse().unwrap()),
            ipv6: ipv6.map(|text| text.parse().unwrap()),
        }
    }

    fn policy() -> PolicyRef {
        PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace: "team".to_owned(),
            name: "policy".to_owned(),
        }
    }

    /// With the right to all addresses but those that end in 99. Those that end in 70 and 71 are shared; other nodes
    /// answer for the latter.
    fn out(spec: &NetworkSpec, interface: &PolicyInterface, requested: &[&str]) -> Egress {
        let own = [ip("192.0.2.9"), ip("192.0.2.10")].into();
        let requested: Vec<_> = requested.iter().map(|text| (ip(text), policy())).collect();
        let of_policy = requested
            .iter()
            .map(|(address, _)| (EgressUser::Policy(policy()), *address));
        let of_network = spec.egress_addresses.iter();
        let of_network = of_network.map(|address| (EgressUser::Network(spec.name.clone()), *address));
        let right = |address: IpAddr| {
            let granted = !address.to_string().ends_with("99");
            let way = match address.to_string().rsplit(['.', ':']).next() {
                Some("70") => EgressWay::Shared,
                Some("71") => EgressWay::Through,
                _ => EgressWay::Alone,
            };
            granted.then_some(way).ok_or(EgressRefusal::NotInPool)
        };
        let rights = of_policy
            .chain(of_network)
            .map(|(user, address)| ((user, address), right(address)));
        let facts = Facts {
            node: &node(),
            own: &own,
            ports: &(61_000..=65_535),
            rights: &rights.collect(),
        };
        facts.egress(spec, interface, &requested)
    }

    fn dedicated(egress: &Egress) -> Vec<String> {
        egress.dedicated.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn an_interface_that_may_not_use_one_of_its_addresses_does_not_leave_with_another() {
        let both = interface(Some("10.1.0.5"), Some("fd01::5"));
        let refusals = |spec: &NetworkSpec, requested: &[&str]| {
            let egress = out(spec, &both, requested);
            assert_eq!(egress.source, None);
            egress.refused.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let plain = spec(EgressMode::Masquerade, &[]);
        let pool = "is in no EgressAddressPool: add it to a pool that admits the namespace, or remove it";
        let of_policy = format!("EgressPolicy team/policy: 192.0.2.99 {pool}");
        for requested in [&["192.0.2.99"][..], &["192.0.2.99", "2001:db8::50"]] {
            assert_eq!(refusals(&plain, requested), [of_policy.as_str()]);
        }
        let own = "EgressPolicy team/policy: 192.0.2.10 is an address of this node";
        assert_eq!(refusals(&plain, &["192.0.2.10"]), [own]);
        let network = spec(EgressMode::Masquerade, &["192.0.2.99"]);
        assert_eq!(refusals(&network, &[]), [format!("PodNetwork blue: 192.0.2.99 {pool}")]);
        let both = out(&network, &interface(None, Some("fd01::5")), &[]);
        assert!(both.refused.is_empty(), "the interface has no address of that family");
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
        let own = spec(EgressMode::Masquerade, &["192.0.2.10"]);
        assert_eq!(source(&own, &[]), ("192.0.2.10".to_owned(), 61_000), "the node's own");
        assert_eq!(dedicated(&out(&with, &v4, &[])), ["192.0.2.50"]);
        assert!(out(&own, &v4, &[]).dedicated.is_empty());
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
        assert_eq!(dedicated(&mixed), ["2001:db8::50"]);
        assert_eq!(mixed.source.unwrap().first, 61_000);
    }

    #[test]
    fn an_address_that_another_node_answers_for_is_not_taken() {
        let both = interface(Some("10.1.0.5"), Some("fd01::5"));
        let shared = |requested: &[&str]| {
            let egress = out(&spec(EgressMode::Masquerade, &[]), &both, requested);
            let source = egress.source.clone().unwrap();
            (dedicated(&egress), source.shared_v4, source.shared_v6, source.first)
        };
        let here = || vec!["192.0.2.70".to_owned()];
        assert_eq!(shared(&["192.0.2.70"]), (here(), true, false, 1024));
        assert_eq!(shared(&["192.0.2.70", "2001:db8::71"]), (here(), true, true, 1024));
        assert_eq!(shared(&["2001:db8::71"]), (Vec::new(), false, true, 61_000));
        assert_eq!(shared(&["192.0.2.71"]), (Vec::new(), true, false, 1024));
        assert_eq!(
            shared(&["2001:db8::60"]),
            (vec!["2001:db8::60".to_owned()], false, false, 61_000)
        );
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
        let of_node = |ipv6, host_ip| -> Vec<String> {
            let rows = node_ports([&pod(ipv6, host_ip)].into_iter(), &own);
            rows.keys()
                .map(|key| kni_common::address::to_ip(key.address).to_string())
                .collect()
        };
        assert_eq!(
            of_node(Some("fd01::5"), None),
            ["::", "0.0.0.0", "192.0.2.9", "192.0.2.10", "2001:db8::9"],
            "the unspecified addresses stand for all loopback addresses"
        );
        assert_eq!(of_node(None, None), ["0.0.0.0", "192.0.2.9", "192.0.2.10"]);
        assert_eq!(of_node(Some("fd01::5"), Some("::")), ["::", "2001:db8::9"]);
        assert_eq!(of_node(Some("fd01::5"), Some("192.0.2.10")), ["192.0.2.10"]);
        assert_eq!(of_node(Some("fd01::5"), Some("127.0.0.1")), ["127.0.0.1"]);
        assert_eq!(of_node(Some("fd01::5"), Some("::1")), ["::1"]);
        assert!(of_node(None, Some("::1")).is_empty());
    }

    #[test]
    fn pods_of_other_nodes_come_from_outside_only_without_a_tunnel() {
        let blocked = |egress, fabric| {
            let network = NetworkSpec {
                fabric,
                ..spec(egress, &[])
            };
            !sources(&[], Some([network].iter()), &[]).0.is_empty()
        };
        for egress in [EgressMode::None, EgressMode::Masquerade, EgressMode::Route] {
            assert!(blocked(egress, Fabric::Overlay), "{egress:?}");
            assert!(!blocked(egress, Fabric::Native), "{egress:?}");
            assert_eq!(blocked(egress, Fabric::None), egress != EgressMode::Route);
        }
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
