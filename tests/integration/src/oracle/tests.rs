//! Tests of the oracle against the API's documentation, line by line.

use std::{collections::BTreeSet, net::IpAddr};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{Interface, Labels, NamedPort, Pod, Policy, Protocol, World, block, selector};

fn labels(text: &str) -> Labels {
    let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.into(), value.into())).collect()
}

/// Namespaces x and y (label `ns`), pods a and b in each (label `pod`), on two networks; `last` distinguishes pods.
fn world(policies: &[&str]) -> World {
    let mut world = World::default();
    for (n, namespace) in ["x", "y"].into_iter().enumerate() {
        world
            .namespaces
            .insert(namespace.into(), labels(&format!("ns={namespace}")));
        for (p, pod) in ["a", "b"].into_iter().enumerate() {
            let last = 10 * (n + 1) + p + 1;
            let interface = |network: &str, primary, v4: &str, v6: &str| Interface {
                network: network.into(),
                primary,
                addresses: vec![
                    format!("{v4}.{last}").parse().unwrap(),
                    format!("{v6}::{last}").parse().unwrap(),
                ],
            };
            world.pods.push(Pod {
                namespace: namespace.into(),
                name: pod.into(),
                labels: labels(&format!("pod={pod}")),
                // The same name has a different number in each pod.
                ports: vec![NamedPort {
                    name: "web".into(),
                    protocol: Protocol::Tcp,
                    port: if pod == "a" { 80 } else { 81 },
                }],
                interfaces: vec![
                    interface("default", true, "10.0.0", "fd00"),
                    interface("net1", false, "10.1.0", "fd01"),
                ],
            });
        }
    }
    world.policies = policies.iter().map(|text| policy(text)).collect();
    world
}

fn policy(spec: &str) -> Policy {
    let text = format!("metadata: {{namespace: x, name: p}}\nspec: {spec}");
    Policy {
        networks: None,
        object: serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}")),
    }
}

/// Evaluates `FROM TO PROTOCOL PORT`, with pods as `x/a` in a network, or addresses.
fn ask_on(world: &World, network: &str, v4: bool, question: &str) -> bool {
    let words: Vec<&str> = question.split_whitespace().collect();
    let address = |word: &str| -> IpAddr {
        let pod = world.pods.iter().find(|pod| pod.full_name() == word);
        let own = pod.and_then(|pod| pod.on(network)?.addresses.iter().find(|ip| ip.is_ipv4() == v4));
        own.copied().unwrap_or_else(|| word.parse().unwrap())
    };
    let protocol = match words[2] {
        "ICMP" => Protocol::Icmp,
        name => Protocol::TRANSPORTS.into_iter().find(|p| p.name() == name).unwrap(),
    };
    let (from, to) = (
        world.peer(network, address(words[0])),
        world.peer(network, address(words[1])),
    );
    world.allowed(from, to, protocol, words[3].parse().unwrap())
}

/// Policies in namespace x, then questions that are allowed (`+`) or denied (`-`).
#[track_caller]
fn check(policies: &[&str], questions: &[&str]) {
    let world = world(policies);
    for question in questions {
        let (sign, question) = question.split_at(1);
        for v4 in [true, false] {
            let allowed = ask_on(&world, "default", v4, question);
            assert_eq!(allowed, sign == "+", "{question}, IPv4 {v4}, {policies:?}");
        }
    }
}

#[test]
fn without_a_policy_everything_passes() {
    check(&[], &["+ y/a x/a TCP 80", "+ x/a y/a SCTP 7", "+ x/a y/b ICMP 0"]);
}

#[test]
fn a_selected_pod_is_isolated_in_the_policys_directions_only() {
    check(
        &["{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress]}"],
        &[
            "- y/a x/a TCP 80",
            "+ x/a y/a TCP 80",
            "+ y/a x/b TCP 80",
            "- y/a x/a ICMP 0",
        ],
    );
    check(
        &["{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress]}"],
        &["+ y/a x/a TCP 80", "- x/a y/a TCP 80", "+ x/b y/a TCP 80"],
    );
}

#[test]
fn policies_of_a_namespace_are_about_its_own_pods() {
    check(
        &["{podSelector: {}, policyTypes: [Ingress]}"],
        &["- y/a x/a TCP 80", "+ x/a y/a TCP 80"],
    );
}

#[test]
fn only_the_union_of_the_rules_passes_in_any_order() {
    let one = "{podSelector: {}, ingress: [{ports: [{port: 80}]}]}";
    let other = "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 81}]}]}";
    let deny = "{podSelector: {}, policyTypes: [Ingress]}";
    for order in [[one, other, deny], [deny, one, other], [other, deny, one]] {
        check(
            &order,
            &[
                "+ y/a x/a TCP 80",
                "+ y/a x/a TCP 81",
                "- y/a x/b TCP 81",
                "- y/a x/a TCP 82",
            ],
        );
    }
}

