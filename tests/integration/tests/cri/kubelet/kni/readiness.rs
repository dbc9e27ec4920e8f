//! Tests the readiness of the node by KNI: the agent's answer counts, and its silence only after a grace period.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Agent, Machine, Manifest, agent::knictl_binary, eventually_sync, long, machine, patience, require, stage,
};
use serde_json::{Value, json};

use super::{
    super::{
        pods::{host_network, probed, service},
        scene::{PORT, Scene, container, pod, server},
    },
    ATTEMPTS,
};

/// How long an agent that does not answer leaves the node ready.
const GRACE: Duration = Duration::from_secs(20);
/// How often the kubelet asks the agent in the test of the grace.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// The kubelet's default.
const DEFAULT_STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// Answers of each kind with the default intervals.
const ROUNDS: u32 = 8;
/// How long the node is observed after a start or a stop.
const SETTLING: Duration = Duration::from_secs(3);

#[test]
fn the_node_is_as_ready_as_the_agent_says() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut kni = machine::kni()?;
    kni.grace_seconds = u32::try_from(GRACE.as_secs())?;
    kni.status_seconds = u32::try_from(STATUS_INTERVAL.as_secs())?;
    let mut machine = Machine::with_kni("kni-ready", kni)?;
    stage::forwarding(&machine.node)?;
    machine.local.wait("the kubelet names the socket", patience(), |node| {
        let condition = node.ready_condition()?;
        Ok(condition.starts_with("False KubeletNotReady") && condition.contains("/run/kni/kni.sock"))
    })?;
    let agent = Agent::start_unready(&machine.node, Machine::agent_options(Vec::new()))?;
    machine
        .local
        .wait("an agent without a network is not ready", patience(), |node| {
            let condition = node.ready_condition()?;
            Ok(condition.starts_with("False") && condition.contains("has no network"))
        })?;
    Manifest::apply(&Manifest::overlapping(), &machine.node)?;
    machine.local.wait("the network is there", patience(), |node| {
        Ok(node.ready_condition()?.starts_with("True"))
    })?;
    Manifest::remove(&Manifest::overlapping(), &machine.node)?;
    machine.local.wait("the networks are gone", patience(), |node| {
        let condition = node.ready_condition()?;
        Ok(condition.starts_with("False") && condition.contains("has no network"))
    })?;
    Manifest::apply(&Manifest::overlapping(), &machine.node)?;
    machine.local.wait("the networks are back", patience(), |node| {
        Ok(node.ready_condition()?.starts_with("True"))
    })?;
    answers_arrive(&mut machine, patience())?;
    let mut scene = Scene { agent, machine };
    let ending = server("ending", &json!({}));
    scene.create(&[probed("web-1"), server("client", &json!({})), ending, service()])?;
    let before = ready_slices(&mut scene)?;
    ensure!(before.contains(&scene.addresses("web-1")?[0].to_string()), "{before}");

    let killed = Instant::now();
    scene.agent.kill9()?;
    stays_ready(&scene, &before, killed)?;
    containers_and_host_network_work(&mut scene)?;
    a_new_pod_reports_what_it_waits_for(&mut scene)?;
    a_pod_ends(&scene)?;
    not_ready_after_the_grace(&mut scene, killed)?;
    scene.agent.restart()?;
    scene.machine.local.wait("the agent is back", patience(), |node| {
        Ok(node.ready_condition()?.starts_with("True"))
    })?;
    scene.wait_for_pods("condition=Ready")?;
    let late = scene.addresses("late")?[0].to_string();
    ensure!(scene.ask("client", &late, PORT, "tcp")? == "late", "it is not reached");
    the_ended_pod_leaves_nothing(&scene)
}

/// The grace begins with the last answer of the agent.
fn not_ready_after_the_grace(scene: &mut Scene, killed: Instant) -> Result<()> {
    let away = "the agent has been away for long";
    let mut silence = None;
    scene.machine.local.wait(away, GRACE + patience(), |node| {
        let condition = node.ready_condition()?;
        silence = silent_for(&condition);
        Ok(condition.starts_with("False") && silence.is_some())
    })?;
    println!(
        "NotReady {:?} after the agent was killed, with a grace of {GRACE:?}",
        killed.elapsed()
    );
    // Only the kubelet knows when the grace began: with the last answer that it got, before the kill.
    ensure!(silence >= Some(GRACE), "the kubelet gave up after {silence:?}");
    Ok(())
}

/// Its kubelet does not wait for the agent to end a pod.
fn a_pod_ends(scene: &Scene) -> Result<()> {
    let begun = Instant::now();
    let timeout = format!("--timeout={}s", patience().as_secs());
    scene
        .local()
        .kubectl(&["delete", "pod", "ending", "--grace-period=1", &timeout])?;
    println!(
        "a pod ended {:.1?} after its deletion, without the agent",
        begun.elapsed()
    );
    ensure!(
        !attempts_of(scene, "ending")?.is_empty(),
        "the kubelet has forgotten its network"
    );
    Ok(())
}

