use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{Manifest, long, require};

use super::scene::{Call, Scene};

/// As many calls at once.
fn pods() -> usize {
    if long() { 150 } else { 40 }
}

/// By how much the agent's memory may grow while it serves the pods, in kB: for each pod, and for all. Programs and
/// maps belong to the kernel.
const MAX_GROWTH: [u64; 2] = [512, 32 * 1024];

/// A line of `/proc/PID/status`, in kB.
fn memory(pid: u32, line: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let found = status
        .lines()
        .find_map(|l| l.strip_prefix(line))
        .context("no such line")?;
    Ok(found.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn b17_many_adds_at_once() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::with("many", Manifest::overlapping()).await?;
    let pods = pods();
    let calls: Vec<Call> = (0..pods)
        .map(|index| Call::new(&format!("c{index}"), &format!("pod{index}")))
        .collect();
    for index in 0..pods {
        scene.netns(&format!("pod{index}"))?;
    }
    let before = scene.stage.picture().await?;
    let rested = memory(scene.stage.agent.pid(), "VmRSS")?;
    let outcomes = std::thread::scope(|scope| -> Result<Vec<_>> {
        let running: Vec<_> = calls
            .iter()
            .map(|call| scope.spawn(|| scene.call("ADD", call)))
            .collect();
        running.into_iter().map(|one| one.join().expect("no panic")).collect()
    })?;
    let mut addresses = std::collections::BTreeSet::new();
    for outcome in &outcomes {
        let result = outcome.result();
        for ip in result["ips"].as_array().context("no addresses")? {
            assert!(addresses.insert(ip["address"].to_string()), "{} twice", ip["address"]);
        }
    }
    assert_eq!(addresses.len(), 2 * pods);
    let mut took: Vec<Duration> = outcomes.iter().map(|outcome| outcome.took).collect();
    took.sort();
    let (p50, p99) = (took[pods / 2], took[pods * 99 / 100]);
    let peak = memory(scene.stage.agent.pid(), "VmHWM")?;
    println!("{pods} ADDs at once: p50 {p50:?}, p99 {p99:?}; the agent's memory {rested} kB, peak {peak} kB");
    let most = rested + MAX_GROWTH[0] * u64::try_from(pods)? + MAX_GROWTH[1];
    assert!(peak < most, "{peak} kB, {rested} kB before, at most {most} kB");
    std::thread::scope(|scope| -> Result<()> {
        let running: Vec<_> = calls.iter().map(|call| scope.spawn(|| scene.del(call))).collect();
        running.into_iter().try_for_each(|one| one.join().expect("no panic"))
    })?;
    scene.stage.assert_as(&before).await
}

/// Calls of [`adds_one_after_the_other_are_quick`].
const ROUNDS: usize = 40;

#[tokio::test(flavor = "multi_thread")]
async fn adds_one_after_the_other_are_quick() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("sequence").await?;
    let (mut took, mut nothing) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let name = format!("pod{round}");
        scene.netns(&name)?;
        let outcome = scene.call("ADD", &Call::new(&name, &name))?;
        outcome.result();
        took.push(outcome.took);
        nothing.push(scene.call("VERSION", &Call::new(&name, &name))?.took);
    }
    took.sort();
    println!(
        "{ROUNDS} ADDs in sequence: p50 {:?}, p90 {:?}",
        took[ROUNDS / 2],
        took[ROUNDS * 9 / 10]
    );
    // An upper bound that only a defect exceeds; kni-bench measures the cost. Calls that do nothing, each beside one of
    // these, show how busy the machine is.
    nothing.sort();
    let (add, nothing) = (took[ROUNDS / 2], nothing[ROUNDS / 2]);
    assert!(
        add < Duration::from_millis(400) + nothing * 20,
        "{took:?}, calls that do nothing {nothing:?}"
    );
    for round in 0..ROUNDS {
        let name = format!("pod{round}");
        scene.del(&Call::new(&name, &name))?;
    }
    Ok(())
}
