//! Tests a kubelet that makes the networks of pods by KNI, with a containerd that leaves them to it.

mod adoption;
mod configuration;
mod e2e;
mod figures;
mod kills;
mod namespaces;
mod quiet;
mod readiness;
mod upstream;
mod userns;
mod workloads;

use std::{fs, path::Path};

use anyhow::{Result, ensure};
use kni_integration::require;
use kni_local_node::{LocalNode, Namespaces};
use serde_json::json;

use super::{
    pods::use_pods,
    restarts::restart_all,
    scene::{PATIENCE, PORT, Scene, server},
};

/// Where the kubelet keeps what it must take back.
const ATTEMPTS: &str = "/var/lib/kubelet/kni/attempts";

#[test]
fn pods_have_what_they_have_by_cni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::by_kni("kni-pods")?;
    use_pods(&mut scene)?;
    a_pod_without_a_network_runs(&mut scene)?;
    nothing_is_left(&mut scene)
}

#[test]
fn restarts_cost_no_traffic_by_kni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    restart_all(&mut Scene::by_kni("kni-restarts")?)
}

fn a_pod_without_a_network_runs(scene: &mut Scene) -> Result<()> {
    let mut pod = server("alone", &json!({}));
    pod["metadata"]["annotations"] = json!({ "kni.dev/network": "none" });
    scene.create(&[pod])?;
    ensure!(
        scene.get("pod/alone", "{.status.podIP}")?.is_empty(),
        "it has an address"
    );
    let itself = scene.ask("alone", "127.0.0.1", PORT, "tcp")?;
    ensure!(itself == "alone", "its loopback interface does not work: {itself}");
    Ok(())
}

/// Deletes every pod. Neither the kubelet nor the agent keeps anything of them, and no file of CNI is installed.
fn nothing_is_left(scene: &mut Scene) -> Result<()> {
    nothing_is_left_of_pods(scene)?;
    let left = files_in(scene.local().inside(), &LocalNode::cni_folders())?;
    ensure!(left.is_empty(), "files of CNI: {left:?}");
    Ok(())
}

/// Deletes every pod. Neither the kubelet nor the agent keeps anything of them; what a killed kubelet has left is taken
/// back within 30 s.
fn nothing_is_left_of_pods(scene: &mut Scene) -> Result<()> {
    scene.local().kubectl(&["delete", "pod", "--all", "--grace-period=1"])?;
    scene.machine.at_rest()?;
    let inside = scene.local().inside().clone();
    scene.machine.local.wait("nothing is left of pods", PATIENCE, |_| {
        let left = files_in(&inside, &[ATTEMPTS.as_ref(), "/run/netns".as_ref()])?;
        ensure!(left.is_empty(), "left: {left:?}");
        Ok(true)
    })
}

fn files_in(inside: &Namespaces, folders: &[&Path]) -> Result<Vec<String>> {
    inside.enter(|| -> Result<Vec<String>> {
        let mut files = Vec::new();
        for folder in folders {
            for entry in fs::read_dir(folder)? {
                files.push(entry?.path().display().to_string());
            }
        }
        Ok(files)
    })?
}
