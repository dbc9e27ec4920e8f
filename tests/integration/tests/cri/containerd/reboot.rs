//! Tests a node without its namespaces, as after a reboot: the runtime sends DEL without one.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Manifest, eventually_sync, patience, require};
use kni_local_node::Part;
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::scene::{Running, Scene, pod};

/// The number of pod addresses: 10.20.0.0/29 without the network, broadcast and gateway addresses.
const PODS: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn no_address_stays_leased_when_the_namespaces_are_gone() -> Result<()> {
    require!(root, netns, bpf, machine);
    let small = Manifest::network("small", &["10.20.0.0/29"]);
    let manifests = Manifest::overlapping().into_iter().chain([small]).collect();
    let mut scene = Scene::start("containerd-reboot", manifests).await?;
    let annotations = [("kni.dev/network", "small")];
    let mut before: Vec<Running> = Vec::new();
    // Repeats until the network has no free address.
    let refusal = loop {
        let sandbox = pod(&format!("before-{}", before.len()), &annotations);
        match scene.run(sandbox).await {
            Ok(running) => before.push(running),
            Err(error) => break error,
        }
        ensure!(before.len() < 8, "a /29 has no ninth address");
    };
    ensure!(
        before.len() >= PODS,
        "{} pods fill the network: {refusal:#}",
        before.len()
    );

    scene.machine.local.stop(Part::Containerd)?;
    end_pods(&scene)?;
    remove_namespaces(&scene)?;
    scene.machine.local.start(Part::Containerd)?;
    scene.machine.local.wait_for_containerd()?;
    scene.cri = scene.machine.local.cri().await?;

    scene.remove_all(&before).await?;
    let again: Vec<_> = (0..before.len())
        .map(|number| pod(&format!("after-{number}"), &annotations))
        .collect();
    let after = scene.run_all(again).await?;
    let addresses = |pods: &[Running]| {
        pods.iter()
            .flat_map(|pod| pod.addresses.clone())
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(addresses(&after), addresses(&before), "every address is in use again");
    assert_eq!(scene.ask(&after[0], after[1].addresses[0], "tcp").await?, "after-1");
    scene.remove_all(&after).await
}

/// Kills every process of every pod, and their shims.
fn end_pods(scene: &Scene) -> Result<()> {
    eventually_sync(patience(), || {
        let left = processes(scene)?;
        for pid in &left {
            // The signal fails for a process that has just exited.
            let _ended = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        ensure!(left.is_empty(), "processes {left:?} do not end");
        Ok(())
    })
}

/// The processes in the node's control group while containerd is stopped: pods and shims.
fn processes(scene: &Scene) -> Result<BTreeSet<i32>> {
    let roots = fs::read_dir("/sys/fs/cgroup").context("control groups")?.flatten();
    let roots = roots.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
    let mut found = BTreeSet::new();
    let mut groups: Vec<PathBuf> = roots.map(|root| root.join(scene.machine.local.group())).collect();
    while let Some(group) = groups.pop() {
        let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        found.extend(members.lines().filter_map(|line| line.parse::<i32>().ok()));
        let below = fs::read_dir(&group).into_iter().flatten().flatten();
        groups.extend(below.map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    Ok(found)
}

/// Removes the mounts of the pods' namespaces, which destroys the namespaces.
fn remove_namespaces(scene: &Scene) -> Result<()> {
    scene.machine.node.enter(|| {
        for entry in fs::read_dir("/run/netns").context("named namespaces")? {
            let path = entry?.path();
            umount2(&path, MntFlags::MNT_DETACH).with_context(|| path.display().to_string())?;
            fs::remove_file(&path)?;
        }
        Ok(())
    })?
}
