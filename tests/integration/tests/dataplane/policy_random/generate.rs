//! Generates worlds: small enough that rules match pods, with every form of the API.

use std::{collections::BTreeSet, net::IpAddr};

use fastrand::Rng;
use k8s_openapi::{
    api::networking::v1::{
        IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
        NetworkPolicyPort, NetworkPolicySpec,
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use kni_integration::oracle::{Interface, Labels, NamedPort, Peer, Pod, Policy, Protocol, World};

/// Networks; both use the same addresses.
pub(crate) const NETWORKS: [&str; 2] = ["default", "net1"];
const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const KEYS: [&str; 3] = ["app", "tier", "env"];
const VALUES: [&str; 3] = ["a", "b", ""];
const PORT_NAMES: [&str; 3] = ["web", "dns", "admin"];
const PORTS: [u16; 10] = [53, 79, 80, 81, 127, 128, 443, 8080, 8081, 65535];
/// Maximum number of interfaces in a world: the programs' test has this number of devices.
pub(crate) const MAX_INTERFACES: usize = 8;

/// One question: a packet from one address to another in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) network: &'static str,
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

/// A random world.
pub(crate) fn world(rng: &mut Rng) -> World {
    let mut world = World::default();
    for name in NAMESPACES {
        if rng.u8(..8) > 0 {
            world.namespaces.insert(name.into(), labels(rng));
        }
    }
    let mut interfaces = 0;
    for number in 0..rng.usize(2..=5) {
        let pod = pod(rng, number);
        interfaces += pod.interfaces.len();
        if interfaces > MAX_INTERFACES {
            break;
        }
        world.pods.push(pod);
    }
    for number in 0..rng.usize(0..=5) {
        let policy = policy(rng, number);
        world.policies.push(policy);
    }
    world
}

/// Changes one thing of a world.
pub(crate) fn change(rng: &mut Rng, world: &mut World) {
    match rng.u8(..5) {
        0 => {
            world.namespaces.insert((*pick(rng, &NAMESPACES)).into(), labels(rng));
        }
        1 if !world.pods.is_empty() => {
            let index = rng.usize(..world.pods.len());
            world.pods[index].labels = labels(rng);
            world.pods[index].ports = named_ports(rng);
        }
        2 if !world.policies.is_empty() => {
            let index = rng.usize(..world.policies.len());
            world.policies.remove(index);
        }
        _ => {
            let number = 10 + rng.usize(..1000);
            let name = format!("p{number}");
            if !world
                .policies
                .iter()
                .any(|policy| policy.object.metadata.name.as_ref() == Some(&name))
            {
                world.policies.push(policy(rng, number));
            }
        }
    }
}

/// Both ends in one network and of one family, at least one of them a pod.
pub(crate) fn question(rng: &mut Rng, world: &World) -> Question {
    let network = *pick(rng, &NETWORKS);
    let v4 = rng.bool();
    let pods: Vec<IpAddr> = world
        .pods
        .iter()
        .filter_map(|pod| pod.on(network)?.addresses.iter().copied().find(|ip| ip.is_ipv4() == v4))
        .collect();
    if pods.is_empty() {
        return question(rng, world);
    }
    let mut ends = [*pick(rng, &pods), *pick(rng, &pods)];
    if rng.u8(..4) == 0 || ends[0] == ends[1] {
        ends[rng.usize(..2)] = outside(rng, v4);
    }
    let named = match world.peer(network, ends[1]) {
        Peer::Pod(pod, ..) if rng.bool() => Some(pick(rng, &pod.ports)),
        Peer::Pod(..) | Peer::Outside(_) | Peer::Node(_) => None,
    };
    let (protocol, port) = match (named, rng.u8(..6)) {
        (Some(named), _) => (named.protocol, named.port),
        (None, 0) => (Protocol::Icmp, 0),
        (None, 1) => (Protocol::Sctp, port(rng)),
        (None, 2 | 3) => (Protocol::Udp, port(rng)),
        (None, _) => (Protocol::Tcp, port(rng)),
    };
    Question {
        network,
        from: ends[0],
        to: ends[1],
        protocol,
        port,
    }
}

fn pick<'a, T>(rng: &mut Rng, list: &'a [T]) -> &'a T {
    &list[rng.usize(..list.len())]
}

