//! Provides shorthand for policies and pods, and evaluates tables as the eBPF programs do.

use std::{collections::BTreeMap, net::IpAddr};

use kni_common::address;
use kni_model::{
    EndpointId, NetworkId, PodRef, PolicyStep, PolicyTables, SandboxId,
    policy::{
        ContainerPort, Labels, Operator, Policy, PolicyDirection, PolicyInterface, PolicyKind, PolicyPeer, PolicyPod,
        PolicyPort, PolicyRef, PolicyRule, PolicyScope, PortMatch, Requirement, Selector,
    },
};

use crate::{PolicyEngine, evaluate};

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const SCTP: u8 = 132;
pub(crate) const ICMP: u8 = 1;

/// `a=1 b=2`.
pub(crate) fn labels(text: &str) -> Labels {
    let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.into(), value.into())).collect()
}

/// `a=1 b=2`, as `matchLabels`.
pub(crate) fn select(text: &str) -> Selector {
    let requirements = labels(text).into_iter().map(|(key, value)| Requirement {
        key,
        operator: Operator::In([value].into()),
    });
    Selector {
        requirements: requirements.collect(),
    }
}

/// Pods of the policy's namespace.
pub(crate) fn pods(text: &str) -> PolicyPeer {
    PolicyPeer::Pods {
        namespaces: None,
        pods: select(text),
    }
}

/// Pods of selected namespaces.
pub(crate) fn pods_of(namespaces: &str, text: &str) -> PolicyPeer {
    PolicyPeer::Pods {
        namespaces: Some(select(namespaces)),
        pods: select(text),
    }
}

/// `10.0.0.0/8 10.1.0.0/16`: a range and its exceptions.
pub(crate) fn block(text: &str) -> PolicyPeer {
    let mut ranges = text.split_whitespace().map(|range| range.parse().unwrap());
    PolicyPeer::Block {
        cidr: ranges.next().unwrap(),
        except: ranges.collect(),
    }
}

/// `80`, `80-90`, `web` or `*`.
pub(crate) fn port(protocol: u8, text: &str) -> PolicyPort {
    let number = |text: &str| text.parse::<u16>().ok();
    let port = match (text, text.split_once('-'), number(text)) {
        ("*", ..) => PortMatch::Any,
        (_, _, Some(port)) => PortMatch::Range(port, port),
        (_, Some((first, last)), None) if number(first).is_some() => {
            PortMatch::Range(number(first).unwrap(), number(last).unwrap())
        }
        _ => PortMatch::Named(text.into()),
    };
    PolicyPort { protocol, port }
}

pub(crate) fn rule(peers: &[PolicyPeer], ports: &[PolicyPort]) -> PolicyRule {
    PolicyRule {
        peers: peers.to_vec(),
        ports: ports.to_vec(),
    }
}

/// A `NetworkPolicy` `namespace/name` without rules and directions.
pub(crate) fn policy(name: &str, selector: &str) -> Policy {
    let (namespace, name) = name.split_once('/').unwrap();
    Policy {
        reference: PolicyRef {
            kind: PolicyKind::NetworkPolicy,
            namespace: namespace.into(),
            name: name.into(),
        },
        scope: PolicyScope::Primary,
        pods: select(selector),
        ingress: None,
        egress: None,
        external: None,
    }
}

pub(crate) fn ingress(name: &str, selector: &str, rules: &[PolicyRule]) -> Policy {
    Policy {
        ingress: Some(rules.to_vec()),
        ..policy(name, selector)
    }
}

pub(crate) fn egress(name: &str, selector: &str, rules: &[PolicyRule]) -> Policy {
    Policy {
        egress: Some(rules.to_vec()),
        ..policy(name, selector)
    }
}

/// A pod `namespace/name` with an interface in each of these networks, the first one primary. Its addresses end with
/// `number`; its endpoints are `number` plus 100 for each additional network.
pub(crate) fn pod(name: &str, text: &str, number: u16, networks: &[&str]) -> PolicyPod {
    let (namespace, name) = name.split_once('/').unwrap();
    let interfaces = networks.iter().zip(0_u16..).map(|(network, position)| PolicyInterface {
        endpoint: Some(EndpointId(u32::from(number + 100 * position))),
        ifname: format!("eth{position}").parse().unwrap(),
        network: network.parse().unwrap(),
        definition: None,
        network_id: network_id(network),
        primary: position == 0,
        ipv4: Some(format!("10.0.0.{number}").parse().unwrap()),
        ipv6: Some(format!("fd00::{number:x}").parse().unwrap()),
    });
    PolicyPod {
        sandbox: format!("{namespace}-{name}-{number}").parse::<SandboxId>().unwrap(),
        pod: PodRef {
            namespace: namespace.into(),
            name: name.into(),
            uid: String::new(),
        },
        labels: labels(text),
        ports: Vec::new(),
        interfaces: interfaces.collect(),
    }
}

fn network_id(name: &str) -> NetworkId {
    let number = if name == "default" {
        1
    } else {
        1 + u32::from(*name.as_bytes().last().unwrap())
    };
    NetworkId::try_from(number).unwrap()
}

/// A named port of a container.
pub(crate) fn named(name: &str, protocol: u8, port: u16) -> ContainerPort {
    ContainerPort {
        name: name.into(),
        protocol,
        port,
    }
}

