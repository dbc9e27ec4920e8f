//! Tests restarts of kubelet, containerd and agent during traffic between pods.

use anyhow::{Context as _, Result};
use kni_integration::require;
use kni_local_node::Part;
use serde_json::{Value, json};

use super::scene::{PATIENCE, PORT, Scene, container, pod, server};

#[test]
fn restarts_cost_no_traffic() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    restart_all(&mut Scene::start("kubelet-restarts")?)
}

/// Restarts every part of a new node during traffic.
pub(crate) fn restart_all(scene: &mut Scene) -> Result<()> {
    scene.create(&[server("server", &json!({}))])?;
    watch(scene)?;
    wait_for_more(scene)?;

    scene.machine.local.stop(Part::Kubelet)?;
    wait_for_more_traffic_of(scene, Part::Kubelet)?;
    scene.machine.local.kill(Part::Containerd)?;
    wait_for_more_traffic_of(scene, Part::Containerd)?;
    scene.agent.terminate()?;
    scene.agent.restart()?;
    wait_for_more(scene)?;
    scene.agent.kill9()?;
    scene.agent.restart()?;
    wait_for_more(scene)?;

    // The kubelet accepts the existing state.
    scene.machine.local.wait_ready(true)?;
    scene.create(&[server("late", &json!({}))])?;
    for address in scene.addresses("late")? {
        assert_eq!(scene.ask("server", &address.to_string(), PORT, "tcp")?, "late");
    }
    for name in ["server", "watch-4", "watch-6"] {
        let restarts = scene.get(&format!("pod/{name}"), "{.status.containerStatuses[0].restartCount}")?;
        assert_eq!(restarts, "0", "{name} was restarted");
    }
    Ok(())
}

/// Creates two pods with a connection each to pod `server`, by either family.
pub(crate) fn watch(scene: &Scene) -> Result<()> {
    let port = PORT.to_string();
    let mut watching = Vec::new();
    for (name, address) in ["watch-4", "watch-6"].into_iter().zip(scene.addresses("server")?) {
        let watch = container("watches", &["ping-loop", &address.to_string(), &port]);
        watching.push(pod(name, &json!({}), &json!([watch])));
    }
    scene.create(&watching)
}

/// Starts the stopped part, and waits for traffic afterwards.
fn wait_for_more_traffic_of(scene: &mut Scene, part: Part) -> Result<()> {
    scene.machine.local.start(part)?;
    scene.machine.local.wait_for_containerd()?;
    scene.machine.local.wait_ready(true)?;
    wait_for_more(scene)
}

/// Both connections are the original ones, have lost nothing, and continue.
pub(crate) fn wait_for_more(scene: &mut Scene) -> Result<()> {
    for name in ["watch-4", "watch-6"] {
        let mut first = None;
        scene
            .machine
            .local
            .wait(&format!("{name} sees more answers"), PATIENCE, |node| {
                let report = node.kubectl(&["logs", name, "--tail=1"])?;
                let report: Value = serde_json::from_str(&report).with_context(|| format!("report {report:?}"))?;
                for (field, expected) in [("connections", 1), ("broken", 0), ("wrong", 0)] {
                    assert_eq!(report[field], expected, "{name}: {report}");
                }
                let seen = report["answers"].as_u64().context("no count")?;
                Ok(seen > *first.get_or_insert(seen))
            })?;
    }
    Ok(())
}
