//! Tests the creation and deletion of many pods.

use std::{collections::BTreeSet, time::Instant};

use anyhow::Result;
use kni_integration::require;
use serde_json::{Value, json};

use super::scene::{PATIENCE, PORT, Scene, server};

/// Pods; more of them in long tests.
fn count() -> usize {
    if kni_integration::long() { 100 } else { 30 }
}

#[test]
fn many_pods_leave_the_node_as_it_was() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let count = count();
    let scene = Scene::start("kubelet-churn")?;
    // Creates the state that remains after a first pod.
    scene.create(&[server("first", &json!({}))])?;
    delete_all(&scene)?;
    let before = scene.machine.at_rest()?;

    let start = Instant::now();
    let pods: Vec<Value> = (0..count).map(|n| server(&format!("many-{n}"), &json!({}))).collect();
    scene.create(&pods)?;
    println!("{count} pods were ready after {:?}", start.elapsed());
    let ips = scene
        .local()
        .kubectl(&["get", "pods", "-o", "jsonpath={.items[*].status.podIPs[*].ip}"])?;
    let ips: BTreeSet<&str> = ips.split(' ').collect();
    assert_eq!(ips.len(), 2 * count, "each has addresses of its own, of both families");
    let last = format!("many-{}", count - 1);
    for address in scene.addresses(&last)? {
        assert_eq!(scene.ask("many-0", &address.to_string(), PORT, "tcp")?, last);
    }

    let start = Instant::now();
    delete_all(&scene)?;
    println!("{count} pods were gone after {:?}", start.elapsed());
    before.assert_unchanged(&scene.machine.node, PATIENCE);
    Ok(())
}

fn delete_all(scene: &Scene) -> Result<()> {
    let patience = format!("--timeout={}s", PATIENCE.as_secs());
    scene
        .local()
        .kubectl(&["delete", "pods", "--all", "--grace-period=1", &patience])
        .map(drop)
}