#[test]
fn absent_types_mean_ingress_and_egress_only_with_egress_rules() {
    check(&["{podSelector: {}}"], &["- y/a x/a TCP 80", "+ x/a y/a TCP 80"]);
    check(
        &["{podSelector: {}, egress: []}"],
        &["- y/a x/a TCP 80", "+ x/a y/a TCP 80"],
    );
    let egress = "{podSelector: {}, egress: [{ports: [{port: 80}]}]}";
    check(&[egress], &["- y/a x/a TCP 80", "+ x/a y/a TCP 80", "- x/a y/a TCP 81"]);
}

#[test]
fn no_peers_are_all_peers_and_no_rules_are_nobody() {
    for rule in ["[{}]", "[{from: []}]", "[{ports: []}]"] {
        let policy = format!("{{podSelector: {{}}, ingress: {rule}}}");
        check(&[&policy], &["+ y/a x/a TCP 80", "+ y/b x/b ICMP 0"]);
        assert!(ask_on(&world(&[&policy]), "default", true, "192.0.2.1 x/a UDP 9"));
    }
    check(&["{podSelector: {}, ingress: []}"], &["- y/a x/a TCP 80"]);
    check(
        &["{podSelector: {}, policyTypes: [Egress], egress: []}"],
        &["- x/a y/a TCP 80"],
    );
}

#[test]
fn an_absent_selector_is_not_an_empty_one() {
    let ingress = |from: &str| format!("{{podSelector: {{}}, ingress: [{{from: [{from}]}}]}}");
    check(
        &[&ingress("{podSelector: {}}")],
        &["+ x/b x/a TCP 80", "- y/a x/a TCP 80"],
    );
    check(
        &[&ingress("{namespaceSelector: {}}")],
        &["+ x/b x/a TCP 80", "+ y/a x/a TCP 80"],
    );
    let both = ingress("{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {matchLabels: {ns: y}}}");
    check(&[&both], &["+ y/b x/a TCP 80", "- y/a x/a TCP 80", "- x/b x/a TCP 80"]);
    let either = ingress("{podSelector: {matchLabels: {pod: b}}}, {namespaceSelector: {matchLabels: {ns: y}}}");
    check(
        &[&either],
        &["+ y/b x/a TCP 80", "+ y/a x/a TCP 80", "+ x/b x/a TCP 80"],
    );
    let world = world(&[&ingress("{namespaceSelector: {}}")]);
    assert!(!ask_on(&world, "default", true, "192.0.2.1 x/a TCP 80"));
}

#[test]
fn the_namespaces_name_is_a_label() {
    let from = "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: y}}}";
    let policy = format!("{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{from}]}}]}}");
    check(&[&policy], &["+ y/a x/a TCP 80", "- x/b x/a TCP 80"]);
}

#[test]
fn every_operator_selects_as_the_api_says() {
    let one = "key: pod, operator:";
    let table = [
        ("In, values: [a, b]", "pod=b", true),
        ("In, values: [a, b]", "pod=c", false),
        ("In, values: [a, b]", "", false),
        ("NotIn, values: [a, b]", "pod=c", true),
        ("NotIn, values: [a, b]", "pod=a", false),
        // A missing label has none of the values.
        ("NotIn, values: [a, b]", "", true),
        ("Exists", "pod=", true),
        ("Exists", "tier=a", false),
        ("DoesNotExist", "tier=a", true),
        ("DoesNotExist", "pod=a", false),
    ];
    for (operator, of, expected) in table {
        selects(&format!("{{matchExpressions: [{{{one} {operator}}}]}}"), of, expected);
    }
}

#[test]
fn a_selector_asks_for_all_of_its_requirements() {
    let both = "{matchLabels: {pod: a}, matchExpressions: [{key: tier, operator: Exists}]}";
    let two = "{matchExpressions: [{key: a, operator: Exists}, {key: b, operator: DoesNotExist}]}";
    for (text, of, expected) in [
        ("{}", "pod=a", true),
        ("{}", "", true),
        ("{matchLabels: {pod: a}}", "pod=a", true),
        ("{matchLabels: {pod: a, tier: web}}", "pod=a", false),
        (both, "pod=a", false),
        (both, "pod=a tier=web", true),
        (two, "a=1 b=1", false),
        (two, "a=1", true),
    ] {
        selects(text, of, expected);
    }
}

#[track_caller]
fn selects(text: &str, of: &str, expected: bool) {
    let parsed: LabelSelector = serde_saphyr::from_str(text).unwrap();
    assert_eq!(selector::matches(&parsed, &labels(of)), expected, "{text} of {of:?}");
}

#[test]
fn blocks_match_addresses_less_their_excepts() {
    let table = [
        ("{cidr: 10.0.0.0/24}", "10.0.0.255", true),
        ("{cidr: 10.0.0.0/24}", "10.0.1.0", false),
        ("{cidr: 10.0.0.0/24, except: [10.0.0.128/25]}", "10.0.0.127", true),
        ("{cidr: 10.0.0.0/24, except: [10.0.0.128/25]}", "10.0.0.128", false),
        ("{cidr: 10.0.0.7/32}", "10.0.0.7", true),
        ("{cidr: 10.0.0.7/32}", "10.0.0.6", false),
        ("{cidr: 0.0.0.0/0}", "203.0.113.9", true),
        // A block never matches the other family, however wide it is.
        ("{cidr: 0.0.0.0/0}", "fd00::1", false),
        ("{cidr: '::/0'}", "10.0.0.1", false),
        ("{cidr: '::/0', except: ['fd00::/16']}", "fd00::1", false),
        ("{cidr: '::/0', except: ['fd00::/16']}", "fd01::1", true),
        // Addresses are compared as values, not as text.
        ("{cidr: 'FD00:0:0::0/64'}", "fd00::9", true),
    ];
    for (text, address, expected) in table {
        let parsed = serde_saphyr::from_str(text).unwrap();
        assert_eq!(
            block::contains(&parsed, address.parse().unwrap()),
            expected,
            "{address} in {text}"
        );
    }
}

