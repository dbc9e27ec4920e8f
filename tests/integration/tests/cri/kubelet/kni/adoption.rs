//! Tests that a node with running pods changes from CNI to KNI: the pods keep their networks, and later ones get theirs
//! by KNI. A long test. That pods keep their networks when kubelet and containerd start again is shown by `restarts` in
//! every run.

use std::{collections::BTreeMap, fs, net::IpAddr};

use anyhow::{Result, ensure};
use kni_integration::{machine, require};
use kni_local_node::{LocalNode, Part};
use serde_json::json;

use super::{
    super::{
        restarts::{wait_for_more, watch},
        scene::{PORT, Scene, server},
    },
    nothing_is_left,
};

/// Pods that were attached by CNI.
const OLD: [&str; 4] = ["server", "watch-4", "watch-6", "leaves"];

#[test]
#[ignore = "long: a node changes its runtime, which is done once in the life of a node"]
fn a_node_with_pods_changes_from_cni_to_kni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::start("kni-adoption")?;
    scene.create(&["server", "leaves"].map(|name| server(name, &json!({}))))?;
    watch(&scene)?;
    let before = addresses(&scene)?;

    // kube-proxy ends when its file is written, whatever is in it.
    for part in [Part::Kubelet, Part::KubeProxy, Part::Containerd] {
        scene.machine.local.stop(part)?;
    }
    scene.machine.local.use_kni(machine::kni()?)?;
    let folders = LocalNode::cni_folders();
    scene.local().inside().enter(|| -> std::io::Result<()> {
        for file in folders.iter().flat_map(fs::read_dir).flatten() {
            fs::remove_file(file?.path())?;
        }
        Ok(())
    })??;
    for part in [Part::Containerd, Part::Kubelet, Part::KubeProxy] {
        scene.machine.local.start(part)?;
        scene.machine.local.wait_for_containerd()?;
    }
    // The status of the node is that of the kubelet before until the new one writes it.
    scene.create(&[server("new", &json!({}))])?;
    scene.machine.local.wait_ready(true)?;
    wait_for_more(&mut scene)?;
    let log = scene.agent.log();
    ensure!(
        log.lines()
            .any(|line| line.contains("method=\"CreateNetwork\"") && line.contains("pod=\"default/new\"")),
        "the new pod did not get its network by KNI:\n{log}"
    );
    all_answer_all(&scene, &before)?;

    // Of a pod that was attached by CNI nothing is left when it goes.
    scene
        .local()
        .kubectl(&["delete", "pod", "leaves", "--grace-period=1"])?;
    scene.create(&[server("last", &json!({}))])?;
    wait_for_more(&mut scene)?;
    for name in ["server", "watch-4", "watch-6"] {
        let restarts = scene.get(&format!("pod/{name}"), "{.status.containerStatuses[0].restartCount}")?;
        ensure!(restarts == "0", "{name} was restarted");
    }
    nothing_is_left(&mut scene)
}

fn addresses(scene: &Scene) -> Result<BTreeMap<&'static str, Vec<IpAddr>>> {
    OLD.into_iter().map(|name| Ok((name, scene.addresses(name)?))).collect()
}

/// Pods of both kinds ask each other, and the earlier ones have the addresses that they had.
fn all_answer_all(scene: &Scene, before: &BTreeMap<&'static str, Vec<IpAddr>>) -> Result<()> {
    let now = addresses(scene)?;
    ensure!(now == *before, "addresses were {before:?} and are {now:?}");
    for (from, to) in [("server", "new"), ("new", "server"), ("new", "leaves")] {
        for address in scene.addresses(to)? {
            for protocol in ["tcp", "udp"] {
                let heard = scene.ask(from, &address.to_string(), PORT, protocol)?;
                ensure!(heard == to, "{from} asks {to} at {address} and hears {heard}");
            }
        }
    }
    Ok(())
}
