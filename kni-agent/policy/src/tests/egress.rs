//! Checks egress policies: ordered rules, several policies at once, and source addresses.

use kni_model::{
    EndpointId,
    policy::{ExternalRule, ExternalRules, Policy, PolicyDirection, PolicyKind, PolicyPeer, PolicyPort, PolicyScope},
};

use super::world::{ICMP, TCP, UDP, block, converge, egress, leaves, nine, policy, port, rule};
use crate::{PolicyEngine, evaluate};

pub(super) fn allow(to: &[&str], ports: &[PolicyPort]) -> ExternalRule {
    let to: Vec<PolicyPeer> = to.iter().map(|text| block(text)).collect();
    ExternalRule {
        allow: true,
        to,
        ports: ports.to_vec(),
    }
}

pub(super) fn deny(to: &[&str], ports: &[PolicyPort]) -> ExternalRule {
    ExternalRule {
        allow: false,
        ..allow(to, ports)
    }
}

pub(super) fn egress_policy(name: &str, rules: &[ExternalRule], otherwise_allow: bool) -> Policy {
    let mut found = policy(name, "pod=a");
    found.reference.kind = PolicyKind::EgressPolicy;
    found.scope = PolicyScope::All;
    found.external = Some(ExternalRules {
        rules: rules.to_vec(),
        otherwise_allow,
        egress_addresses: Vec::new(),
    });
    found
}

fn engine(policies: &[Policy]) -> PolicyEngine {
    let mut engine = nine();
    engine.set_policies(policies.to_vec());
    converge(&mut engine);
    engine
}

/// Whether endpoint 1 may send to this external address, and the rule that decided.
fn ask(engine: &PolicyEngine, to: &str, protocol: u8, port: u16) -> (bool, Option<String>) {
    let tables = engine.tables();
    let set = tables.endpoints[&EndpointId(1)].policy;
    let identity = super::world::external_identity(tables, 1, to.parse().unwrap());
    let (allowed, trail) = evaluate(tables, set, PolicyDirection::External, identity, protocol, port);
    let rule = engine.rule(trail.set, PolicyDirection::External, trail.rule, trail.ordinal);
    (allowed, rule.map(|rule| rule.to_string()))
}

#[test]
fn without_an_egress_policy_nothing_is_restricted() {
    let engine = engine(&[egress("x/p", "", &[rule(&[], &[])])]);
    assert_eq!(leaves(&engine, 1, "192.0.2.1", TCP, 80), (true, true));
    assert_eq!(ask(&engine, "192.0.2.1", TCP, 80), (true, None));
}

#[test]
fn the_first_matching_rule_decides() {
    let rules = [
        deny(&["192.0.2.0/24 192.0.2.9/32"], &[port(TCP, "80-89")]),
        allow(&["192.0.2.0/24"], &[port(TCP, "*"), port(UDP, "53")]),
        deny(&[], &[port(UDP, "*")]),
        allow(&["0.0.0.0/0"], &[]),
    ];
    let engine = engine(&[egress_policy("x/e", &rules, false)]);
    let rule = |index: u32| Some(format!("EgressPolicy x/e rules[{index}]"));
    for (to, protocol, port, allowed, by) in [
        ("192.0.2.1", TCP, 80, false, rule(0)),
        ("192.0.2.1", TCP, 89, false, rule(0)),
        ("192.0.2.1", TCP, 79, true, rule(1)),
        ("192.0.2.1", TCP, 90, true, rule(1)),
        ("192.0.2.9", TCP, 80, true, rule(1)),
        ("192.0.2.1", UDP, 53, true, rule(1)),
        ("192.0.2.1", UDP, 54, false, rule(2)),
        ("198.51.100.1", UDP, 53, false, rule(2)),
        ("198.51.100.1", TCP, 80, true, rule(3)),
        ("198.51.100.1", ICMP, 0, true, rule(3)),
        ("2001:db8::1", UDP, 53, false, rule(2)),
        ("2001:db8::1", TCP, 80, false, None),
    ] {
        assert_eq!(
            ask(&engine, to, protocol, port),
            (allowed, by),
            "{to} {protocol}/{port}"
        );
    }
    assert_eq!(leaves(&engine, 2, "192.0.2.1", TCP, 80), (true, true), "another pod");
}