fn some<T>(rng: &mut Rng, most: usize, mut make: impl FnMut(&mut Rng) -> T) -> Vec<T> {
    (0..rng.usize(1..=most)).map(|_| make(rng)).collect()
}

/// `None`, an empty list, or a full one.
fn maybe<T>(rng: &mut Rng, most: usize, make: impl FnMut(&mut Rng) -> T) -> Option<Vec<T>> {
    match rng.u8(..6) {
        0 => None,
        1 => Some(Vec::new()),
        _ => Some(some(rng, most, make)),
    }
}

fn labels(rng: &mut Rng) -> Labels {
    let mut labels = Labels::new();
    for key in KEYS {
        if rng.bool() {
            labels.insert(key.into(), (*pick(rng, &VALUES)).into());
        }
    }
    labels
}

fn port(rng: &mut Rng) -> u16 {
    *pick(rng, &PORTS)
}

fn transport(rng: &mut Rng) -> Protocol {
    *pick(rng, &Protocol::TRANSPORTS)
}

fn named_ports(rng: &mut Rng) -> Vec<NamedPort> {
    let mut taken = BTreeSet::new();
    let mut ports = some(rng, 4, |rng| NamedPort {
        name: (*pick(rng, &PORT_NAMES)).into(),
        protocol: transport(rng),
        port: port(rng),
    });
    // The names of a pod's ports are unique: the API refuses a duplicate.
    ports.retain(|port| taken.insert(port.name.clone()));
    ports
}

fn pod(rng: &mut Rng, number: usize) -> Pod {
    let last = 4 * number + rng.usize(1..4);
    let interface = |rng: &mut Rng, network: &str, primary| {
        let mut addresses: Vec<IpAddr> = vec![
            format!("10.0.0.{last}").parse().expect("an address"),
            format!("fd00::{last:x}").parse().expect("an address"),
        ];
        if rng.u8(..6) == 0 {
            addresses.remove(rng.usize(..2));
        }
        Interface {
            network: network.into(),
            primary,
            addresses,
        }
    };
    let first = NETWORKS[usize::from(rng.u8(..5) == 0)];
    let mut interfaces = vec![interface(rng, first, true)];
    if rng.bool() {
        let other = NETWORKS[usize::from(interfaces[0].network == NETWORKS[0])];
        interfaces.push(interface(rng, other, false));
    }
    Pod {
        namespace: (*pick(rng, &NAMESPACES)).into(),
        name: format!("pod{number}"),
        labels: labels(rng),
        ports: named_ports(rng),
        interfaces,
    }
}

fn outside(rng: &mut Rng, v4: bool) -> IpAddr {
    let text = if v4 {
        ["192.0.2.1", "10.0.1.1", "203.0.113.128", "11.0.0.1"]
    } else {
        ["2001:db8::1", "fd00:0:0:1::1", "fd01::1", "2001:db8:8000::1"]
    };
    pick(rng, &text).parse().expect("an address")
}

fn policy(rng: &mut Rng, number: usize) -> Policy {
    let networks = (rng.u8(..3) == 0).then(|| {
        let first = BTreeSet::from([(*pick(rng, &NETWORKS)).to_owned()]);
        if rng.u8(..4) == 0 {
            NETWORKS.map(str::to_owned).into()
        } else {
            first
        }
    });
    let types = match rng.u8(..6) {
        0 | 1 => None,
        2 => Some(vec!["Ingress"]),
        3 => Some(vec!["Egress"]),
        _ => Some(vec!["Ingress", "Egress"]),
    };
    let spec = NetworkPolicySpec {
        pod_selector: Some(selector(rng)),
        policy_types: types.map(|types| types.into_iter().map(str::to_owned).collect()),
        ingress: maybe(rng, 3, |rng| NetworkPolicyIngressRule {
            from: maybe(rng, 3, peer),
            ports: maybe(rng, 3, policy_port),
        }),
        egress: maybe(rng, 3, |rng| NetworkPolicyEgressRule {
            to: maybe(rng, 3, peer),
            ports: maybe(rng, 3, policy_port),
        }),
    };
    let metadata = ObjectMeta {
        namespace: Some((*pick(rng, &NAMESPACES)).into()),
        name: Some(format!("p{number}")),
        ..ObjectMeta::default()
    };
    Policy {
        networks,
        object: NetworkPolicy {
            metadata,
            spec: Some(spec),
        },
    }
}