/// The agent that is back removes the network of the pod that has ended meanwhile.
fn the_ended_pod_leaves_nothing(scene: &Scene) -> Result<()> {
    let begun = Instant::now();
    let knictl = scene.machine.node.install(&knictl_binary()?)?;
    let knictl = knictl.to_str().context("not UTF-8")?;
    eventually_sync(patience(), || {
        let listed = scene.machine.node.run(knictl, &["interfaces"])?;
        ensure!(listed.contains("client") && !listed.contains("ending"), "{listed}");
        let noted = attempts_of(scene, "ending")?;
        ensure!(noted.is_empty(), "the kubelet notes {noted:?}");
        Ok(())
    })?;
    println!(
        "its network was removed {:.1?} after the pods were ready again",
        begun.elapsed()
    );
    Ok(())
}

/// The kubelet's files about a pod.
fn attempts_of(scene: &Scene, pod: &str) -> Result<Vec<String>> {
    scene.local().inside().enter(|| -> Result<Vec<String>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(ATTEMPTS)? {
            let path = entry?.path();
            let content = fs::read_to_string(&path)?;
            if content.contains(&format!("\"name\":\"{pod}\"")) {
                found.push(path.display().to_string());
            }
        }
        Ok(found)
    })?
}

/// The time without an answer of the agent in the kubelet's condition of the node, to the second.
fn silent_for(condition: &str) -> Option<Duration> {
    let (_, text) = condition.split_once("has not answered for ")?;
    let (time, _) = text.split_once(": ")?;
    let (minutes, seconds) = time.split_once('m').unwrap_or(("0", time));
    let seconds: u64 = seconds.strip_suffix('s')?.parse().ok()?;
    Some(Duration::from_secs(60 * minutes.parse::<u64>().ok()? + seconds))
}

/// The node is ready for half of the grace, or until the kubelet has had no answer for all of it: on a busy machine the
/// last one may be older than the kill.
fn stays_ready(scene: &Scene, before: &str, killed: Instant) -> Result<()> {
    loop {
        let looked = unchanged(scene, before);
        if killed.elapsed() >= GRACE / 2 || silent_for(&scene.local().ready_condition()?) >= Some(GRACE) {
            return Ok(());
        }
        looked?;
        thread::sleep(Duration::from_millis(500));
    }
}

/// The agent answers that its network is not ready, and later that it is. Returns how long each took to be the state of
/// the node.
fn answers_arrive(machine: &mut Machine, patience: Duration) -> Result<[Duration; 2]> {
    let disabled = Manifest::overlapping().swap_remove(0).spec("enabled: false");
    let begin = Instant::now();
    Manifest::apply(&[disabled], &machine.node)?;
    machine.local.wait("the network is disabled", patience, |node| {
        let condition = node.ready_condition()?;
        let reason = "network \"default\" of the network runtime is not ready: disabled (spec.enabled: false)";
        Ok(condition.starts_with("False KubeletNotReady") && condition.contains(reason))
    })?;
    let refused = begin.elapsed();
    let begin = Instant::now();
    Manifest::apply(&Manifest::overlapping(), &machine.node)?;
    machine.local.wait("the network is enabled", patience, |node| {
        Ok(node.ready_condition()?.starts_with("True"))
    })?;
    Ok([refused, begin.elapsed()])
}

/// With the kubelet's own intervals and grace.
#[test]
fn an_upgrade_takes_no_pod_out_of_its_service() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::by_kni("kni-upgrade")?;
    scene.create(&[probed("web-1"), server("client", &json!({})), service()])?;
    let ip = scene.get("service/web", "{.spec.clusterIP}")?;
    let watch = container("watches", &["ping-loop", &ip, "80"]);
    scene.create(&[pod("watch", &json!({}), &json!([watch]))])?;
    let before = ready_slices(&mut scene)?;
    let addresses = scene.addresses("web-1")?;

    scene.agent.kill9()?;
    let away = Duration::from_secs(if long() { 30 } else { 8 });
    served_and_unchanged(&scene, &ip, &before, away)?;
    scene.agent.restart()?;
    served_and_unchanged(&scene, &ip, &before, SETTLING)?;
    // An upgrade: the agent ends in order, and another one starts.
    scene.agent.terminate()?;
    served_and_unchanged(&scene, &ip, &before, SETTLING)?;
    scene.agent.restart()?;
    served_and_unchanged(&scene, &ip, &before, SETTLING)?;
    ensure!(scene.addresses("web-1")? == addresses, "its addresses changed");
    let report = scene.local().kubectl(&["logs", "watch", "--tail=1"])?;
    println!("one connection through the Service: {}", report.trim());
    let report: Value = serde_json::from_str(&report)?;
    ensure!(
        report["connections"] == 1 && report["broken"] == 0 && report["wrong"] == 0,
        "{report}"
    );
    if long() {
        answers_arrive_by_default(&mut scene.machine)?;
        away_for_five_minutes(&mut scene)?;
    }
    Ok(())
}

