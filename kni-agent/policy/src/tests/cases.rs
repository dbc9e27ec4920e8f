//! Checks the semantics of `NetworkPolicy` and `MultiNetworkPolicy` in a cluster of nine pods.

use kni_model::policy::{
    Labels, NamedNetwork, Operator, Policy, PolicyKind, PolicyPeer, PolicyScope, Requirement, Selector,
};

use super::world::{
    ICMP, NINE, SCTP, TCP, UDP, block, converge, egress, ingress, leaves, named, nine, nine_pod, passes, pod, pods,
    pods_of, policy, port, rule, select,
};
use crate::PolicyEngine;

/// Endpoint of a pod.
fn at(name: &str) -> u32 {
    u32::try_from(NINE.iter().position(|known| *known == name).unwrap()).unwrap() + 1
}

fn engine(policies: &[Policy]) -> PolicyEngine {
    let mut engine = nine();
    engine.set_policies(policies.to_vec());
    converge(&mut engine);
    engine
}

/// Compares all 81 pairs of pods with `expected`: exactly the pairs for which it returns `true` are allowed.
fn check(engine: &PolicyEngine, protocol: u8, port: u16, expected: impl Fn(&str, &str) -> bool) {
    for from in NINE {
        for to in NINE.into_iter().filter(|to| *to != from) {
            let passes = passes(engine, at(from), at(to), protocol, port);
            assert_eq!(passes, expected(from, to), "{from} -> {to} {protocol}/{port}");
        }
    }
}

fn namespace(pod: &str) -> &str {
    pod.split_once('/').unwrap().0
}

#[test]
fn without_policies_everything_passes() {
    let engine = engine(&[]);
    check(&engine, TCP, 80, |_, _| true);
    assert!(engine.tables().policy.is_empty());
}

#[test]
fn default_deny_ingress_isolates_one_direction() {
    let engine = engine(&[ingress("x/deny", "", &[])]);
    check(&engine, TCP, 80, |_, to| namespace(to) != "x");
    check(&engine, ICMP, 0, |_, to| namespace(to) != "x");
}

#[test]
fn default_deny_all_isolates_both() {
    let both = Policy {
        egress: Some(vec![]),
        ..ingress("x/deny", "", &[])
    };
    check(&engine(&[both]), TCP, 80, |from, to| {
        namespace(to) != "x" && namespace(from) != "x"
    });
}

#[test]
fn an_empty_rule_list_is_not_an_empty_rule() {
    check(&engine(&[ingress("x/p", "", &[rule(&[], &[])])]), SCTP, 81, |_, _| true);
    check(&engine(&[ingress("x/p", "", &[])]), SCTP, 81, |_, to| {
        namespace(to) != "x"
    });
}

#[test]
fn peers_by_pod_by_namespace_and_by_both() {
    type Allowed = fn(&str) -> bool;
    let cases: [(PolicyPeer, Allowed); 5] = [
        (pods("pod=b"), |from| from == "x/b"),
        (pods(""), |from| namespace(from) == "x"),
        (pods_of("ns=y", ""), |from| namespace(from) == "y"),
        (pods_of("ns=y", "pod=b"), |from| from == "y/b"),
        (pods_of("", ""), |_| true),
    ];
    for (peer, allowed) in cases {
        let engine = engine(&[ingress("x/p", "pod=a", &[rule(std::slice::from_ref(&peer), &[])])]);
        check(&engine, TCP, 80, |from, to| to != "x/a" || allowed(from));
    }
}

#[test]
fn match_expressions() {
    let not_in = |key: &str, values: &[&str]| Selector {
        requirements: vec![Requirement {
            key: key.into(),
            operator: Operator::NotIn(values.iter().map(|v| (*v).into()).collect()),
        }],
    };
    let peer = PolicyPeer::Pods {
        namespaces: Some(not_in("ns", &["x"])),
        pods: not_in("pod", &["a", "b"]),
    };
    let engine = engine(&[ingress("x/p", "pod=a", &[rule(&[peer], &[])])]);
    check(&engine, TCP, 80, |from, to| {
        to != "x/a" || from == "y/c" || from == "z/c"
    });
}

#[test]
fn peers_of_a_rule_are_alternatives() {
    let peers = [
        pods("pod=b"),
        pods_of("ns=y", "pod=c"),
        block("10.0.0.7/32"),
        block("fd00::7/128"),
    ];
    let engine = engine(&[ingress("x/p", "pod=a", &[rule(&peers, &[])])]);
    check(&engine, TCP, 80, |from, to| {
        to != "x/a" || ["x/b", "y/c", "z/a"].contains(&from)
    });
}

