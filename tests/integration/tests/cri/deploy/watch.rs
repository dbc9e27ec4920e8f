//! Runs pods that continuously probe a server, over TCP and UDP and both families, and report losses.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::scene::{PATIENCE, PORT, Scene, pod};

/// The name of a probing pod, and its arguments.
const WATCHES: [(&str, &str, usize); 4] = [
    ("tcp-4", "ping-loop", 0),
    ("tcp-6", "ping-loop", 1),
    ("udp-4", "udp-loop", 0),
    ("udp-6", "udp-loop", 1),
];

/// Starts the pods.
pub(crate) fn start(scene: &Scene, server: &str) -> Result<()> {
    let addresses = scene.addresses(server)?;
    let port = PORT.to_string();
    let pods: Result<Vec<Value>> = WATCHES
        .iter()
        .map(|(name, task, family)| {
            let address = addresses.get(*family).context("a server with both families")?;
            Ok(pod(name, &json!({}), &[task, &address.to_string(), &port]))
        })
        .collect();
    scene.create(&pods?)
}

/// Waits until each has received answers for another second. No datagram and no connection was lost so far.
pub(crate) fn nothing_lost(scene: &mut Scene, when: &str) -> Result<()> {
    for (name, task, _) in WATCHES {
        let fields: &[(&str, u64)] = match task {
            "udp-loop" => &[("lost", 0), ("unsent", 0)],
            _ => &[("connections", 1), ("broken", 0), ("wrong", 0)],
        };
        let mut first = None;
        let what = format!("{name} sees more answers ({when})");
        let outcome = scene.machine.local.wait(&what, PATIENCE, |node| {
            let report = node.kubectl(&["logs", name, "--tail=1"])?;
            let report: Value = serde_json::from_str(&report).with_context(|| format!("report {report:?}"))?;
            for (field, expected) in fields {
                assert_eq!(report[field], *expected, "{name}, {when}: {report}");
            }
            let seen = report["answers"].as_u64().context("no count")?;
            Ok(seen > *first.get_or_insert(seen))
        });
        outcome.with_context(|| scene.agents())?;
    }
    Ok(())
}

/// The reports of all pods, for the output of the test.
pub(crate) fn report(scene: &Scene) -> Result<String> {
    let lines = WATCHES.iter().map(|(name, ..)| {
        let last = scene.local().kubectl(&["logs", name, "--tail=1"])?;
        Ok(format!("{name} {}\n", last.trim()))
    });
    lines.collect()
}