#[test]
fn overlapping_blocks_are_a_union() {
    let from = "{ipBlock: {cidr: 10.0.0.0/24, except: [10.0.0.21/32]}}, {ipBlock: {cidr: 10.0.0.16/28}}";
    let world = world(&[&format!("{{podSelector: {{}}, ingress: [{{from: [{from}]}}]}}")]);
    // x/a is .11, y/a is .21: one block excepts it, the other one allows it.
    assert!(ask_on(&world, "default", true, "y/a x/a TCP 80"));
    assert!(ask_on(&world, "default", true, "x/b x/a TCP 80"));
    assert!(!ask_on(&world, "default", true, "10.0.1.9 x/a TCP 80"));
    assert!(!ask_on(&world, "default", false, "y/a x/a TCP 80"));
}

#[test]
fn ports_are_of_a_protocol_tcp_unless_said() {
    let ingress = |ports: &str| format!("{{podSelector: {{}}, ingress: [{{ports: [{ports}]}}]}}");
    check(
        &[&ingress("{port: 80}")],
        &["+ y/a x/a TCP 80", "- y/a x/a UDP 80", "- y/a x/a ICMP 0"],
    );
    check(
        &[&ingress("{protocol: SCTP, port: 80}")],
        &["+ y/a x/a SCTP 80", "- y/a x/a TCP 80"],
    );
    check(
        &[&ingress("{protocol: UDP}")],
        &["+ y/a x/a UDP 1", "+ y/a x/a UDP 65535", "- y/a x/a TCP 1"],
    );
    check(&[&ingress("{}")], &["+ y/a x/a TCP 9", "- y/a x/a UDP 9"]);
    check(
        &[&ingress("{port: 80, endPort: 82}")],
        &[
            "- y/a x/a TCP 79",
            "+ y/a x/a TCP 80",
            "+ y/a x/a TCP 82",
            "- y/a x/a TCP 83",
        ],
    );
}

#[test]
fn a_named_port_is_the_receivers_own_and_of_its_protocol() {
    let ingress = "{podSelector: {}, ingress: [{ports: [{port: web}]}]}";
    check(
        &[ingress],
        &[
            "+ y/a x/a TCP 80",
            "- y/a x/a TCP 81",
            "- y/a x/b TCP 80",
            "+ y/a x/b TCP 81",
        ],
    );
    let egress = "{podSelector: {}, egress: [{ports: [{port: web}]}], policyTypes: [Egress]}";
    check(
        &[egress],
        &[
            "+ x/a y/a TCP 80",
            "- x/a y/a TCP 81",
            "- x/a y/b TCP 80",
            "+ x/a y/b TCP 81",
        ],
    );
    check(
        &["{podSelector: {}, ingress: [{ports: [{port: web, protocol: UDP}]}]}"],
        &["- y/a x/a UDP 80"],
    );
    check(
        &["{podSelector: {}, ingress: [{ports: [{port: other}]}]}"],
        &["- y/a x/a TCP 80"],
    );
    let world = world(&[egress]);
    assert!(!ask_on(&world, "default", true, "x/a 192.0.2.1 TCP 80"));
}

#[test]
fn a_pod_reaches_itself_and_the_node_reaches_its_pods() {
    let all = "{podSelector: {}, policyTypes: [Ingress, Egress]}";
    check(&[all], &["+ x/a x/a TCP 80", "- x/b x/a TCP 80"]);
    let world = world(&[all]);
    let (node, pod) = (
        super::Peer::Node("10.0.0.1".parse().unwrap()),
        world.peer("default", "10.0.0.11".parse().unwrap()),
    );
    assert!(world.allowed(node, pod, Protocol::Tcp, 80));
    assert!(!world.allowed(pod, node, Protocol::Tcp, 80));
}

#[test]
fn a_networks_policy_is_about_its_interfaces_only() {
    let mut deny = policy("{podSelector: {}, policyTypes: [Ingress]}");
    let mut world = world(&[]);
    world.policies.push(deny.clone());
    assert!(!ask_on(&world, "default", true, "y/a x/a TCP 80"));
    assert!(ask_on(&world, "net1", true, "y/a x/a TCP 80"));
    deny.networks = Some(BTreeSet::from(["net1".into()]));
    world.policies = vec![deny];
    assert!(ask_on(&world, "default", true, "y/a x/a TCP 80"));
    assert!(!ask_on(&world, "net1", true, "y/a x/a TCP 80"));
}
