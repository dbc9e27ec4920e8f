//! Checks with random inputs that the tables enforce the policies.

use std::{collections::BTreeMap, net::IpAddr};

use kni_model::{
    EndpointId, PolicyTables,
    policy::{
        ContainerPort, ExternalRule, ExternalRules, Labels, NamedNetwork, Policy, PolicyDirection, PolicyKind,
        PolicyPeer, PolicyPod, PolicyPort, PolicyRef, PolicyRule, PolicyScope, Selector,
    },
};
use proptest::prelude::*;

use super::{
    oracle::{Other, World},
    world::{
        ICMP, SCTP, TCP, UDP, block, converge, external_identity, labels, named, pod, pods, pods_of, port, select,
    },
};
use crate::{PolicyEngine, evaluate};

const ADDRESSES: [&str; 6] = [
    "10.0.0.200",
    "10.0.0.3",
    "10.1.0.1",
    "192.0.2.1",
    "fd00::200",
    "2001:db8::1",
];

pub(super) const PROTOCOLS: [(u8, u16); 9] = [
    (TCP, 79),
    (TCP, 80),
    (TCP, 81),
    (TCP, 82),
    (TCP, 65535),
    (UDP, 80),
    (SCTP, 80),
    (UDP, 0),
    (ICMP, 0),
];

/// A single change.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Pod(usize, Option<PolicyPod>),
    Policy(usize, Option<Policy>),
    Namespaces(BTreeMap<String, Labels>),
}

/// The inputs by slot.
#[derive(Debug, Clone, Default)]
pub(super) struct Slots {
    pods: BTreeMap<usize, PolicyPod>,
    policies: BTreeMap<usize, Policy>,
    namespaces: BTreeMap<String, Labels>,
}

impl Slots {
    pub(super) fn change(&mut self, change: &Change) {
        match change {
            Change::Pod(slot, Some(pod)) => drop(self.pods.insert(*slot, pod.clone())),
            Change::Pod(slot, None) => drop(self.pods.remove(slot)),
            Change::Policy(slot, Some(policy)) => drop(self.policies.insert(*slot, policy.clone())),
            Change::Policy(slot, None) => drop(self.policies.remove(slot)),
            Change::Namespaces(namespaces) => self.namespaces.clone_from(namespaces),
        }
    }

    pub(super) fn world(&self) -> World {
        World {
            namespaces: self.namespaces.clone(),
            pods: self.pods.values().cloned().collect(),
            policies: self.policies.values().cloned().collect(),
        }
    }
}

/// Passes the changes between two worlds to the engine.
pub(super) fn apply_changes(engine: &mut PolicyEngine, before: &World, now: &World) {
    engine.set_policies(now.policies.clone());
    engine.set_namespaces(now.namespaces.clone());
    for gone in before
        .pods
        .iter()
        .filter(|pod| !now.pods.iter().any(|still| still.sandbox == pod.sandbox))
    {
        engine.remove_pod(&gone.sandbox);
    }
    for pod in &now.pods {
        engine.put_pod(pod.clone());
    }
}

/// Every lookup that is possible for an endpoint: direction, remote end, and its identity.
pub(super) fn lookups<'a>(
    world: &'a World,
    tables: &PolicyTables,
    network: u32,
) -> Vec<(PolicyDirection, Other<'a>, u32)> {
    use PolicyDirection::{Egress, External, Ingress};
    let mut found = Vec::new();
    let interfaces = world
        .pods
        .iter()
        .flat_map(|pod| pod.interfaces.iter().map(move |interface| (pod, interface)));
    let mut known: Vec<IpAddr> = Vec::new();
    for (pod, interface) in interfaces.filter(|(_, interface)| interface.network_id.get() == network) {
        for address in [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)]
            .into_iter()
            .flatten()
        {
            known.push(address);
            let other = Other {
                address,
                pod: Some(pod),
            };
            let identity = match interface.endpoint {
                Some(id) if address.is_ipv4() => tables.endpoints[&id].identity4,
                Some(id) => tables.endpoints[&id].identity6,
                None => external_identity(tables, network, address),
            };
            found.extend([(Egress, other, identity), (Ingress, other, identity)]);
            if interface.endpoint.is_none() {
                found.push((External, other, identity));
            }
        }
    }
    for address in ADDRESSES.map(|address| address.parse().unwrap()) {
        if !known.contains(&address) {
            let other = Other { address, pod: None };
            let identity = external_identity(tables, network, address);
            found.extend([Egress, Ingress, External].map(|direction| (direction, other, identity)));
        }
    }
    found
}

