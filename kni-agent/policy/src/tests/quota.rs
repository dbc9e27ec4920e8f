//! Checks that a namespace whose policies need too many rows is enforced without rules, and that others are not
//! affected.

use kni_model::{
    EndpointId, PolicyTables,
    policy::{Policy, PolicyDirection},
};

use super::{
    egress::{deny, egress_policy},
    world::{TCP, apply, block, converge, egress, external_identity, ingress, pod, pods, pods_of, port, rule},
};
use crate::{Overrun, PolicyEngine, PolicyTable, Quota, judge};

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
    judge(tables, set, PolicyDirection::Ingress, identity, TCP, 81).0
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
    assert!(judge(engine.tables(), set, PolicyDirection::Egress, 0, TCP, 80).0);
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
        judge(engine.tables(), set, PolicyDirection::External, 0, TCP, 80).0
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