/// Namespaces x, y and z (label `ns`), with pods a, b and c (label `pod`) in each, on `default` and `net1`: endpoints 1
/// to 9, and 101 to 109.
pub(crate) fn nine() -> PolicyEngine {
    let mut engine = PolicyEngine::new(PolicyTables::default());
    let namespaces: BTreeMap<String, Labels> = ["x", "y", "z"]
        .map(|ns| (ns.into(), labels(&format!("ns={ns}"))))
        .into();
    engine.set_namespaces(namespaces);
    for (number, name) in NINE.iter().enumerate() {
        engine.put_pod(nine_pod(name, u16::try_from(number).unwrap() + 1));
    }
    engine
}

pub(crate) const NINE: [&str; 9] = ["x/a", "x/b", "x/c", "y/a", "y/b", "y/c", "z/a", "z/b", "z/c"];

pub(crate) fn nine_pod(name: &str, number: u16) -> PolicyPod {
    let (_, label) = name.split_once('/').unwrap();
    let mut pod = pod(name, &format!("pod={label}"), number, &["default", "net1"]);
    pod.ports = vec![
        named("serve-80-tcp", TCP, 80),
        named("serve-81-tcp", TCP, 81),
        named("serve-80-udp", UDP, 80),
        named("serve-81-udp", UDP, 81),
        named("serve-80-sctp", SCTP, 80),
        named("serve-81-sctp", SCTP, 81),
    ];
    pod
}

/// Carries out plans on a copy of the tables until nothing is postponed, confirms each, and compares the result.
pub(crate) fn converge(engine: &mut PolicyEngine) -> Vec<PolicyStep> {
    let mut tables = engine.tables().clone();
    let mut steps = Vec::new();
    loop {
        let plan = engine.plan();
        for step in &plan {
            apply(&mut tables, step);
        }
        engine.confirm();
        steps.extend(plan);
        if !engine.has_postponed() {
            assert_eq!(engine.tables(), &engine.desired.tables, "a difference was not noticed");
            break;
        }
    }
    let desired = engine.tables();
    tables.endpoints.retain(|id, _| desired.endpoints.contains_key(id));
    assert_eq!(&tables, desired, "the steps do not lead to the engine's tables");
    assert_eq!(engine.plan(), [], "nothing is left to do");
    steps
}

/// Carries out a step.
pub(crate) fn apply(tables: &mut PolicyTables, step: &PolicyStep) {
    match step {
        PolicyStep::PutPorts(rows) => tables.ports.extend(rows.iter().copied()),
        PolicyStep::PutPolicy(rows) => tables.policy.extend(rows.iter().copied()),
        PolicyStep::PutIdentities(rows) => tables.identities.extend(rows.iter().copied()),
        PolicyStep::Enforce(rows) => tables.endpoints.extend(rows.iter().copied()),
        PolicyStep::RemoveIdentities(keys) => keys
            .iter()
            .for_each(|key| assert!(tables.identities.remove(key).is_some())),
        PolicyStep::RemovePolicy(keys) => keys.iter().for_each(|key| assert!(tables.policy.remove(key).is_some())),
        PolicyStep::RemovePorts(keys) => keys.iter().for_each(|key| assert!(tables.ports.remove(key).is_some())),
    }
}

/// The identity of an address that does not belong to a local endpoint: that of the longest matching row.
pub(crate) fn external_identity(tables: &PolicyTables, network: u32, address: IpAddr) -> u32 {
    let mut bits = network.to_be_bytes().to_vec();
    bits.extend(address::from_ip(address));
    let bit = |bytes: &[u8], at: u32| bytes[at as usize / 8] >> (7 - at % 8) & 1;
    let covers = |key: &kni_common::policy::IdentityKey| {
        let mut own = key.data.network.to_vec();
        own.extend(key.data.address);
        (0..key.prefix_length).all(|at| bit(&own, at) == bit(&bits, at))
    };
    let around = tables.identities.iter().filter(|(key, _)| covers(key));
    around
        .max_by_key(|(key, _)| key.prefix_length)
        .map_or(0, |(_, identity)| *identity)
}

/// Whether endpoint `from` may send to endpoint `to`; IPv4 and IPv6 must agree.
pub(crate) fn passes(engine: &PolicyEngine, from: u32, to: u32, protocol: u8, port: u16) -> bool {
    let tables = engine.tables();
    let (from, to) = (tables.endpoints[&EndpointId(from)], tables.endpoints[&EndpointId(to)]);
    let ask = |sender: u32, receiver: u32| {
        evaluate(tables, from.policy, PolicyDirection::Egress, receiver, protocol, port).0
            && evaluate(tables, to.policy, PolicyDirection::Ingress, sender, protocol, port).0
    };
    let (v4, v6) = (ask(from.identity4, to.identity4), ask(from.identity6, to.identity6));
    assert_eq!(v4, v6, "IPv4 and IPv6 differ");
    v4
}

/// Whether an endpoint of the default network may send to an address that does not belong to a local endpoint:
/// according to egress rules, and according to egress policies.
pub(crate) fn leaves(engine: &PolicyEngine, from: u32, to: &str, protocol: u8, port: u16) -> (bool, bool) {
    let tables = engine.tables();
    let identity = external_identity(tables, 1, to.parse().unwrap());
    let set = tables.endpoints[&EndpointId(from)].policy;
    let ask = |direction| evaluate(tables, set, direction, identity, protocol, port).0;
    (ask(PolicyDirection::Egress), ask(PolicyDirection::External))
}