#[test]
fn the_label_of_the_namespaces_name_is_implied() {
    let peer = pods_of("kubernetes.io/metadata.name=y", "");
    let mut engine = engine(&[ingress("x/p", "", &[rule(&[peer], &[])])]);
    check(&engine, TCP, 80, |from, to| {
        namespace(to) != "x" || namespace(from) == "y"
    });
    // Also when the namespaces are not listed.
    engine.set_namespaces([].into());
    converge(&mut engine);
    check(&engine, TCP, 80, |from, to| {
        namespace(to) != "x" || namespace(from) == "y"
    });
}

#[test]
fn policies_are_a_union_in_any_order() {
    let stacked = [
        ingress("x/a", "pod=a", &[rule(&[pods("pod=b")], &[port(TCP, "80")])]),
        ingress("x/b", "pod=a", &[rule(&[pods_of("ns=y", "")], &[port(TCP, "81")])]),
        ingress("x/c", "", &[]),
    ];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let engine = engine(&order.map(|n| stacked[n].clone()));
        check(&engine, TCP, 80, |from, to| {
            namespace(to) != "x" || (to == "x/a" && from == "x/b")
        });
        check(&engine, TCP, 81, |from, to| {
            namespace(to) != "x" || (to == "x/a" && namespace(from) == "y")
        });
    }
}

#[test]
fn allow_all_takes_precedence_when_stacked() {
    let both = |name: &str, rules: &[_]| Policy {
        egress: Some(rules.to_vec()),
        ..ingress(name, "", rules)
    };
    let engine = engine(&[both("x/a", &[]), both("x/b", &[rule(&[], &[])])]);
    check(&engine, TCP, 80, |_, _| true);
}

#[test]
fn protocols_are_apart() {
    let only = |protocol| ingress("x/p", "", &[rule(&[], &[port(protocol, "*")])]);
    for (allowed, denied) in [(UDP, TCP), (SCTP, TCP), (TCP, SCTP), (TCP, ICMP)] {
        let engine = engine(&[only(allowed)]);
        check(&engine, allowed, 80, |_, _| true);
        check(&engine, denied, 80, |_, to| namespace(to) != "x");
    }
}

#[test]
fn port_ranges_are_closed() {
    let engine = engine(&[ingress(
        "x/p",
        "",
        &[rule(&[pods_of("", "")], &[port(TCP, "80-1023"), port(TCP, "8080")])],
    )]);
    for (number, open) in [
        (79, false),
        (80, true),
        (81, true),
        (1023, true),
        (1024, false),
        (8080, true),
        (8081, false),
    ] {
        check(&engine, TCP, number, |_, to| open || namespace(to) != "x");
    }
}

#[test]
fn named_ports_of_the_selected_pod() {
    let mut engine = engine(&[ingress(
        "x/p",
        "",
        &[rule(&[pods_of("ns=y", "")], &[port(TCP, "serve-81-tcp")])],
    )]);
    check(&engine, TCP, 81, |from, to| {
        namespace(to) != "x" || namespace(from) == "y"
    });
    check(&engine, TCP, 80, |_, to| namespace(to) != "x");
    check(&engine, UDP, 81, |_, to| namespace(to) != "x");
    // The same name may refer to another number in another pod.
    let mut other = nine_pod("x/a", at("x/a").try_into().unwrap());
    other.ports = vec![named("serve-81-tcp", TCP, 82), named("serve-81-tcp", UDP, 83)];
    engine.put_pod(other);
    converge(&mut engine);
    check(&engine, TCP, 81, |from, to| {
        namespace(to) != "x" || (to != "x/a" && namespace(from) == "y")
    });
    check(&engine, TCP, 82, |from, to| {
        namespace(to) != "x" || (to == "x/a" && namespace(from) == "y")
    });
    check(&engine, UDP, 83, |_, to| namespace(to) != "x");
}

