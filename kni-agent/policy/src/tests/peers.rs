//! Checks that changes of pods, also of other nodes, lead to the same tables as an engine that begins with the result.

use kni_model::{EndpointId, PolicyTables, policy::PolicyPod};
use proptest::prelude::*;

use super::{
    random::{Change, Slots, any_change, apply_changes},
    world::{TCP, converge, ingress, labels, named, pod, pods, port, rule},
};
use crate::PolicyEngine;

/// The second address, of slots 2 and 3, is also a range that policies name.
const SLOTS: usize = 8;

/// A pod that is mostly on another node. Two slots have one address.
fn any_peer(slot: usize) -> impl Strategy<Value = PolicyPod> {
    let labels = prop::sample::select(vec!["", "a=1", "a=2", "a=1 b=1", "b=2", "c=1"]);
    let network = prop::sample::select(vec!["default", "net1"]);
    let namespace = prop::sample::select(vec!["x", "y"]);
    (namespace, labels, network, 0..5_u8, 0..3_u8).prop_map(move |(namespace, labels, network, local, ports)| {
        let number = u16::try_from(1 + slot / 2).unwrap();
        let mut pod = pod(&format!("{namespace}/q"), labels, number, &[network]);
        pod.sandbox = format!("peer-{slot}").parse().unwrap();
        pod.ports = (0..ports).map(|port| named("web", TCP, 80 + u16::from(port))).collect();
        let endpoint = (local == 0).then(|| EndpointId(200 + u32::try_from(slot).unwrap()));
        pod.interfaces
            .iter_mut()
            .for_each(|interface| interface.endpoint = endpoint);
        pod
    })
}

fn any_step() -> impl Strategy<Value = Change> {
    let peer = (0..SLOTS).prop_flat_map(|slot| (Just(slot), prop::option::weighted(0.7, any_peer(slot))));
    prop_oneof![
        6 => peer.prop_map(|(slot, peer)| Change::Pod(100 + slot, peer)),
        1 => any_change(),
    ]
}

/// As the agent does: an empty plan is not confirmed.
fn apply_plan(engine: &mut PolicyEngine) {
    if !engine.plan().is_empty() {
        engine.confirm();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_history_leads_to_the_same_tables(
        first in prop::collection::vec(any_change(), 8..20),
        steps in prop::collection::vec((any_step(), 0..4_u8), 1..30),
    ) {
        let mut engine = PolicyEngine::new(PolicyTables::default());
        let mut slots = Slots::default();
        let mut before = slots.world();
        for change in &first {
            slots.change(change);
        }
        let mut is_failed = false;
        for (change, kind) in &steps {
            slots.change(change);
            let world = slots.world();
            apply_changes(&mut engine, &before, &world);
            before = world;
            match kind {
                // The next plan contains this change, too.
                0 => {}
                1 => {
                    engine.plan();
                    is_failed = true;
                }
                _ if is_failed => {
                    apply_plan(&mut engine);
                    is_failed = false;
                }
                2 => apply_plan(&mut engine),
                _ => drop(converge(&mut engine)),
            }
        }
        apply_plan(&mut engine);
        let mut anew = PolicyEngine::new(PolicyTables::default());
        apply_changes(&mut anew, &Slots::default().world(), &before);
        converge(&mut anew);
        prop_assert_eq!(engine.tables(), anew.tables());
        prop_assert_eq!(engine.tables(), &engine.desired.tables);
        prop_assert_eq!(engine.plan(), []);
    }
}

#[test]
fn a_pod_that_changes_nothing_is_not_compiled() {
    let mut engine = PolicyEngine::new(PolicyTables::default());
    engine.set_policies(vec![ingress("x/p", "", &[rule(&[pods("role=a")], &[port(TCP, "80")])])]);
    engine.put_pod(pod("x/own", "", 1, &["default"]));
    let peer = |text: &str, number| {
        let mut peer = pod("x/peer", text, number, &["default"]);
        peer.sandbox = format!("peer{number}").parse().unwrap();
        peer.interfaces
            .iter_mut()
            .for_each(|interface| interface.endpoint = None);
        peer
    };
    engine.put_pod(peer("role=a", 2));
    engine.put_pod(peer("role=b", 3));
    converge(&mut engine);
    assert_eq!(engine.tables().identities.len(), 2, "of both families");
    engine.put_pod(peer("role=b more=1", 3));
    assert!(engine.pods.take_changes().is_empty(), "no policy selects it");
    engine.put_pod(peer("role=a more=1", 2));
    assert!(engine.pods.take_changes().is_empty(), "the same policies select it");
    engine.set_namespaces([("other".to_owned(), labels("a=1"))].into());
    assert!(engine.pods.take_changes().is_empty(), "of no pod");
    engine.put_pod(peer("role=a", 3));
    converge(&mut engine);
    assert_eq!(engine.tables().identities.len(), 4);
    engine.remove_pod(&peer("", 2).sandbox);
    converge(&mut engine);
    assert_eq!(engine.tables().identities.len(), 2);
}

#[test]
fn a_change_of_a_peer_among_many_is_a_change_of_its_address() {
    let mut engine = PolicyEngine::new(PolicyTables::default());
    let rules = [rule(&[pods("role=1")], &[port(TCP, "80")])];
    engine.set_policies(vec![ingress("x/p", "own=1", &rules)]);
    engine.put_pod(pod("x/own", "own=1", 1, &["default"]));
    let peer = |number: u16, text: &str| {
        let mut peer = pod("x/peer", text, 1, &["default"]);
        peer.sandbox = format!("peer{number}").parse().unwrap();
        let [high, low] = number.to_be_bytes();
        for interface in &mut peer.interfaces {
            interface.endpoint = None;
            interface.ipv4 = Some([10, 1, high, low].into());
            interface.ipv6 = None;
        }
        peer
    };
    for number in 0..1000 {
        engine.put_pod(peer(number, &format!("role={}", number % 2)));
    }
    converge(&mut engine);
    assert_eq!(engine.tables().identities.len(), 500);
    engine.put_pod(peer(7, "role=2"));
    engine.put_pod(peer(1001, "role=1"));
    engine.remove_pod(&peer(8, "").sandbox);
    let changes = engine.pods.take_changes();
    assert!(!changes.all && !changes.local);
    assert_eq!(changes.addresses[&1].len(), 3);
    engine.compile(changes);
    let differing = &engine.desired.differing;
    assert!(!differing.all && differing.policy.is_empty() && differing.ports.is_empty());
    assert_eq!(differing.identities.len(), 2, "the third one had no row");
    assert_eq!(engine.plan().len(), 2, "a row to write, and one to remove");
}
