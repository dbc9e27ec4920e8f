//! Checks that a namespace whose policies need too many rows is enforced without rules, and that others are not
//! affected.

use kni_model::{
    EndpointId, PolicyTables,
    policy::{ContainerPort, Policy, PolicyDirection, PolicyPort, PolicyScope},
};
use proptest::prelude::*;

use super::{
    egress::{allow, deny, egress_policy},
    oracle::World,
    random::{Slots, any_history, apply_changes},
    world::{
        TCP, UDP, apply, block, converge, egress, external_identity, ingress, named, pod, pods, pods_of, port, rule,
    },
};
use crate::{Overrun, PolicyEngine, PolicyTable, Quota, evaluate};

const CAPACITY: usize = 1024;
const SHARE: usize = 128;

/// A policy about `count` different ranges, the first of which is `10.FIRST.0.0/24`. The pods of the test are in
/// `10.0.0.0/24`.
fn ranges(name: &str, first: usize, count: usize) -> Policy {
    let peers: Vec<_> = (0..count)
        .map(|n| block(&format!("10.{}.{}.0/24", first + n / 256, n % 256)))
        .collect();
    ingress(name, "", &[rule(&peers, &[]), rule(&[pods("")], &[port(TCP, "80")])])
}

/// A pod in each of the namespaces, with endpoints from 1 on.
fn engine(namespaces: &[&str]) -> PolicyEngine {
    let quota = Quota {
        capacity: CAPACITY,
        share: SHARE,
    };
    let mut engine = PolicyEngine::new(PolicyTables::default()).with_quota(quota);
    for (namespace, number) in namespaces.iter().zip(1..) {
        engine.put_pod(pod(&format!("{namespace}/a"), "pod=a", number, &["default"]));
    }
    engine
}

fn closed(engine: &PolicyEngine) -> Vec<(String, PolicyTable, Option<usize>)> {
    let about = |overrun: &Overrun| (overrun.namespace.clone(), overrun.table, overrun.share);
    engine.overruns().map(about).collect()
}

/// Whether the endpoint accepts a packet of a range at this address.
fn accepts(engine: &PolicyEngine, endpoint: u32, address: &str) -> bool {
    let tables = engine.tables();
    let set = tables.endpoints[&EndpointId(endpoint)].policy;
    let identity = external_identity(tables, 1, address.parse().unwrap());
    evaluate(tables, set, PolicyDirection::Ingress, identity, TCP, 81).0
}

fn fits(engine: &PolicyEngine) {
    let tables = engine.tables();
    for rows in [tables.policy.len(), tables.ports.len(), tables.identities.len()] {
        assert!(rows <= CAPACITY, "{rows} rows");
    }
}

#[test]
fn a_namespace_beyond_its_share_allows_nothing_and_others_are_unaffected() {
    let mut engine = engine(&["hog", "x"]);
    engine.set_policies(vec![ranges("hog/p", 1, SHARE + 1), ranges("x/p", 50, SHARE - 10)]);
    converge(&mut engine);
    let told: Vec<String> = engine.overruns().map(ToString::to_string).collect();
    assert_eq!(
        told,
        [
            "namespace hog: its policies need 129 rows of table IDENTITIES, and a namespace may have 128 \
          (--max-policy-rows-per-namespace); the largest is NetworkPolicy hog/p with 130 peers; until they have \
          fewer, they allow nothing to the pods that they select"
        ]
    );
    assert!(!accepts(&engine, 1, "10.1.0.1") && accepts(&engine, 2, "10.50.0.1"));
    // A direction in which no policy isolates stays open, and the pod is still isolated by name.
    let set = engine.tables().endpoints[&EndpointId(1)].policy;
    assert!(evaluate(engine.tables(), set, PolicyDirection::Egress, 0, TCP, 80).0);
    assert_eq!(engine.isolating(set, PolicyDirection::Ingress).len(), 1);
    assert!(engine.effective(EndpointId(1)).iter().all(|rule| rule.rule.is_none()));
    // Its pods come and go, closed, and so does the quota.
    engine.put_pod(pod("hog/b", "pod=b", 3, &["default"]));
    converge(&mut engine);
    assert!(!accepts(&engine, 3, "10.1.0.1"));
    engine.set_policies(vec![ranges("hog/p", 1, 10), ranges("x/p", 50, SHARE - 10)]);
    converge(&mut engine);
    assert!(closed(&engine).is_empty() && accepts(&engine, 1, "10.1.0.1") && accepts(&engine, 3, "10.1.0.1"));
}