/// New connections through the Service are answered, and nothing about the node and its endpoints changes.
fn served_and_unchanged(scene: &Scene, ip: &str, before: &str, time: Duration) -> Result<()> {
    let begin = Instant::now();
    let mut answers = 0;
    while begin.elapsed() < time {
        unchanged(scene, before)?;
        ensure!(scene.ask("client", ip, 80, "tcp")? == "web-1");
        answers += 1;
    }
    println!("{answers} new connections in {time:?}, each answered; the node Ready, the endpoints unchanged");
    Ok(())
}

/// The kubelet asks every 5 s, and writes the node's status every 10 s.
fn answers_arrive_by_default(machine: &mut Machine) -> Result<()> {
    let mut all = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        // At any moment of both intervals.
        thread::sleep(DEFAULT_STATUS_INTERVAL * round / ROUNDS);
        let times = answers_arrive(machine, DEFAULT_STATUS_INTERVAL * 2)?;
        for (times, time) in all.iter_mut().zip(times) {
            times.push(time);
        }
    }
    for (what, times) in ["NotReady", "Ready"].into_iter().zip(&mut all) {
        times.sort_unstable();
        println!("{what} after the agent says so, with default intervals: {times:.1?}");
    }
    Ok(())
}

fn away_for_five_minutes(scene: &mut Scene) -> Result<()> {
    let killed = Instant::now();
    scene.agent.kill9()?;
    let away = "the agent has been away for long";
    let condition = "has not answered for";
    scene.machine.local.wait(away, Duration::from_mins(3), |node| {
        Ok(node.ready_condition()?.contains(condition))
    })?;
    println!(
        "NotReady {:?} after the agent was killed, with the default grace",
        killed.elapsed()
    );
    let grace = Duration::from_mins(1);
    ensure!(
        killed.elapsed() + DEFAULT_STATUS_INTERVAL > grace,
        "before the grace of {grace:?}"
    );
    thread::sleep(Duration::from_mins(5).saturating_sub(killed.elapsed()));
    ensure!(scene.local().ready_condition()?.contains(condition));
    let back = Instant::now();
    scene.agent.restart()?;
    scene.machine.local.wait_ready(true)?;
    println!("Ready {:?} after the start of the agent", back.elapsed());
    scene.wait_for_pods("condition=Ready")
}

/// [`slices`] once the endpoints of both families are ready: the controller of endpoints follows the pod's status.
fn ready_slices(scene: &mut Scene) -> Result<String> {
    let selector = "kubernetes.io/service-name=web";
    let path = "jsonpath={.items[*].endpoints[*].conditions.ready}";
    scene
        .machine
        .local
        .wait("the endpoints are ready", patience(), |node| {
            let ready = node.kubectl(&["get", "endpointslices", "-l", selector, "-o", path])?;
            Ok(ready == "true true")
        })?;
    slices(scene)
}

/// The addresses and conditions of the Service's endpoints, and when they changed last.
fn slices(scene: &Scene) -> Result<String> {
    let path = "jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion} {.endpoints}{\"\\n\"}{end}";
    let selector = "kubernetes.io/service-name=web";
    scene
        .local()
        .kubectl(&["get", "endpointslices", "-l", selector, "-o", path])
}

/// The node is ready, and the Service has the same endpoints.
fn unchanged(scene: &Scene, before: &str) -> Result<()> {
    let condition = scene.local().ready_condition()?;
    ensure!(condition.starts_with("True"), "{condition}");
    let now = slices(scene)?;
    ensure!(now == before, "endpoints changed from {before} to {now}");
    Ok(())
}

/// A crashed container starts again, its pod keeps its addresses, and a pod in the host's network starts.
fn containers_and_host_network_work(scene: &mut Scene) -> Result<()> {
    let addresses = scene.addresses("web-1")?;
    let touch = ["exec", "web-1", "-c", "live", "--", "/kni-probe", "touch", "/tmp/fail"];
    scene.local().kubectl(&touch)?;
    let restarts = "{.status.containerStatuses[?(@.name==\"live\")].restartCount}";
    scene.wait_for("pod/web-1", restarts, "1")?;
    ensure!(scene.addresses("web-1")? == addresses, "its addresses changed");
    scene.local().apply(&tolerant(host_network("on-host")))?;
    scene.wait_for("pod/on-host", "{.status.phase}", "Running")
}

/// The scheduler gives the pod to the node also where the grace is over by then.
fn tolerant(mut pod: Value) -> Value {
    pod["spec"]["tolerations"] = json!([{ "operator": "Exists" }]);
    pod
}

fn a_new_pod_reports_what_it_waits_for(scene: &mut Scene) -> Result<()> {
    scene.local().apply(&tolerant(server("late", &json!({}))))?;
    scene.machine.local.wait("an event says why", patience(), |node| {
        // FailedCreatePodSandBox, or NetworkNotReady where the grace is over when the kubelet comes to the pod.
        let selector = "involvedObject.name=late,type=Warning";
        let events = node.kubectl(&[
            "get",
            "events",
            "--field-selector",
            selector,
            "-o",
            "jsonpath={.items[*].message}",
        ])?;
        Ok(events.contains("network runtime") && events.contains("/run/kni/kni.sock"))
    })
}
