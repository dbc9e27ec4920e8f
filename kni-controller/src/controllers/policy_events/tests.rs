//! Tests which policies get an event, and how often.

use std::collections::BTreeSet;

use kni_cluster::PolicySource;
use kni_model::policy::{Policy, PolicyRef, Selector};

use super::*;

const REFUSED: &str = "spec.ingress[0].from[0].ipBlock.cidr: has no prefix length";

/// A policy for network red and `network`.
fn row(kind: PolicyKind, network: &str, source: PolicySource) -> PolicyRow {
    let policy = Policy {
        reference: PolicyRef {
            kind,
            namespace: "shop".to_owned(),
            name: "p".to_owned(),
        },
        scope: match kind {
            PolicyKind::MultiNetworkPolicy => {
                let named = ["red", network].map(|name| NamedNetwork {
                    namespace: "shop".to_owned(),
                    name: name.parse().unwrap(),
                });
                PolicyScope::Named(named.into())
            }
            PolicyKind::NetworkPolicy | PolicyKind::EgressPolicy => PolicyScope::Primary,
        },
        pods: Selector::default(),
        ingress: Some(Vec::new()),
        egress: None,
        external: None,
    };
    PolicyRow {
        policy: Arc::new(policy),
        source,
        uid: "u".to_owned(),
        version: 7,
        generation: 1,
        summary: kni_api::EgressPolicySummary::default(),
    }
}

fn refused() -> PolicySource {
    PolicySource::LastValid(REFUSED.to_owned())
}

/// Tables that were read, with network red and a definition `storage` for another plugin.
fn tables() -> Tables {
    let mut tables = Tables::default();
    let network = serde_json::json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red" },
        "spec": { "subnets": ["10.0.0.0/16"] },
    });
    let network = serde_json::from_value(network).unwrap();
    tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
    tables.networks.complete();
    tables.definition_names.put(Key::new("shop", "storage"), Some(()));
    tables.definition_names.complete();
    tables
}

/// Plans and publishes; returns the objects and the texts.
fn events(controller: &mut PolicyEvents, tables: &Tables) -> Vec<(ObjectReference, String)> {
    let planned = controller.plan(tables, &Networks::default()).into_iter();
    let published = planned.map(|(key, report)| {
        let note = report.problem.note.clone();
        lock(&report.published).insert(key, report.problem);
        (report.about, note)
    });
    published.collect()
}

#[test]
fn a_refused_policy_has_one_event_for_each_change_that_names_the_field() {
    let mut tables = tables();
    let mut controller = PolicyEvents::default();
    let key = Key::new("shop", "p");
    let valid = row(PolicyKind::NetworkPolicy, "red", PolicySource::Object);
    tables.network_policies.put(key.clone(), Some(valid));
    assert!(events(&mut controller, &tables).is_empty());
    let network = row(PolicyKind::NetworkPolicy, "red", refused());
    let multi = row(PolicyKind::MultiNetworkPolicy, "red", refused());
    tables.network_policies.put(key.clone(), Some(network.clone()));
    tables.multi_policies.put(key.clone(), Some(multi));
    let published = events(&mut controller, &tables);
    let kinds: BTreeSet<_> = published
        .iter()
        .map(|(about, _)| about.kind.as_deref().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["MultiNetworkPolicy", "NetworkPolicy"].into(),
        "two objects of one name"
    );
    for (about, note) in &published {
        assert_eq!((about.uid.as_deref(), about.name.as_deref()), (Some("u"), Some("p")));
        assert_eq!(about.resource_version.as_deref(), Some("7"));
        assert!(note.contains(REFUSED), "{note}");
    }
    assert!(events(&mut controller, &tables).is_empty(), "once");
    let again = PolicyRow { version: 8, ..network };
    tables.network_policies.put(key.clone(), Some(again));
    assert!(events(&mut controller, &tables).is_empty(), "the same problem");
    let other = PolicySource::LastValid("spec.policyTypes[0]: is unknown".to_owned());
    tables
        .network_policies
        .put(key, Some(row(PolicyKind::NetworkPolicy, "red", other)));
    let published = events(&mut controller, &tables);
    assert!(
        published.len() == 1 && published[0].1.contains("policyTypes"),
        "{published:?}"
    );
}

#[test]
fn the_policies_of_one_namespace_have_a_limited_number_of_events() {
    let mut tables = tables();
    for number in 0..100 {
        let key = Key::new("hostile", &format!("p{number}"));
        let row = row(PolicyKind::NetworkPolicy, "red", refused());
        tables.network_policies.put(key, Some(row));
    }
    let row = row(PolicyKind::NetworkPolicy, "red", refused());
    tables.network_policies.put(Key::new("shop", "p"), Some(row));
    let published = events(&mut PolicyEvents::default(), &tables);
    let of = |namespace: &str| {
        let of_namespace = published
            .iter()
            .filter(|(about, _)| about.namespace.as_deref() == Some(namespace));
        of_namespace.count()
    };
    assert_eq!((of("hostile"), of("shop")), (MOST_REPORTED, 1));
}

#[test]
fn a_policy_for_a_name_that_nothing_has_is_reported_after_a_while() {
    let mut tables = tables();
    let start = Instant::now();
    let reported = |tables: &Tables, controller: &mut PolicyEvents, after: Duration| {
        let problems = controller.problems(tables, start + after).into_values();
        problems
            .map(|(_, problem)| (problem.reason, problem.note))
            .collect::<Vec<_>>()
    };
    let put = |tables: &mut Tables, network: &str| {
        let row = row(PolicyKind::MultiNetworkPolicy, network, PolicySource::Object);
        tables.multi_policies.put(Key::new("shop", "p"), Some(row));
    };
    let mut controller = PolicyEvents::default();
    put(&mut tables, "storage");
    for after in [Duration::ZERO, GRACE] {
        assert_eq!(
            reported(&tables, &mut controller, after),
            [],
            "a definition has the name"
        );
    }
    put(&mut tables, "ghost");
    assert_eq!(
        reported(&tables, &mut controller, Duration::ZERO),
        [],
        "it may be on its way"
    );
    let found = reported(&tables, &mut controller, GRACE);
    assert!(found.len() == 1 && found[0].0 == "NetworkNotFound", "{found:?}");
    assert!(
        found[0].1.contains("policy-for") && found[0].1.contains("named ghost,"),
        "{found:?}"
    );
    tables.definition_names.put(Key::new("other", "ghost"), Some(()));
    assert_eq!(
        reported(&tables, &mut controller, GRACE).len(),
        1,
        "a definition of another namespace"
    );
    tables.definition_names.put(Key::new("shop", "ghost"), Some(()));
    assert_eq!(reported(&tables, &mut controller, GRACE), []);
    // What is not read yet may exist.
    let mut unread = Tables::default();
    unread.networks.complete();
    put(&mut unread, "ghost");
    for after in [Duration::ZERO, GRACE] {
        assert_eq!(reported(&unread, &mut controller, after), []);
    }
}