#[test]
fn a_denial_of_any_policy_denies() {
    let first = egress_policy("x/a", &[allow(&["192.0.2.0/24"], &[port(TCP, "443")])], false);
    let second = egress_policy("x/b", &[deny(&["192.0.2.7/32"], &[])], true);
    let engine = engine(&[first, second]);
    assert_eq!(
        ask(&engine, "192.0.2.1", TCP, 443),
        (true, Some("EgressPolicy x/a rules[0]".into()))
    );
    assert_eq!(
        ask(&engine, "192.0.2.7", TCP, 443),
        (false, Some("EgressPolicy x/b rules[0]".into()))
    );
    assert_eq!(ask(&engine, "192.0.2.1", TCP, 80), (false, None));
    assert_eq!(ask(&engine, "198.51.100.1", TCP, 443), (false, None));
    let set = engine.enforcement(EndpointId(1)).unwrap().policy;
    let isolating = engine.isolating(set, PolicyDirection::External);
    assert_eq!(
        isolating.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["EgressPolicy x/a"]
    );
}

#[test]
fn what_is_allowed_otherwise_has_a_name() {
    let engine = engine(&[egress_policy(
        "x/e",
        &[deny(&["192.0.2.0/24"], &[port(TCP, "25")])],
        true,
    )]);
    let otherwise = Some("EgressPolicy x/e rules[1]".to_owned());
    assert_eq!(ask(&engine, "192.0.2.1", TCP, 26), (true, otherwise.clone()));
    assert_eq!(ask(&engine, "198.51.100.1", TCP, 25), (true, otherwise));
    assert_eq!(
        ask(&engine, "192.0.2.1", TCP, 25).1,
        Some("EgressPolicy x/e rules[0]".into())
    );
}

#[test]
fn a_default_denial_inside_a_rules_denial_is_still_a_denial() {
    // Policy b denies everything; the default of a denies TCP 443.
    let a = egress_policy("x/a", &[allow(&[], &[port(TCP, "80")])], false);
    let b = egress_policy(
        "x/b",
        &[allow(&[], &[port(TCP, "443"), port(TCP, "80")]), deny(&[], &[])],
        true,
    );
    let engine = engine(&[a, b]);
    assert_eq!(
        ask(&engine, "192.0.2.1", TCP, 80),
        (true, Some("EgressPolicy x/a rules[0]".into()))
    );
    assert_eq!(
        ask(&engine, "192.0.2.1", TCP, 443),
        (false, Some("EgressPolicy x/a rules[1]".into()))
    );
    assert_eq!(
        ask(&engine, "192.0.2.1", TCP, 22),
        (false, Some("EgressPolicy x/b rules[1]".into()))
    );
}

#[test]
fn source_addresses_are_those_of_the_first_policy_of_each_family() {
    let with = |name: &str, addresses: &[&str]| {
        let mut policy = egress_policy(name, &[], true);
        policy.external.as_mut().unwrap().egress_addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
        policy
    };
    let engine = engine(&[
        with("x/c", &["192.0.2.3", "2001:db8::3"]),
        with("x/a", &[]),
        with("x/b", &["192.0.2.2"]),
    ]);
    let found = |endpoint| {
        let found = engine.egress_addresses(EndpointId(endpoint));
        found
            .iter()
            .map(|(address, policy)| format!("{address} of {policy}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        found(1),
        ["192.0.2.2 of EgressPolicy x/b", "2001:db8::3 of EgressPolicy x/c"]
    );
    assert!(found(2).is_empty());
}