#[test]
fn an_egress_policy_beyond_the_share_denies_also_what_it_allows_by_default() {
    let mut engine = engine(&["hog"]);
    let rules = (0..=SHARE).map(|n| deny(&[&format!("10.1.{n}.0/24")], &[]));
    let mut policy = egress_policy("hog/p", &rules.collect::<Vec<_>>(), true);
    engine.set_policies(vec![policy.clone()]);
    converge(&mut engine);
    let allows = |engine: &PolicyEngine| {
        let set = engine.tables().endpoints[&EndpointId(1)].policy;
        evaluate(engine.tables(), set, PolicyDirection::External, 0, TCP, 80).0
    };
    assert_eq!(closed(&engine).len(), 1);
    assert!(!allows(&engine));
    policy.external = policy.external.map(|mut external| {
        external.rules.truncate(1);
        external
    });
    engine.set_policies(vec![policy]);
    converge(&mut engine);
    assert!(closed(&engine).is_empty() && allows(&engine));
}

#[test]
fn rows_in_the_sets_of_others_count_for_the_namespace_that_divides_their_ranges() {
    // Each victim has one rule about everything, which every range of the hog divides.
    let victims: Vec<String> = (0..20).map(|n| format!("v{n}")).collect();
    let mut names: Vec<&str> = vec!["hog"];
    names.extend(victims.iter().map(String::as_str));
    let mut engine = engine(&names);
    let mut policies: Vec<Policy> = victims
        .iter()
        .map(|name| {
            egress(
                &format!("{name}/p"),
                "",
                &[rule(&[block("0.0.0.0/0")], &[port(TCP, "443")])],
            )
        })
        .collect();
    policies.push(ranges("hog/p", 1, SHARE - 20));
    engine.set_policies(policies);
    converge(&mut engine);
    assert_eq!(closed(&engine), [("hog".to_owned(), PolicyTable::Policy, None)]);
    fits(&engine);
}

#[test]
fn when_all_shares_together_do_not_fit_the_largest_closes() {
    let names: Vec<String> = (0..12).map(|n| format!("n{n:02}")).collect();
    let list: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut engine = engine(&list);
    let policies = |sizes: &dyn Fn(usize) -> usize| -> Vec<Policy> {
        let all = names.iter().enumerate();
        all.map(|(n, name)| ranges(&format!("{name}/p"), 20 + n, sizes(n)))
            .collect()
    };
    engine.set_policies(policies(&|n| 80 + n));
    converge(&mut engine);
    let largest: Vec<String> = closed(&engine).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(largest, ["n10", "n11"]);
    fits(&engine);
    // A pod of another namespace changes nothing.
    engine.put_pod(pod("x/a", "pod=a", 90, &["default"]));
    converge(&mut engine);
    assert_eq!(closed(&engine).len(), 2);
    // There is room again.
    engine.set_policies(policies(&|n| if n < 5 { 1 } else { 80 + n }));
    converge(&mut engine);
    assert!(closed(&engine).is_empty(), "{:?}", closed(&engine));
    fits(&engine);
}