fn selector(rng: &mut Rng) -> LabelSelector {
    let mut selector = LabelSelector::default();
    if rng.u8(..3) == 0 {
        return selector;
    }
    if rng.bool() {
        let pair = ((*pick(rng, &KEYS)).to_owned(), (*pick(rng, &VALUES)).to_owned());
        selector.match_labels = Some([pair].into());
    }
    if rng.bool() {
        selector.match_expressions = Some(some(rng, 2, requirement));
    }
    selector
}

fn requirement(rng: &mut Rng) -> LabelSelectorRequirement {
    let operator = *pick(rng, &["In", "NotIn", "Exists", "DoesNotExist"]);
    let values = operator
        .ends_with("In")
        .then(|| some(rng, 2, |rng| (*pick(rng, &VALUES)).to_owned()));
    LabelSelectorRequirement {
        key: (*pick(rng, &KEYS)).into(),
        operator: operator.into(),
        values,
    }
}

fn peer(rng: &mut Rng) -> NetworkPolicyPeer {
    let mut peer = NetworkPolicyPeer::default();
    match rng.u8(..5) {
        0 => peer.pod_selector = Some(selector(rng)),
        1 => peer.namespace_selector = Some(namespace_selector(rng)),
        2 => {
            peer.pod_selector = Some(selector(rng));
            peer.namespace_selector = Some(namespace_selector(rng));
        }
        _ => peer.ip_block = Some(block(rng)),
    }
    peer
}

fn namespace_selector(rng: &mut Rng) -> LabelSelector {
    if rng.u8(..4) > 0 {
        return selector(rng);
    }
    let pair = (
        "kubernetes.io/metadata.name".to_owned(),
        (*pick(rng, &NAMESPACES)).to_owned(),
    );
    LabelSelector {
        match_labels: Some([pair].into()),
        ..LabelSelector::default()
    }
}

/// Nested ranges around the pods' addresses, host bits set or not.
fn block(rng: &mut Rng) -> IPBlock {
    let v4 = rng.bool();
    let lengths: &[u32] = if v4 {
        &[0, 1, 8, 24, 26, 27, 28, 29, 30, 31, 32]
    } else {
        &[0, 1, 8, 64, 120, 123, 124, 125, 126, 127, 128]
    };
    let index = rng.usize(..lengths.len());
    let address = near(rng, v4);
    let except = (index + 1 < lengths.len() && rng.bool()).then(|| {
        some(rng, 2, |rng| {
            let longer = lengths[rng.usize(index + 1..lengths.len())];
            cidr(within(rng, address, lengths[index]), longer)
        })
    });
    IPBlock {
        cidr: cidr(address, lengths[index]),
        except,
    }
}

fn near(rng: &mut Rng, v4: bool) -> IpAddr {
    if rng.u8(..6) == 0 {
        return outside(rng, v4);
    }
    let last = rng.u8(..32);
    if v4 {
        [10, 0, 0, last].into()
    } else {
        format!("fd00::{last:x}").parse().expect("an address")
    }
}

/// The address, or another address of its range that is likely to belong to a pod.
fn within(rng: &mut Rng, address: IpAddr, length: u32) -> IpAddr {
    let other = near(rng, address.is_ipv4());
    let same = match (address, other) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= length,
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= length,
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
    };
    if same { other } else { address }
}

fn cidr(address: IpAddr, length: u32) -> String {
    format!("{address}/{length}")
}

fn policy_port(rng: &mut Rng) -> NetworkPolicyPort {
    let protocol = (rng.u8(..4) > 0).then(|| transport(rng).name().to_owned());
    let (number, last) = (port(rng), port(rng));
    let (port, end_port) = match rng.u8(..6) {
        0 => (None, None),
        1 | 2 => (Some(IntOrString::String((*pick(rng, &PORT_NAMES)).into())), None),
        3 => (
            Some(IntOrString::Int(number.min(last).into())),
            Some(i32::from(number.max(last))),
        ),
        _ => (Some(IntOrString::Int(number.into())), None),
    };
    NetworkPolicyPort {
        protocol,
        port,
        end_port,
    }
}
