//! Checks the number of rows, and that no rows are left behind.

use kni_model::{PolicyTables, policy::Policy};

use super::world::{TCP, block, converge, ingress, labels, nine, pod, pods_of, port, rule};
use crate::PolicyEngine;

#[test]
fn rules_with_the_same_ports_share_them() {
    let rows = |policies: u32| {
        let mut engine = nine();
        let list = (0..policies).map(|n| {
            let peer = block(&format!("10.{}.{}.0/24", 1 + n / 256, n % 256));
            ingress(
                &format!("x/p{n}"),
                "",
                &[rule(&[peer], &[port(TCP, "80"), port(TCP, "8000-8999")])],
            )
        });
        engine.set_policies(list.collect());
        converge(&mut engine);
        let tables = engine.tables();
        (tables.policy.len(), tables.ports.len(), tables.identities.len())
    };
    let (few, ports, _) = rows(10);
    // Two wildcard rows: egress and external. One set, because all pods of x are selected alike.
    assert_eq!(few, 10 + 2);
    assert_eq!(rows(1000), (1000 + 2, ports, 1000));
}

#[test]
fn many_policies_about_the_same_peers_are_one_row() {
    let mut engine = nine();
    let list = (0..1000).map(|n| {
        ingress(
            &format!("x/p{n}"),
            "",
            &[rule(&[pods_of("ns=y", "")], &[port(TCP, "80")])],
        )
    });
    engine.set_policies(list.collect());
    converge(&mut engine);
    let tables = engine.tables();
    assert_eq!((tables.policy.len(), tables.ports.len()), (3, 1));
}

#[test]
fn pods_that_come_and_go_leave_nothing_behind() {
    let mut engine = PolicyEngine::new(PolicyTables::default());
    let list: Vec<Policy> = (0..110)
        .map(|n| {
            let peer = pods_of("", &format!("app={}", (n + 1) % 110));
            ingress(
                &format!("x/p{n}"),
                &format!("app={n}"),
                &[rule(&[peer, block(&format!("10.9.{n}.0/24"))], &[port(TCP, "web")])],
            )
        })
        .collect();
    engine.set_policies(list);
    let put = |engine: &mut PolicyEngine, n: u16, run: u16| {
        let mut pod = pod("x/p", &format!("app={n}"), n + 1, &["default"]);
        pod.sandbox = format!("s{n}-{run}").parse().unwrap();
        pod.ports = vec![super::world::named("web", TCP, 8000 + run)];
        let sandbox = pod.sandbox.clone();
        engine.put_pod(pod);
        sandbox
    };
    let mut sandboxes: Vec<_> = (0..110).map(|n| put(&mut engine, n, 0)).collect();
    converge(&mut engine);
    let size = |engine: &PolicyEngine| {
        let tables = engine.tables();
        (
            tables.policy.len(),
            tables.ports.len(),
            tables.identities.len(),
            tables.endpoints.len(),
        )
    };
    let full = size(&engine);
    for run in 1..4 {
        for n in 0..110_u16 {
            engine.remove_pod(&sandboxes[usize::from(n)]);
            converge(&mut engine);
            sandboxes[usize::from(n)] = put(&mut engine, n, run);
            converge(&mut engine);
        }
        assert_eq!(size(&engine), full);
    }
    for sandbox in &sandboxes {
        engine.remove_pod(sandbox);
    }
    converge(&mut engine);
    assert_eq!(engine.tables(), &PolicyTables::default());
    assert!(labels("").is_empty());
}
