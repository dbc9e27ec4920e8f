//! Tests that kills of kubelet, containerd and agent at random moments of the lives of pods leave nothing, and that
//! all pods are right in the end.

use std::{collections::BTreeMap, net::IpAddr, thread, time::Duration};

use anyhow::{Result, ensure};
use kni_integration::{dice::Dice, long, require};
use kni_local_node::Part;
use serde_json::{Value, json};

use super::{
    super::scene::{PATIENCE, PORT, Scene, server},
    nothing_is_left,
};

/// Pods that are created at once.
const BATCH: usize = 20;
/// Kills during the creation of a batch, and as many during its removal.
const KILLS: usize = 2;

#[test]
fn kills_at_random_leave_nothing_and_all_pods_are_right() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let seed = std::env::var("KNI_STORM_SEED").map_or(Ok(4_410), |seed| seed.parse())?;
    println!("KNI_STORM_SEED={seed}");
    let mut dice = Dice(seed);
    let mut scene = Scene::by_kni("kni-kills")?;
    scene.create(&[server("first", &json!({}))])?;
    let first = scene.addresses("first")?;
    let rounds = if long() { 10 } else { 1 };
    for round in 0..rounds {
        let names: Vec<String> = (0..BATCH).map(|number| format!("pod-{round}-{number}")).collect();
        let pods: Vec<Value> = names.iter().map(|name| server(name, &json!({}))).collect();
        scene
            .local()
            .apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }))?;
        kill_some(&mut scene, &mut dice)?;
        scene.wait_for_pods("condition=Ready")?;
        all_are_right(&scene, &names)?;
        let delete = [&["delete", "pod", "--wait=false"][..], &strs(&names)].concat();
        scene.local().kubectl(&delete)?;
        kill_some(&mut scene, &mut dice)?;
        scene.machine.local.wait("the batch is gone", PATIENCE, |node| {
            Ok(node.kubectl(&["get", "pods", "-o", "name"])?.trim() == "pod/first")
        })?;
        println!("round {round}: {BATCH} pods lived through {} kills", 2 * KILLS);
    }
    ensure!(scene.addresses("first")? == first, "the first pod has other addresses");
    let restarts = "{.status.containerStatuses[0].restartCount}";
    ensure!(scene.get("pod/first", restarts)? == "0", "the first pod was restarted");
    nothing_is_left(&mut scene)
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn kill_some(scene: &mut Scene, dice: &mut Dice) -> Result<()> {
    for _ in 0..KILLS {
        thread::sleep(Duration::from_millis(dice.below(2500)));
        match dice.below(3) {
            0 => kill_part(scene, Part::Kubelet)?,
            1 => kill_part(scene, Part::Containerd)?,
            _ => {
                println!("kill -9 of the agent");
                scene.agent.kill9()?;
                scene.agent.restart()?;
            }
        }
    }
    Ok(())
}

fn kill_part(scene: &mut Scene, part: Part) -> Result<()> {
    println!("kill -9 of {}", part.program());
    scene.machine.local.kill(part)?;
    scene.machine.local.start(part)?;
    scene.machine.local.wait_for_containerd()
}

/// Each pod answers at addresses of its own, of both families.
fn all_are_right(scene: &Scene, names: &[String]) -> Result<()> {
    let mut owners: BTreeMap<IpAddr, &str> = BTreeMap::new();
    for name in names {
        let addresses = scene.addresses(name)?;
        ensure!(addresses.len() == 2, "{name} has {addresses:?}");
        for address in addresses {
            if let Some(other) = owners.insert(address, name) {
                anyhow::bail!("{address} is that of {other} and of {name}");
            }
        }
    }
    for (address, name) in &owners {
        let answer = scene.ask("first", &address.to_string(), PORT, "tcp")?;
        ensure!(answer == *name, "{answer} answers at {address}, which is {name}'s");
    }
    Ok(())
}