#[test]
fn a_change_of_everything_never_needs_more_rows_than_there_are() {
    let names: Vec<String> = (0..7).map(|n| format!("n{n}")).collect();
    let list: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut engine = engine(&list);
    for round in 0..3 {
        let all = names.iter().enumerate();
        let policies = all.map(|(n, name)| ranges(&format!("{name}/p"), 20 + 10 * round + n, SHARE - 8));
        engine.set_policies(policies.collect());
        let mut rows = engine.tables().clone();
        let mut plans = 0;
        loop {
            for step in &engine.plan() {
                apply(&mut rows, step);
                for count in [rows.policy.len(), rows.ports.len(), rows.identities.len()] {
                    assert!(count <= CAPACITY, "{count} rows in round {round}");
                }
            }
            engine.confirm();
            plans += 1;
            if !engine.has_postponed() {
                break;
            }
        }
        assert!(plans < 12, "{plans} plans");
        assert!(closed(&engine).is_empty());
        for (number, n) in (1..).zip(0..names.len()) {
            assert!(accepts(&engine, number, &format!("10.{}.0.1", 20 + 10 * round + n)));
        }
    }
}

#[test]
fn peers_by_labels_count_as_they_are_compiled() {
    let mut engine = engine(&["hog", "x"]);
    for number in 10..60 {
        engine.put_pod(pod(
            &format!("peer/p{number}"),
            &format!("n={number}"),
            number,
            &["default"],
        ));
    }
    let by_label = |namespace: &str| -> Vec<Policy> {
        let numbers = 10..60;
        numbers
            .map(|n| {
                let peers = [pods_of("", &format!("n={n}"))];
                let rules = [rule(&peers, &[port(TCP, &n.to_string())])];
                ingress(&format!("{namespace}/in{n}"), "", &rules)
            })
            .collect()
    };
    engine.set_policies(by_label("hog"));
    converge(&mut engine);
    assert!(closed(&engine).is_empty(), "{:?}", closed(&engine));
    let mut both = by_label("hog");
    for n in 10..60 {
        let rules = [rule(&[pods_of("", &format!("n={n}"))], &[])];
        both.push(egress(&format!("hog/out{n}"), "", &rules));
        // Another set for another pod of the namespace.
        let rules = [rule(&[pods_of("", &format!("n={n}"))], &[port(TCP, "1-4000")])];
        both.push(ingress(&format!("hog/other{n}"), "pod=b", &rules));
    }
    engine.put_pod(pod("hog/b", "pod=b", 3, &["default"]));
    engine.set_policies(both);
    converge(&mut engine);
    let found = closed(&engine);
    assert!(
        matches!(&found[..], [(name, _, Some(SHARE))] if name == "hog"),
        "{found:?}"
    );
}

/// The rows that these policies need without a quota, and what is closed if this is the share of a namespace.
fn closed_at_their_own_rows(policies: &[Policy], ports: &[ContainerPort]) -> (usize, Vec<Overrun>) {
    let scoped = policies.iter().map(|policy| Policy {
        scope: PolicyScope::All,
        ..policy.clone()
    });
    let policies: Vec<Policy> = scoped.collect();
    let converged = |share: Option<usize>| {
        let capacity = usize::MAX;
        let quota = share.map_or_else(Quota::default, |share| Quota { capacity, share });
        let mut engine = PolicyEngine::new(PolicyTables::default()).with_quota(quota);
        // Two sets in two networks.
        for (number, ports) in [(1, &[][..]), (2, ports)] {
            let mut pod = pod(&format!("x/p{number}"), "pod=a", number, &["default", "net1"]);
            pod.ports = ports.to_vec();
            engine.put_pod(pod);
        }
        engine.set_policies(policies.clone());
        converge(&mut engine);
        engine
    };
    let unlimited = converged(None);
    let tables = unlimited.tables();
    let rows = tables.policy.len().max(tables.ports.len()).max(tables.identities.len());
    (rows, converged(Some(rows)).overruns().cloned().collect())
}

