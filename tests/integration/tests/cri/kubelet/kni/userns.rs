//! Tests pods that have a user namespace of their own (`hostUsers: false`), by KNI and by CNI.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use serde_json::json;

use super::{
    super::scene::{PORT, Scene, server},
    nothing_is_left,
};

/// A pod in a user namespace.
const APART: &str = "apart";
/// Another one, with other ids.
const OTHER: &str = "other";
/// A pod with the users of the node.
const USUAL: &str = "usual";
/// A setting of a network namespace that a pod may ask for, and its value in [`APART`].
const ASKED: [&str; 2] = ["net.ipv4.ip_unprivileged_port_start", "77"];

#[test]
fn pods_with_user_namespaces_run_by_kni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::by_kni("kni-userns")?;
    use_pods(&scene)?;
    nothing_is_left(&mut scene)
}

/// The comparison: what the pods of the other test must have.
#[test]
fn pods_with_user_namespaces_run_by_cni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let scene = Scene::start("cni-userns")?;
    use_pods(&scene)?;
    scene.local().kubectl(&["delete", "pod", "--all", "--grace-period=1"])?;
    scene.machine.at_rest()?;
    let left = scene
        .local()
        .inside()
        .enter(|| fs::read_dir("/run/netns").map(Iterator::count))??;
    ensure!(left == 0, "{left} network namespaces are left");
    Ok(())
}

fn use_pods(scene: &Scene) -> Result<()> {
    let [setting, value] = ASKED;
    let apart = [APART, OTHER].map(|name| {
        let mut pod = server(name, &json!({}));
        pod["spec"]["hostUsers"] = json!(false);
        // The capability is one of the pod's user namespace. Settings of the kernel are read-only in a masked procfs.
        pod["spec"]["containers"][0]["securityContext"] =
            json!({ "procMount": "Unmasked", "capabilities": { "add": ["NET_ADMIN"] } });
        if name == APART {
            pod["spec"]["securityContext"] = json!({ "sysctls": [{ "name": setting, "value": value }] });
        }
        pod
    });
    scene.create(&[&apart[..], &[server(USUAL, &json!({}))]].concat())?;
    pods_reach_each_other(scene)?;
    ids_are_those_of_the_pod(scene)?;
    the_network_namespace_belongs_to_the_pod(scene)
}

fn pods_reach_each_other(scene: &Scene) -> Result<()> {
    for to in [APART, OTHER, USUAL] {
        let addresses = scene.addresses(to)?;
        let families: Vec<bool> = addresses.iter().map(std::net::IpAddr::is_ipv4).collect();
        ensure!(families == [true, false], "{to} has {addresses:?}");
        for from in [APART, OTHER, USUAL] {
            for (address, protocol) in addresses
                .iter()
                .flat_map(|address| [(address, "tcp"), (address, "udp")])
            {
                let heard = scene.ask(from, &address.to_string(), PORT, protocol)?;
                ensure!(
                    heard == to,
                    "{from} asks {to} by {protocol} at {address} and hears {heard}"
                );
            }
        }
    }
    Ok(())
}

fn ids_are_those_of_the_pod(scene: &Scene) -> Result<()> {
    let usual = first_id(scene, USUAL)?;
    ensure!(usual == 0, "root of {USUAL} is user {usual} of the node");
    let [apart, other] = [first_id(scene, APART)?, first_id(scene, OTHER)?];
    ensure!(
        apart > 0 && other > 0 && apart != other,
        "root of {APART} and {OTHER} is user {apart} and {other} of the node"
    );
    Ok(())
}

/// The user of the node that is root in a pod.
fn first_id(scene: &Scene, pod: &str) -> Result<u32> {
    let map = show(scene, pod, "/proc/self/uid_map")?;
    // Pod's first id, node's first id, number of ids.
    let outer = map.split_whitespace().nth(1).context("a mapping")?;
    outer.parse().with_context(|| format!("mapping {map:?}"))
}

/// Only then can root of the pod mount a sysfs of it, and change its settings with a capability of the pod.
fn the_network_namespace_belongs_to_the_pod(scene: &Scene) -> Result<()> {
    let links = show(scene, APART, "/sys/class/net")?;
    let mut links: Vec<&str> = links.lines().collect();
    links.sort_unstable();
    ensure!(links == ["eth0", "lo"], "the sysfs of {APART} shows {links:?}");

    let [setting, value] = ASKED;
    let asked = format!("/proc/sys/{}", setting.replace('.', "/"));
    let found = show(scene, APART, &asked)?;
    ensure!(found.trim() == value, "{setting} of {APART} is {found:?}");

    for family in ["ipv4/conf", "ipv6/conf"] {
        let setting = format!("/proc/sys/net/{family}/eth0/accept_redirects");
        let before = show(scene, OTHER, &setting)?;
        let changed = if before.trim() == "0" { "1" } else { "0" };
        scene
            .local()
            .kubectl(&["exec", OTHER, "--", "/kni-probe", "write", &setting, changed])?;
        let after = show(scene, OTHER, &setting)?;
        ensure!(after.trim() == changed, "{setting} of {OTHER} is {after:?}");
        let beside = show(scene, APART, &setting)?;
        ensure!(beside == before, "{setting} of {APART} is {beside:?}");
    }
    Ok(())
}

/// A file of a pod, or the names in a folder.
fn show(scene: &Scene, pod: &str, path: &str) -> Result<String> {
    scene.local().kubectl(&["exec", pod, "--", "/kni-probe", "show", path])
}
