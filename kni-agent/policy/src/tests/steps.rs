//! Checks every intermediate state of a plan: after each single row, every packet is evaluated as before or as after,
//! or denied while the tables have no room for both.

use std::{collections::BTreeMap, net::IpAddr};

use kni_model::{EndpointId, PolicyStep, PolicyTables, policy::PolicyDirection};
use proptest::prelude::*;

use super::{
    oracle::World,
    random::{Slots, any_history, apply_changes},
    world::{ICMP, TCP, UDP, apply, block, external_identity, ingress, pod, pods, rule},
};
use crate::{PolicyEngine, Quota, evaluate};

const PROTOCOLS: [(u8, u16); 4] = [(TCP, 80), (TCP, 81), (UDP, 80), (ICMP, 0)];
const OUTSIDE: [&str; 6] = [
    "10.0.0.200",
    "10.1.0.1",
    "10.0.0.250",
    "192.0.2.1",
    "fd00::200",
    "2001:db8::1",
];

/// The lookups that are valid in both worlds: endpoints that stay, and addresses that belong to no endpoint in either.
struct Lookups {
    networks: BTreeMap<EndpointId, u32>,
    addresses: Vec<IpAddr>,
}

impl Lookups {
    fn new(before: &World, after: &World) -> Self {
        let endpoints = |world: &World| -> BTreeMap<EndpointId, (String, u32)> {
            let of = |pod: &kni_model::policy::PolicyPod| {
                let sandbox = pod.sandbox.to_string();
                let known = pod
                    .interfaces
                    .iter()
                    .filter_map(|i| Some((i.endpoint?, i.network_id.get())));
                known
                    .map(move |(id, network)| (id, (sandbox.clone(), network)))
                    .collect::<Vec<_>>()
            };
            world.pods.iter().flat_map(of).collect()
        };
        let (old, new) = (endpoints(before), endpoints(after));
        let stay = old.iter().filter(|(id, owner)| new.get(id) == Some(owner));
        let remote = |world: &World| -> Vec<IpAddr> {
            let interfaces = world
                .pods
                .iter()
                .flat_map(|pod| &pod.interfaces)
                .filter(|i| i.endpoint.is_none());
            interfaces.filter_map(|i| i.ipv4.map(IpAddr::V4)).collect()
        };
        Self {
            networks: stay.map(|(id, (_, network))| (*id, *network)).collect(),
            addresses: OUTSIDE
                .iter()
                .map(|text| text.parse().unwrap())
                .chain(remote(before))
                .chain(remote(after))
                .collect(),
        }
    }

    /// Every decision, in a fixed order.
    fn answers(&self, tables: &PolicyTables) -> Vec<bool> {
        let mut answers = Vec::new();
        for (id, network) in &self.networks {
            let set = tables.endpoints[id].policy;
            let mut decide = |direction, identity| {
                answers.extend(
                    PROTOCOLS.map(|(protocol, port)| evaluate(tables, set, direction, identity, protocol, port).0),
                );
            };
            for (other, _) in self
                .networks
                .iter()
                .filter(|(other, of)| *of == network && *other != id)
            {
                let other = tables.endpoints[other];
                for identity in [other.identity4, other.identity6] {
                    decide(PolicyDirection::Egress, identity);
                    decide(PolicyDirection::Ingress, identity);
                }
            }
            for address in &self.addresses {
                let identity = external_identity(tables, *network, *address);
                decide(PolicyDirection::Egress, identity);
                decide(PolicyDirection::Ingress, identity);
                decide(PolicyDirection::External, identity);
            }
        }
        answers
    }
}

/// Splits a step into single rows.
fn rows(step: &PolicyStep) -> Vec<PolicyStep> {
    match step.clone() {
        PolicyStep::PutPorts(rows) => rows.into_iter().map(|row| PolicyStep::PutPorts(vec![row])).collect(),
        PolicyStep::PutPolicy(rows) => rows.into_iter().map(|row| PolicyStep::PutPolicy(vec![row])).collect(),
        PolicyStep::PutIdentities(rows) => rows
            .into_iter()
            .map(|row| PolicyStep::PutIdentities(vec![row]))
            .collect(),
        PolicyStep::Enforce(rows) => rows.into_iter().map(|row| PolicyStep::Enforce(vec![row])).collect(),
        PolicyStep::RemoveIdentities(keys) => keys
            .into_iter()
            .map(|key| PolicyStep::RemoveIdentities(vec![key]))
            .collect(),
        PolicyStep::RemovePolicy(keys) => keys
            .into_iter()
            .map(|key| PolicyStep::RemovePolicy(vec![key]))
            .collect(),
        PolicyStep::RemovePorts(keys) => keys.into_iter().map(|key| PolicyStep::RemovePorts(vec![key])).collect(),
    }
}