#[test]
fn named_ports_of_egress_are_the_receivers() {
    let rules = [
        rule(&[], &[port(UDP, "serve-80-udp")]),
        rule(&[pods("")], &[port(TCP, "nobody-has-it")]),
    ];
    let mut engine = engine(&[egress("x/p", "", &rules)]);
    check(&engine, UDP, 80, |_, _| true);
    check(&engine, UDP, 81, |from, _| namespace(from) != "x");
    check(&engine, TCP, 80, |from, _| namespace(from) != "x");
    assert_eq!(
        leaves(&engine, 1, "192.0.2.1", UDP, 80),
        (false, true),
        "no pod, no names"
    );
    let mut moved = nine_pod("y/a", at("y/a").try_into().unwrap());
    moved.ports = vec![named("serve-80-udp", UDP, 5353)];
    engine.put_pod(moved);
    converge(&mut engine);
    check(&engine, UDP, 80, |from, to| namespace(from) != "x" || to != "y/a");
    check(&engine, UDP, 5353, |from, to| namespace(from) != "x" || to == "y/a");
}

#[test]
fn a_block_with_named_ports_is_about_pods_only() {
    let peers = [block("10.0.0.0/29"), block("fd00::/125")];
    let engine = engine(&[egress("x/p", "", &[rule(&peers, &[port(TCP, "serve-80-tcp")])])]);
    check(&engine, TCP, 80, |from, to| namespace(from) != "x" || at(to) < 8);
    assert!(!leaves(&engine, 1, "10.0.0.0", TCP, 80).0);
}

#[test]
fn blocks_overlap_and_except() {
    let peers = [
        block("10.0.0.0/8 10.0.0.0/29"),
        block("10.0.0.4/30"),
        block("fd00::/64 fd00::/125"),
        block("fd00::4/126"),
    ];
    let engine = engine(&[ingress("x/p", "pod=a", &[rule(&peers, &[])])]);
    // 1 to 3 are excluded; 4 to 7 are excluded too, but another block allows them; 8 and 9 were never excluded.
    check(&engine, TCP, 80, |from, to| to != "x/a" || at(from) >= 4);
}

#[test]
fn a_block_of_one_family_is_not_about_the_other() {
    for (all, inside, outside) in [
        ("0.0.0.0/0", "192.0.2.1", "2001:db8::1"),
        ("::/0", "2001:db8::1", "192.0.2.1"),
    ] {
        let engine = engine(&[egress("x/p", "", &[rule(&[block(all)], &[])])]);
        assert!(leaves(&engine, 1, inside, TCP, 80).0);
        assert!(!leaves(&engine, 1, outside, TCP, 80).0);
    }
}

#[test]
fn egress_to_a_block_except_a_part() {
    let engine = engine(&[egress(
        "x/p",
        "",
        &[rule(&[block("192.0.2.0/24 192.0.2.128/25")], &[port(TCP, "443")])],
    )]);
    assert!(leaves(&engine, 1, "192.0.2.1", TCP, 443).0);
    assert!(!leaves(&engine, 1, "192.0.2.1", TCP, 80).0);
    assert!(!leaves(&engine, 1, "192.0.2.129", TCP, 443).0);
    assert!(!leaves(&engine, 1, "198.51.100.1", TCP, 443).0);
    assert!(leaves(&engine, 4, "198.51.100.1", TCP, 443).0);
}

#[test]
fn a_policy_is_about_pods_of_its_own_namespace() {
    check(&engine(&[ingress("y/p", "pod=a", &[])]), TCP, 80, |_, to| to != "y/a");
}

#[test]
fn a_network_policy_is_about_the_first_interface_on_whatever_network() {
    let mut engine = engine(&[ingress("x/p", "", &[])]);
    assert!(passes(&engine, 102, 101, TCP, 80), "the second interface stays open");
    engine.put_pod(pod("x/d", "pod=d", 10, &["net1"]));
    converge(&mut engine);
    assert!(!passes(&engine, 102, 10, TCP, 80), "its first interface is on net1");
}

fn network_named(namespace: &str, name: &str) -> NamedNetwork {
    NamedNetwork {
        namespace: namespace.to_owned(),
        name: name.parse().unwrap(),
    }
}

#[test]
fn a_multi_network_policy_is_about_the_interfaces_of_its_definitions() {
    // Pod x/a has its second interface on net1, by definition x/storage.
    let with = |definition: Option<&str>, name: NamedNetwork| {
        let mut closed = ingress("x/p", "pod=a", &[]);
        closed.reference.kind = PolicyKind::MultiNetworkPolicy;
        closed.scope = PolicyScope::Named([name].into());
        let mut engine = engine(&[closed]);
        let mut changed = pod("x/a", "pod=a", 1, &["default", "net1"]);
        changed.interfaces[1].definition = definition.map(str::to_owned);
        engine.put_pod(changed);
        converge(&mut engine);
        [passes(&engine, 2, 1, TCP, 80), passes(&engine, 102, 101, TCP, 80)]
    };
    let by = Some("x/storage");
    assert_eq!(
        with(by, network_named("x", "storage")),
        [true, false],
        "the definition is listed"
    );
    assert_eq!(
        with(by, network_named("x", "net1")),
        [true, false],
        "the network is listed"
    );
    assert_eq!(
        with(by, network_named("y", "storage")),
        [true, true],
        "that of another namespace"
    );
    assert_eq!(
        with(by, network_named("x", "other")),
        [true, true],
        "another definition"
    );
    assert_eq!(
        with(None, network_named("x", "storage")),
        [true, true],
        "joined by the name of the network"
    );
}