fn with_ranges_without_rows() -> [(&'static str, Policy); 8] {
    let by_name = [port(TCP, "web")];
    let any = |text: &[&str], ports: &[PolicyPort]| {
        let peers: Vec<_> = text.iter().map(|text| block(text)).collect();
        rule(&peers, ports)
    };
    [
        (
            "a range without addresses",
            egress_policy("x/p", &[deny(&["10.0.0.0/8 10.0.0.0/8"], &[])], false),
        ),
        (
            "an exception of an exception",
            ingress(
                "x/p",
                "",
                &[any(&["10.0.0.0/8 10.0.0.0/16 10.0.1.0/24 10.0.2.0/24"], &[])],
            ),
        ),
        (
            "exceptions around and in the IPv4-mapped range",
            ingress("x/p", "", &[any(&["::/0 ::ffff:0:0/90 ::ffff:10.0.0.0/104"], &[])]),
        ),
        (
            "the same range several times",
            ingress(
                "x/p",
                "",
                &[any(
                    &["10.0.0.0/8", "10.0.0.0/8 192.0.2.0/24", "10.0.0.0/8 10.0.0.0/8"],
                    &[],
                )],
            ),
        ),
        (
            "a port by name that one pod does not have",
            ingress("x/p", "", &[any(&["10.0.0.0/8", "192.0.2.0/24"], &by_name)]),
        ),
        (
            "a port by name of a range",
            egress("x/p", "", &[any(&["10.0.0.0/8", "192.0.2.0/24"], &by_name)]),
        ),
        (
            "ports beside a rule that allows everything",
            ingress(
                "x/p",
                "",
                &[rule(&[], &[]), any(&["10.0.0.0/8", "192.0.2.0/24"], &[port(TCP, "80")])],
            ),
        ),
        (
            "rules of an egress policy after one that decides everything",
            egress_policy(
                "x/p",
                &[deny(&[], &[]), deny(&["10.0.0.0/8", "192.0.2.0/24"], &[])],
                false,
            ),
        ),
    ]
}

#[test]
fn ranges_without_rows_of_their_own_do_not_count() {
    for (what, policy) in with_ranges_without_rows() {
        // The other one makes two sets of it for these pods.
        let other = ingress("x/q", "", &[rule(&[], &[port(UDP, "dns")])]);
        for policies in [vec![policy.clone()], vec![policy, other]] {
            let ports = [named("web", TCP, 80), named("dns", UDP, 53)];
            let (rows, overruns) = closed_at_their_own_rows(&policies, &ports);
            assert_eq!(overruns, [], "{what}, {rows} rows");
        }
    }
}

/// An egress policy that denies hides what another one allows.
#[test]
fn ranges_that_another_egress_policy_denies_do_not_count() {
    let ranges = ["10.0.0.0/8", "192.0.2.0/24"];
    let one = egress_policy("x/a", &[deny(&[], &[])], false);
    let other = egress_policy("x/b", &[allow(&ranges, &[])], false);
    let (rows, overruns) = closed_at_their_own_rows(&[one, other], &[]);
    assert_eq!(overruns, [], "{rows} rows");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The estimate before the compilation never exceeds what is compiled.
    #[test]
    fn a_share_of_all_rows_closes_nobody(history in any_history()) {
        let mut slots = Slots::default();
        for batch in &history {
            for change in batch {
                slots.change(change);
            }
            let world = slots.world();
            let run = |quota: Quota| {
                let mut engine = PolicyEngine::new(PolicyTables::default()).with_quota(quota);
                apply_changes(&mut engine, &World::default(), &world);
                engine.plan();
                engine.confirm();
                engine
            };
            let unlimited = run(Quota::default());
            let tables = unlimited.tables();
            let share = tables.policy.len().max(tables.ports.len()).max(tables.identities.len());
            let limited = run(Quota { capacity: usize::MAX, share });
            let closed: Vec<Overrun> = limited.overruns().cloned().collect();
            prop_assert_eq!(closed, vec![]);
            prop_assert_eq!(limited.tables(), tables);
        }
    }
}