fn check(engine: &PolicyEngine, world: &World) -> Result<(), TestCaseError> {
    let tables = engine.tables();
    for pod in &world.pods {
        for interface in &pod.interfaces {
            let Some(id) = interface.endpoint else { continue };
            let set = tables.endpoints[&id].policy;
            for (direction, other, identity) in lookups(world, tables, interface.network_id.get()) {
                for (protocol, port) in PROTOCOLS {
                    let desired = world.allows(direction, pod, interface, other, (protocol, port));
                    let (allowed, trail) = evaluate(tables, set, direction, identity, protocol, port);
                    prop_assert_eq!(
                        allowed,
                        desired,
                        "{} {:?} {:?} {} {}: {:?}",
                        pod.pod,
                        direction,
                        other.address,
                        protocol,
                        port,
                        trail
                    );
                    let rule = engine.rule(trail.set, direction, trail.rule, trail.ordinal);
                    let isolating = engine.isolating(set, direction);
                    if trail.rule != 0 {
                        prop_assert!(rule.is_some(), "a rule without a name");
                    } else if !allowed {
                        prop_assert!(!isolating.is_empty(), "a denial without a policy");
                    }
                }
            }
        }
    }
    Ok(())
}

fn any_selector() -> impl Strategy<Value = Selector> {
    crate::selector::tests::any_selector()
}

fn any_block() -> impl Strategy<Value = PolicyPeer> {
    let blocks = vec![
        "10.0.0.0/8",
        "0.0.0.0/0",
        "::/0",
        "fd00::/64",
        "10.0.0.0/29 10.0.0.2/31",
        "10.0.0.0/16 10.0.0.0/30 10.0.0.1/32",
        "0.0.0.0/0 10.0.0.0/24",
        "::/0 fd00::/16",
        "10.0.0.2/32",
        "192.0.2.0/24",
        "fd00::/16 fd00::2/127",
        "10.0.0.0/8 10.0.0.0/8",
    ];
    prop::sample::select(blocks).prop_map(block)
}

fn any_peer() -> impl Strategy<Value = PolicyPeer> {
    prop_oneof![
        any_selector().prop_map(|pods| PolicyPeer::Pods { namespaces: None, pods }),
        (any_selector(), any_selector()).prop_map(|(namespaces, pods)| PolicyPeer::Pods {
            namespaces: Some(namespaces),
            pods
        }),
        prop::sample::select(vec!["x", "y"])
            .prop_map(|name| pods_of(&format!("kubernetes.io/metadata.name={name}"), "")),
        Just(pods("")),
        any_block(),
    ]
}

fn any_port(names: bool) -> impl Strategy<Value = PolicyPort> {
    let mut texts = vec!["*", "80", "81", "79-81", "80-65535", "1-80", "82"];
    if names {
        texts.extend(["web", "web", "dns"]);
    }
    let protocol = prop::sample::select(vec![TCP, TCP, UDP, SCTP]);
    (protocol, prop::sample::select(texts)).prop_map(|(protocol, text)| port(protocol, text))
}

fn any_rules() -> impl Strategy<Value = Option<Vec<PolicyRule>>> {
    let peers = prop::collection::vec(any_peer(), 0..3);
    let ports = prop::collection::vec(any_port(true), 0..3);
    let rule = (peers, ports).prop_map(|(peers, ports)| PolicyRule { peers, ports });
    prop::option::of(prop::collection::vec(rule, 0..3))
}

fn any_external() -> impl Strategy<Value = ExternalRules> {
    let peers = prop::collection::vec(any_block(), 0..3);
    let ports = prop::collection::vec(any_port(false), 0..3);
    let rule = (any::<bool>(), peers, ports).prop_map(|(allow, to, ports)| ExternalRule { allow, to, ports });
    (prop::collection::vec(rule, 0..4), any::<bool>()).prop_map(|(rules, otherwise_allow)| ExternalRules {
        rules,
        otherwise_allow,
        egress_addresses: Vec::new(),
    })
}

fn any_policy(slot: usize) -> impl Strategy<Value = Policy> {
    let scope = prop_oneof![
        3 => Just(PolicyScope::Primary),
        1 => Just(PolicyScope::Networks(["net1".parse().unwrap()].into())),
        1 => Just(PolicyScope::Named(
            [NamedNetwork { namespace: "x".to_owned(), name: "net1".parse().unwrap() }].into()
        )),
        1 => Just(PolicyScope::All),
    ];
    let external = prop::option::weighted(0.3, any_external());
    let namespace = prop::sample::select(vec!["x", "y"]);
    (namespace, scope, any_selector(), any_rules(), any_rules(), external).prop_map(
        move |(namespace, scope, pods, ingress, egress, external)| Policy {
            reference: PolicyRef {
                kind: if external.is_some() {
                    PolicyKind::EgressPolicy
                } else {
                    PolicyKind::NetworkPolicy
                },
                namespace: namespace.into(),
                name: format!("p{slot}"),
            },
            scope,
            pods,
            ingress: ingress.filter(|_| external.is_none()),
            egress: egress.filter(|_| external.is_none()),
            external,
        },
    )
}