#[test]
fn a_multi_network_policy_is_about_its_networks_and_peers_there() {
    let multi = |name: &str, network: &str| {
        let mut multi = ingress(name, "", &[rule(&[pods("pod=b")], &[])]);
        multi.reference.kind = PolicyKind::MultiNetworkPolicy;
        multi.scope = PolicyScope::Named([network_named("x", network)].into());
        multi
    };
    let mut engine = engine(&[multi("x/p", "net1")]);
    check(&engine, TCP, 80, |_, _| true);
    assert!(passes(&engine, 102, 101, TCP, 80));
    assert!(!passes(&engine, 103, 101, TCP, 80));
    // The same addresses in another network are other peers.
    engine.set_policies(vec![multi("x/p", "default")]);
    converge(&mut engine);
    check(&engine, TCP, 80, |from, to| namespace(to) != "x" || from == "x/b");
    assert!(passes(&engine, 103, 101, TCP, 80));
}

#[test]
fn changes_of_policies_pods_and_namespaces_take_effect() {
    let from_y = ingress("x/p", "pod=a", &[rule(&[pods_of("ns=y", "pod=b")], &[])]);
    let mut engine = engine(std::slice::from_ref(&from_y));
    check(&engine, TCP, 80, |from, to| to != "x/a" || from == "y/b");
    let mut relabelled = nine_pod("z/c", at("z/c").try_into().unwrap());
    relabelled.labels = super::world::labels("pod=b");
    engine.put_pod(relabelled);
    let namespaces = [("x", "ns=x"), ("y", "ns=other"), ("z", "ns=y")];
    engine.set_namespaces(
        namespaces
            .map(|(name, text)| (name.into(), super::world::labels(text)))
            .into(),
    );
    converge(&mut engine);
    check(&engine, TCP, 80, |from, to| {
        to != "x/a" || from == "z/b" || from == "z/c"
    });
    engine.set_policies(vec![Policy {
        pods: select("pod=c"),
        ..from_y
    }]);
    converge(&mut engine);
    check(&engine, TCP, 80, |from, to| {
        to != "x/c" || from == "z/b" || from == "z/c"
    });
    engine.set_policies(Vec::<Policy>::new());
    converge(&mut engine);
    check(&engine, TCP, 80, |_, _| true);
}

#[test]
fn a_policy_without_directions_does_nothing() {
    let engine = engine(&[policy("x/p", "")]);
    check(&engine, TCP, 80, |_, _| true);
    assert_eq!(engine.enforcement(kni_model::EndpointId(1)).unwrap().policy, 0);
}

#[test]
fn pods_on_other_nodes_are_peers() {
    let mut engine = engine(&[egress(
        "x/p",
        "",
        &[
            rule(&[pods_of("", "pod=far")], &[]),
            rule(&[block("10.0.0.0/28")], &[port(TCP, "80")]),
        ],
    )]);
    let mut far = pod("y/far", "pod=far", 10, &["default"]);
    far.interfaces
        .iter_mut()
        .for_each(|interface| interface.endpoint = None);
    engine.put_pod(far.clone());
    converge(&mut engine);
    assert!(leaves(&engine, 1, "10.0.0.10", UDP, 53).0);
    assert!(!leaves(&engine, 1, "10.0.0.11", UDP, 53).0);
    assert!(leaves(&engine, 1, "10.0.0.11", TCP, 80).0);
    assert!(leaves(&engine, 1, "fd00::a", UDP, 53).0);
    assert!(!leaves(&engine, 1, "fd00::b", TCP, 80).0);
    far.labels = Labels::new();
    engine.put_pod(far);
    converge(&mut engine);
    assert!(!leaves(&engine, 1, "10.0.0.10", UDP, 53).0);
    assert!(leaves(&engine, 1, "10.0.0.10", TCP, 80).0);
}