fn nothing_changes_its_meaning(tables: &PolicyTables, row: &PolicyStep) -> Result<(), TestCaseError> {
    if let PolicyStep::PutPolicy(rows) = row {
        prop_assert!(
            rows.iter()
                .all(|(key, value)| tables.policy.get(key).is_none_or(|known| known == value))
        );
    }
    if let PolicyStep::PutPorts(rows) = row {
        prop_assert!(
            rows.iter()
                .all(|(key, value)| tables.ports.get(key).is_none_or(|known| known == value))
        );
    }
    Ok(())
}

/// Moves from one world to the next and checks every intermediate state.
fn watch(engine: &mut PolicyEngine, before: &World, world: &World) -> Result<(), TestCaseError> {
    apply_changes(engine, before, world);
    let mut tables = engine.tables().clone();
    let lookups = Lookups::new(before, world);
    let old = lookups.answers(&tables);
    let steps = engine.plan();
    engine.confirm();
    let new = lookups.answers(engine.tables());
    for step in &steps {
        for row in rows(step) {
            nothing_changes_its_meaning(&tables, &row)?;
            apply(&mut tables, &row);
            let now = lookups.answers(&tables);
            let mut moments = now.iter().zip(old.iter().zip(&new));
            let is_one = moments.all(|(now, (old, new))| now == old || now == new);
            prop_assert!(is_one, "after {:?} of {:?}", row, steps);
        }
    }
    Ok(())
}

/// The largest table.
fn rows_of(tables: &PolicyTables) -> usize {
    let PolicyTables {
        policy,
        ports,
        identities,
        ..
    } = tables;
    policy.len().max(ports.len()).max(identities.len())
}

/// Moves from one world to the next in tables with `capacity` rows: no intermediate state needs more, and none allows
/// what neither world allows. Returns the number of plans.
fn watch_without_room(
    engine: &mut PolicyEngine,
    capacity: usize,
    before: &World,
    world: &World,
) -> Result<usize, TestCaseError> {
    apply_changes(engine, before, world);
    let mut tables = engine.tables().clone();
    let (lookups, first) = (Lookups::new(before, world), rows_of(&tables));
    let old = lookups.answers(&tables);
    let mut moments = Vec::new();
    let mut plans = 0;
    loop {
        let steps = engine.plan();
        for row in steps.iter().flat_map(rows) {
            nothing_changes_its_meaning(&tables, &row)?;
            apply(&mut tables, &row);
            moments.push((lookups.answers(&tables), rows_of(&tables), row));
        }
        engine.confirm();
        plans += 1;
        prop_assert!(plans < 8, "no end");
        if !engine.has_postponed() {
            break;
        }
    }
    let (new, last) = (lookups.answers(engine.tables()), rows_of(engine.tables()));
    prop_assert_eq!(lookups.answers(&tables), new.clone());
    for (now, count, row) in moments {
        let mut answers = now.iter().zip(old.iter().zip(&new));
        let is_safe = answers.all(|(now, (old, new))| {
            let is_one = now == old || now == new;
            is_one || (plans > 1 && !now)
        });
        prop_assert!(is_safe, "after {:?}, in {} plans", row, plans);
        prop_assert!(count <= capacity.max(first).max(last), "{} rows after {:?}", count, row);
    }
    Ok(plans)
}

