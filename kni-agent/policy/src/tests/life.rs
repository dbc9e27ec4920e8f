//! Checks behaviour over time: names of rules, restarts and failed plans.

use std::collections::BTreeSet;

use kni_common::counter::HitKey;
use kni_model::{
    EndpointId, Enforcement, PolicyStep, PolicyTables,
    policy::{Policy, PolicyDirection},
};

use super::world::{
    TCP, apply, block, converge, egress, ingress, leaves, nine, nine_pod, passes, pod, pods, pods_of, port, rule,
};
use crate::{PolicyEngine, evaluate};

fn two_rules() -> Policy {
    ingress(
        "x/p",
        "pod=a",
        &[
            rule(&[pods("pod=b")], &[port(TCP, "80")]),
            rule(&[pods_of("ns=y", "")], &[port(TCP, "81-82")]),
        ],
    )
}

#[test]
fn a_trail_leads_to_the_rule_and_a_denial_to_who_isolates() {
    let mut engine = nine();
    engine.set_policies(vec![two_rules(), ingress("x/deny", "", &[])]);
    converge(&mut engine);
    let tables = engine.tables().clone();
    let set = tables.endpoints[&EndpointId(1)].policy;
    let ask = |from: u32, port| {
        let identity = tables.endpoints[&EndpointId(from)].identity4;
        evaluate(&tables, set, PolicyDirection::Ingress, identity, TCP, port).1
    };
    let name = |engine: &PolicyEngine, from, port| {
        let trail = ask(from, port);
        engine
            .rule(trail.set, PolicyDirection::Ingress, trail.rule, trail.ordinal)
            .map(|rule| rule.to_string())
    };
    let expected = Some("NetworkPolicy x/p ingress[1]".to_owned());
    assert_eq!(name(&engine, 2, 80), Some("NetworkPolicy x/p ingress[0]".into()));
    assert_eq!(name(&engine, 4, 82), expected);
    assert_eq!(name(&engine, 4, 80), None);
    let isolating = |engine: &PolicyEngine| {
        let list = engine.isolating(set, PolicyDirection::Ingress);
        list.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(isolating(&engine), ["NetworkPolicy x/deny", "NetworkPolicy x/p"]);
    assert_eq!(engine.isolating(set, PolicyDirection::Egress), []);
    assert_eq!(engine.members(&two_rules().reference), [EndpointId(1)]);
    // Events may arrive late.
    engine.set_policies(Vec::<Policy>::new());
    converge(&mut engine);
    assert_eq!(name(&engine, 4, 82), expected);
    assert_eq!(isolating(&engine).len(), 2);
}

#[test]
fn effective_rules_name_their_counters() {
    let mut engine = nine();
    let open = ingress(
        "x/q",
        "pod=a",
        &[
            rule(&[block("192.0.2.0/24 192.0.2.0/25")], &[]),
            rule(&[], &[port(TCP, "web")]),
        ],
    );
    engine.set_policies(vec![two_rules(), open]);
    converge(&mut engine);
    let rules = engine.effective(EndpointId(1));
    let texts: Vec<_> = rules
        .iter()
        .map(|r| {
            (
                r.rule.as_ref().map(ToString::to_string),
                &*r.peers,
                &*r.ports,
                r.hits.len(),
                r.allow,
            )
        })
        .collect();
    let name = |text: &str| Some(format!("NetworkPolicy {text}"));
    assert_eq!(
        texts,
        [
            (name("x/p ingress[0]"), "pods pod=b in namespace x", "TCP/80", 1, true),
            (name("x/p ingress[1]"), "pods in namespaces ns=y", "TCP/81-82", 1, true),
            (
                name("x/q ingress[0]"),
                "192.0.2.0/24 except 192.0.2.0/25",
                "all",
                1,
                true
            ),
            (name("x/q ingress[1]"), "all", "TCP/web", 0, true),
            (None, "otherwise", "all", 1, false),
        ]
    );
    let set = engine.enforcement(EndpointId(1)).unwrap().policy;
    let denied = HitKey {
        set,
        rule: 0,
        ordinal: u16::MAX,
        direction: 1,
    };
    assert_eq!(rules[4].hits, [denied]);
    assert_eq!(rules[4].isolating.len(), 2);
    assert_eq!(engine.effective(EndpointId(2)), []);
}

#[test]
fn every_counter_that_the_programs_may_write_is_listed_once() {
    let mut engine = nine();
    let open = ingress("x/q", "pod=a", &[rule(&[block("10.0.0.6/31")], &[])]);
    engine.set_policies(vec![two_rules(), open]);
    converge(&mut engine);
    let rules = engine.effective(EndpointId(1));
    let set = engine.enforcement(EndpointId(1)).unwrap().policy;
    let denied = rules[3].hits[0];
    let tables = engine.tables();
    let mut written = BTreeSet::new();
    for endpoint in tables.endpoints.values() {
        for port in [80, 81, 82, 83] {
            let (allowed, trail) = evaluate(tables, set, PolicyDirection::Ingress, endpoint.identity4, TCP, port);
            let ordinal = if trail.rule == 0 {
                u16::MAX
            } else {
                u16::try_from(trail.ordinal).unwrap()
            };
            assert_eq!(allowed, trail.rule != 0);
            written.insert(HitKey {
                rule: trail.rule,
                ordinal,
                ..denied
            });
        }
    }
    let listed: Vec<HitKey> = rules.iter().flat_map(|rule| rule.hits.clone()).collect();
    assert!(
        written
            .iter()
            .all(|key| listed.iter().filter(|known| *known == key).count() == 1)
    );
    assert_eq!(written.len(), listed.len());
}

#[test]
fn a_restart_changes_nothing() {
    let mut engine = nine();
    engine.set_policies(vec![two_rules(), ingress("y/deny", "", &[])]);
    converge(&mut engine);
    let mut again = nine_with(engine.tables().clone());
    again.set_policies(vec![two_rules(), ingress("y/deny", "", &[])]);
    assert_eq!(again.plan(), []);
    again.confirm();
    assert_eq!(again.tables(), engine.tables());
}

fn nine_with(adopted: PolicyTables) -> PolicyEngine {
    let mut engine = PolicyEngine::new(adopted);
    engine.set_namespaces(
        ["x", "y", "z"]
            .map(|ns| (ns.into(), super::world::labels(&format!("ns={ns}"))))
            .into(),
    );
    for (number, name) in super::world::NINE.iter().enumerate() {
        engine.put_pod(nine_pod(name, u16::try_from(number).unwrap() + 1));
    }
    engine
}

#[test]
fn foreign_leftovers_are_adopted_and_removed() {
    let mut engine = nine();
    engine.set_policies(vec![two_rules()]);
    converge(&mut engine);
    let mut adopted = engine.tables().clone();
    adopted.endpoints.insert(
        EndpointId(7777),
        Enforcement {
            policy: 5,
            identity4: 6,
            identity6: 7,
        },
    );
    let (key, value) = adopted.policy.iter().next().map(|(key, value)| (*key, *value)).unwrap();
    adopted
        .policy
        .insert(kni_common::policy::PolicyKey { set: 5, ..key }, value);
    let mut again = nine_with(adopted);
    again.set_policies(vec![two_rules()]);
    assert!(matches!(&again.plan()[..], [PolicyStep::RemovePolicy(keys)] if keys.len() == 1));
    again.confirm();
    assert_eq!(again.tables(), engine.tables());
}

#[test]
fn an_endpoint_that_begins_is_always_put_into_force() {
    let mut engine = nine();
    let steps = converge(&mut engine);
    assert!(matches!(&steps[..], [PolicyStep::Enforce(rows)] if rows.len() == 18));
    engine.remove_pod(&nine_pod("x/a", 1).sandbox);
    assert_eq!(converge(&mut engine), []);
    assert!(!engine.tables().endpoints.contains_key(&EndpointId(1)));
    // The next owner of the number, before the teardown of the previous one is reported.
    let mut next = nine_pod("x/new", 2);
    next.sandbox = "next".parse().unwrap();
    engine.put_pod(next);
    engine.remove_pod(&nine_pod("x/b", 2).sandbox);
    let steps = converge(&mut engine);
    let begun = |endpoint| (EndpointId(endpoint), Enforcement::default());
    assert_eq!(steps, [PolicyStep::Enforce(vec![begun(2), begun(102)])]);
    assert_eq!(engine.enforcement(EndpointId(2)), Some(Enforcement::default()));
    assert_eq!(engine.enforcement(EndpointId(1)), None);
}

#[test]
fn a_pod_that_goes_while_its_plan_is_carried_out_stays_gone() {
    let mut engine = nine();
    engine.set_policies(vec![two_rules()]);
    engine.plan();
    let first = nine_pod("x/a", 1);
    engine.remove_pod(&first.sandbox);
    engine.confirm();
    engine.put_pod(first);
    let steps = converge(&mut engine);
    let enforced = steps
        .iter()
        .any(|step| matches!(step, PolicyStep::Enforce(rows) if rows.iter().any(|(id, _)| id.0 == 1)));
    assert!(enforced, "it begins anew");
}

#[test]
fn one_pod_that_changes_does_so_in_one_step() {
    let mut engine = nine();
    engine.set_policies(vec![two_rules()]);
    converge(&mut engine);
    let mut b = nine_pod("x/b", 2);
    b.labels = super::world::labels("pod=c");
    b.interfaces.truncate(1);
    engine.put_pod(b);
    let steps = converge(&mut engine);
    assert_eq!(
        steps
            .iter()
            .filter(|step| matches!(step, PolicyStep::Enforce(_)))
            .count(),
        1
    );
    assert!(!passes(&engine, 2, 1, TCP, 80));
}

#[test]
fn a_plan_that_failed_half_way_is_put_right() {
    let policies = [
        vec![two_rules()],
        vec![ingress("x/p", "", &[rule(&[pods_of("ns=z", "")], &[])])],
        vec![],
    ];
    // For every step at which the plan may stop, and any desired state that follows.
    for stop in 0..12 {
        for (next, desired) in policies.iter().enumerate() {
            let mut engine = nine();
            engine.set_policies(policies[0].clone());
            converge(&mut engine);
            let mut kernel = engine.tables().clone();
            engine.set_policies(policies[1].clone());
            engine
                .plan()
                .iter()
                .take(stop)
                .for_each(|step| apply(&mut kernel, step));
            engine.set_policies(desired.clone());
            for step in engine.plan() {
                carry_out(&mut kernel, &step);
            }
            engine.confirm();
            assert_eq!(&kernel, engine.tables(), "stopped after {stop}, then {next}");
            assert_eq!(engine.plan(), []);
        }
    }
}

/// Like `apply`, but rows to remove may be missing.
fn carry_out(tables: &mut PolicyTables, step: &PolicyStep) {
    match step {
        PolicyStep::RemoveIdentities(keys) => tables.identities.retain(|key, _| !keys.contains(key)),
        PolicyStep::RemovePolicy(keys) => tables.policy.retain(|key, _| !keys.contains(key)),
        PolicyStep::RemovePorts(keys) => tables.ports.retain(|key, _| !keys.contains(key)),
        PolicyStep::PutPorts(_) | PolicyStep::PutPolicy(_) | PolicyStep::PutIdentities(_) | PolicyStep::Enforce(_) => {
            apply(tables, step);
        }
    }
}

#[test]
fn a_pod_that_was_in_front_of_a_block_leaves_it_as_it_was() {
    let far = block("10.0.0.10/32");
    let always = egress(
        "x/p",
        "",
        &[rule(&[far], &[]), rule(&[pods_of("", "pod=far")], &[port(TCP, "80")])],
    );
    let mut engine = nine();
    engine.set_policies(vec![always.clone()]);
    converge(&mut engine);
    let mut pod = pod("y/far", "pod=far", 10, &["default"]);
    pod.interfaces
        .iter_mut()
        .for_each(|interface| interface.endpoint = None);
    engine.put_pod(pod.clone());
    converge(&mut engine);
    // More identities are added and removed than the engine remembers.
    let many: Vec<_> = (0..1100)
        .map(|n| block(&format!("10.9.{}.{}/32", n / 256, n % 256)))
        .collect();
    engine.set_policies(vec![always.clone(), egress("x/q", "", &[rule(&many[..], &[])])]);
    converge(&mut engine);
    engine.set_policies(vec![always]);
    converge(&mut engine);
    engine.remove_pod(&pod.sandbox);
    converge(&mut engine);
    assert_eq!(leaves(&engine, 1, "10.0.0.10", TCP, 81), (true, true));
    assert_eq!(leaves(&engine, 1, "10.0.0.11", TCP, 81), (false, true));
}