fn any_pod(slot: usize) -> impl Strategy<Value = PolicyPod> {
    let container_ports = prop::sample::subsequence(
        vec![named("web", TCP, 80), named("web", TCP, 81), named("dns", UDP, 80)],
        0..3,
    );
    let namespace = prop::sample::select(vec!["x", "y"]);
    (namespace, 0..3_u8, 0..3_u8, container_ports, 0..6_u8).prop_map(
        move |(namespace, a, b, ports, kind): (_, _, _, Vec<ContainerPort>, _)| {
            let present = [("a", a), ("b", b)].into_iter().filter(|(_, value)| *value > 0);
            let text: Vec<String> = present.map(|(key, value)| format!("{key}={value}")).collect();
            let text = text.join(" ");
            let networks: &[&str] = if kind % 2 == 0 {
                &["default", "net1"]
            } else {
                &["default"]
            };
            let number = u16::try_from(slot).unwrap() + 1;
            let mut pod = pod(&format!("{namespace}/p"), &text, number, networks);
            pod.sandbox = format!("slot-{slot}").parse().unwrap();
            pod.ports = ports;
            if kind == 5 {
                pod.interfaces
                    .iter_mut()
                    .for_each(|interface| interface.endpoint = None);
            }
            pod
        },
    )
}

fn any_namespaces() -> impl Strategy<Value = BTreeMap<String, Labels>> {
    let labels = prop::sample::select(vec!["", "a=1", "a=2 b=1"]);
    let listed = prop::collection::btree_map(prop::sample::select(vec!["x", "y"]), labels, 0..3);
    listed.prop_map(|listed| {
        listed
            .into_iter()
            .map(|(name, text)| (name.into(), self::labels(text)))
            .collect()
    })
}

pub(super) fn any_change() -> impl Strategy<Value = Change> {
    let pod = (0..5_usize).prop_flat_map(|slot| (Just(slot), prop::option::weighted(0.85, any_pod(slot))));
    let policy = (0..4_usize).prop_flat_map(|slot| (Just(slot), prop::option::weighted(0.7, any_policy(slot))));
    prop_oneof![
        4 => pod.prop_map(|(slot, pod)| Change::Pod(slot, pod)),
        4 => policy.prop_map(|(slot, policy)| Change::Policy(slot, policy)),
        1 => any_namespaces().prop_map(Change::Namespaces),
    ]
}

/// Batches of changes; the changes of a batch are applied one at a time. The first batch is large.
pub(super) fn any_history() -> impl Strategy<Value = Vec<Vec<Change>>> {
    let first = prop::collection::vec(any_change(), 8..20);
    let more = prop::collection::vec(prop::collection::vec(any_change(), 1..4), 1..5);
    (first, more).prop_map(|(first, more)| [vec![first], more].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tables_say_what_the_policies_say(history in any_history()) {
        let mut engine = PolicyEngine::new(PolicyTables::default());
        let (mut slots, mut before) = (Slots::default(), World::default());
        for batch in &history {
            for change in batch {
                slots.change(change);
            }
            let world = slots.world();
            apply_changes(&mut engine, &before, &world);
            converge(&mut engine);
            check(&engine, &world)?;
            before = world;
        }
        // A restarted agent with this input computes the same tables, regardless of the history.
        let mut again = PolicyEngine::new(engine.tables().clone());
        for pod in before.pods.iter().rev() {
            again.put_pod(pod.clone());
        }
        again.set_namespaces(before.namespaces.clone());
        again.set_policies(before.policies.iter().rev().cloned().collect());
        prop_assert_eq!(again.plan(), []);
        again.confirm();
        prop_assert_eq!(again.tables(), engine.tables());
        check(&again, &before)?;
        // Without policies no rows remain.
        engine.set_policies(Vec::<Policy>::new());
        converge(&mut engine);
        let tables = engine.tables();
        prop_assert!(tables.policy.is_empty() && tables.ports.is_empty() && tables.identities.is_empty());
        prop_assert!(tables.endpoints.values().all(|e| *e == kni_model::Enforcement::default()));
    }
}

#[test]
fn the_oracle_knows_an_isolated_pod() {
    let a = pod("x/a", "a=1", 1, &["default"]);
    let b = pod("x/b", "a=2", 2, &["default"]);
    let world = World {
        namespaces: BTreeMap::new(),
        policies: vec![super::world::ingress(
            "x/p",
            "a=1",
            &[super::world::rule(&[pods("a=2")], &[port(TCP, "80")])],
        )],
        pods: vec![a.clone(), b.clone()],
    };
    let other = Other {
        address: "10.0.0.2".parse().unwrap(),
        pod: Some(&b),
    };
    let decide = |pod: &PolicyPod, what| world.allows(PolicyDirection::Ingress, pod, &pod.interfaces[0], other, what);
    assert!(decide(&a, (TCP, 80)));
    assert!(!decide(&a, (TCP, 81)));
    assert!(!decide(&a, (SCTP, 80)));
    assert!(decide(&b, (TCP, 81)));
    assert_eq!(select("a=1").requirements.len(), 1);
    assert_eq!(a.interfaces[0].endpoint, Some(EndpointId(1)));
}