/// A pod leaves a policy set that another pod keeps, while a peer of both changes its labels: another policy allows it
/// before and after, so it must be allowed at all times.
#[test]
fn who_leaves_a_set_that_others_keep_does_not_see_its_future() {
    let to = |name: &str, t: &str, role: &str| ingress(name, t, &[rule(&[pods(role)], &[])]);
    let world = |t: &str, role: &str| World {
        namespaces: BTreeMap::new(),
        policies: vec![to("x/a", "t=1", "role=a"), to("x/b", "t=2", "role=b")],
        pods: vec![
            pod("x/leaves", t, 1, &["default"]),
            pod("x/stays", "t=1", 2, &["default"]),
            pod("x/peer", role, 3, &["default"]),
            pod("x/other", "role=a", 4, &["default"]),
        ],
    };
    let mut engine = PolicyEngine::new(PolicyTables::default());
    let (before, after) = (world("t=1", "role=a"), world("t=2", "role=b"));
    watch(&mut engine, &World::default(), &before).unwrap();
    watch(&mut engine, &before, &after).unwrap();
    watch(&mut engine, &after, &before).unwrap();
}

/// Six namespaces name the same ranges, so another one that names a range around them changes the identities in the
/// sets of all.
#[test]
fn a_change_of_most_rows_is_made_where_they_do_not_fit_twice() {
    const CAPACITY: usize = 576;
    let names = ["a", "b", "c", "d", "e", "f", "mover"];
    let world = |second: u32| {
        let about = |name: &&str| {
            let peers = if *name == "mover" {
                vec![block(&format!("10.{second}.0.0/16"))]
            } else {
                (0..64).map(|third| block(&format!("10.1.{third}.0/24"))).collect()
            };
            ingress(&format!("{name}/p"), "", &[rule(&peers, &[])])
        };
        let pods = names.iter().zip(1..);
        World {
            namespaces: BTreeMap::new(),
            policies: names.iter().map(about).collect(),
            pods: pods
                .map(|(name, number)| pod(&format!("{name}/pod"), "", number, &["default"]))
                .collect(),
        }
    };
    let quota = Quota {
        capacity: CAPACITY,
        share: CAPACITY,
    };
    let mut engine = PolicyEngine::new(PolicyTables::default()).with_quota(quota);
    let mut before = World::default();
    for (second, is_postponed) in [(2, false), (1, true), (2, true)] {
        let after = world(second);
        let plans = watch_without_room(&mut engine, CAPACITY, &before, &after).unwrap();
        assert_eq!(plans > 1, is_postponed, "{plans} plans to 10.{second}.0.0/16");
        assert_eq!(engine.overruns().count(), 0);
        before = after;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_moment_is_before_or_after(history in any_history()) {
        let mut engine = PolicyEngine::new(PolicyTables::default());
        let (mut slots, mut before) = (Slots::default(), World::default());
        for batch in &history {
            for change in batch {
                slots.change(change);
            }
            let world = slots.world();
            watch(&mut engine, &before, &world)?;
            before = world;
        }
    }

    /// Much changes at once, because the worlds of two histories take turns, and the tables have hardly more rows than
    /// the larger of two successive worlds needs.
    #[test]
    fn without_room_every_moment_is_before_or_after_or_denied(
        one in any_history(),
        other in any_history(),
        spare in 0..4_usize,
    ) {
        let mut engine = PolicyEngine::new(PolicyTables::default());
        // The same worlds with room for everything.
        let mut direct = PolicyEngine::new(PolicyTables::default());
        let (mut slots, mut before) = ([Slots::default(), Slots::default()], World::default());
        for (number, batch) in one.iter().zip(&other).flat_map(|(one, other)| [(0, one), (1, other)]) {
            for change in batch {
                slots[number].change(change);
            }
            let world = slots[number].world();
            apply_changes(&mut direct, &before, &world);
            direct.plan();
            direct.confirm();
            let most = rows_of(direct.tables()).max(rows_of(engine.tables()));
            // No namespace is closed up to seven eighths.
            let capacity = most + most / 7 + 1 + spare;
            engine = engine.with_quota(Quota { capacity, share: capacity });
            watch_without_room(&mut engine, capacity, &before, &world)?;
            // The way there leaves no trace.
            let closed: Vec<String> = engine.overruns().map(|overrun| format!("{overrun:?}")).collect();
            prop_assert!(closed.is_empty(), "{:?} are closed at {} rows", closed, capacity);
            prop_assert_eq!(direct.tables(), engine.tables());
            before = world;
        }
    }
}
