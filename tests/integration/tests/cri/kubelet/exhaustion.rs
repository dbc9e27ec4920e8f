//! Tests a node whose default network has no address left: it stays ready, evicts nothing, and new pods wait.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kni_integration::Machine;
use kni_local_node::{LocalNode, image};
use serde_json::{Value, json};

use super::scene::PATIENCE;

/// Five addresses for pods.
const SUBNETS: [&str; 2] = ["10.244.77.0/29", "fd00:244:77::/64"];
const FILL: usize = 5;
/// How long pods tolerate a node that is not ready, in seconds; 300 by default. Longer than a taint of the time before
/// the agent started may stay or come late (5 s, and more on a busy machine): such an eviction would show nothing about
/// the network.
const GRACE: u64 = 8;

/// How long the network stays full: several of the kubelet's readings of the runtime's status, a minute in long tests.
fn shortage() -> Duration {
    let long = kni_integration::long();
    Duration::from_secs(if long { 60 } else { 16 })
}

/// Replaces the default network by one with five addresses.
pub(crate) fn small_default_network(machine: &mut Machine) -> Result<()> {
    let delete = ["delete", "podnetwork", "default", "--wait=true"];
    machine.local.kubectl(&delete)?;
    machine.local.apply(&json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodNetwork",
        "metadata": { "name": "small" },
        "spec": { "default": true, "subnets": SUBNETS },
    }))
}

/// Fills the network, keeps it full, and makes room again.
pub(crate) fn a_full_network_evicts_nothing(machine: &mut Machine) -> Result<()> {
    let taints = ["get", "node", LocalNode::NAME, "-o", "jsonpath={.spec.taints}"];
    // A node that becomes ready keeps the taint that evicts its pods for up to 5 s.
    wait_until(machine, "the node has no taint", |node| {
        let taints = node.kubectl(&taints)?;
        ensure!(taints.is_empty(), "{taints}");
        Ok(true)
    })?;
    let fill: Vec<String> = (0..FILL).map(|number| format!("fill-{number}")).collect();
    for name in &fill {
        create(machine, name, None)?;
    }
    for name in &fill {
        wait_until(machine, &format!("{name} runs"), |node| phase(node, name, "Running"))?;
    }
    wait_until(machine, "the node has the taint", |node| {
        let taints = node.kubectl(&taints)?;
        Ok(taints.contains("kni.dev/addresses-exhausted"))
    })?;
    reasons(machine)?;

    let begun = Instant::now();
    let mut seen = 0;
    let length = shortage();
    wait_until(machine, "the shortage is over", |node| {
        // A reading that fails ends the wait, because the state is wrong at any time.
        let ready = node.ready_condition()?;
        assert!(ready.starts_with("True"), "the node is not ready: {ready}");
        for name in &fill {
            assert!(phase(node, name, "Running")?, "{name} does not run any more");
        }
        for name in ["next", "late"] {
            assert!(phase(node, name, "Pending")?, "{name} is not Pending");
        }
        seen += 1;
        Ok(begun.elapsed() >= length)
    })?;
    let range = r#"jsonpath={range .items[?(@.reason=="TaintManagerEviction")]}{.message}{"\n"}{end}"#;
    let events = machine.local.kubectl(&["get", "events", "-A", "-o", range])?;
    // A pod that is scheduled just before the taint of a node that was not ready is removed is not evicted after all.
    let evicted: Vec<&str> = events
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with("Cancelling deletion"))
        .collect();
    if !evicted.is_empty() {
        let node = machine.local.kubectl(&["describe", "node", LocalNode::NAME])?;
        bail!("pods were evicted: {evicted:?}; {node}");
    }
    println!(
        "full for {:?}: {seen} readings, node ready, {FILL} pods run, nothing evicted",
        begun.elapsed()
    );

    // Each address that is free again goes to one of those that wait.
    let begun = Instant::now();
    delete(machine, &fill[..2])?;
    for name in ["late", "next"] {
        wait_until(machine, &format!("{name} runs"), |node| phase(node, name, "Running"))?;
    }
    println!("two pods were deleted; late and next run after {:?}", begun.elapsed());
    let rest: Vec<String> = fill[2..]
        .iter()
        .cloned()
        .chain(["next".into(), "late".into()])
        .collect();
    delete(machine, &rest)
}

/// Creates two pods that get no address, one by the scheduler, one that is on the node already, and shows why they
/// wait.
fn reasons(machine: &mut Machine) -> Result<()> {
    create(machine, "next", None)?;
    create(machine, "late", Some(LocalNode::NAME))?;
    let scheduled = "jsonpath={.status.conditions[?(@.type==\"PodScheduled\")].message}";
    let (mut next, mut late) = (String::new(), String::new());
    wait_until(machine, "the waiting pods have reasons", |node| {
        next = node.kubectl(&["get", "pod", "next", "-o", scheduled])?;
        let events = ["get", "events", "--field-selector", "involvedObject.name=late"];
        late = node.kubectl(&[&events[..], &["-o", "jsonpath={.items[*].message}"]].concat())?;
        Ok(next.contains("untolerated taint") && late.contains("network small has no free IPv4"))
    })?;
    // The scheduler does not name the taint, but the node has no other one.
    let keys = ["get", "node", LocalNode::NAME, "-o", "jsonpath={.spec.taints[*].key}"];
    wait_until(machine, "the node has no other taint", |node| {
        let keys = node.kubectl(&keys)?;
        ensure!(keys == "kni.dev/addresses-exhausted", "taints {keys:?}");
        Ok(true)
    })?;
    let available = "jsonpath={.status.conditions[?(@.type==\"AddressesAvailable\")]['status','message']}";
    let mut condition = String::new();
    wait_until(machine, "the network reports it", |node| {
        condition = node.kubectl(&["get", "podnetwork", "small", "-o", available])?;
        Ok(condition.starts_with("False"))
    })?;
    println!("next is Pending: {next}\nlate is Pending: {late}\nPodNetwork small, AddressesAvailable: {condition}");
    Ok(())
}

fn create(machine: &Machine, name: &str, node: Option<&str>) -> Result<()> {
    let not_ready = json!({
        "key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
        "tolerationSeconds": GRACE,
    });
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "tolerations": [not_ready],
            "containers": [{
                "name": "serves", "image": image::PROBE, "imagePullPolicy": "Never",
                "args": ["serve", "--tcp", "7000", "--name", name],
            }],
        },
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = Value::from(node);
    }
    machine.local.apply(&pod)
}

fn delete(machine: &Machine, names: &[String]) -> Result<()> {
    let names = names.iter().map(String::as_str);
    let command: Vec<&str> = ["delete", "pod", "--wait=true"].into_iter().chain(names).collect();
    machine.local.kubectl(&command).map(drop)
}

fn phase(node: &LocalNode, pod: &str, wanted: &str) -> Result<bool> {
    let phase = node.kubectl(&["get", "pod", pod, "-o", "jsonpath={.status.phase}"])?;
    Ok(phase == wanted)
}

fn wait_until(machine: &mut Machine, what: &str, holds: impl FnMut(&LocalNode) -> Result<bool>) -> Result<()> {
    let waited = machine.local.wait(what, PATIENCE, holds);
    waited.with_context(|| machine.local.kubectl(&["describe", "nodes,pods"]).unwrap_or_default())
}
