//! Tests that between the creation of a pod and its first container no plugin is executed, and that the agent sends no
//! request to the API server before it has answered.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use kni_integration::{cluster::audit::Audit, eventually_sync, require, trace::Trace};
use serde_json::json;

use super::super::{
    scene::{PATIENCE, PORT, Scene, server},
    static_pods::StaticPod,
};

const PODS: usize = 10;
/// The most pods after those until a call is quick.
const MORE: usize = 30;
/// The programs that containerd and its children execute for a pod, and those by which the kubelet mounts its volume
/// with a token. Everything else would be a plugin.
const RUNTIME: [&str; 7] = [
    "containerd-shim-runc-v2",
    "runc",
    "exe",
    "kni-pause",
    "kni-probe",
    "mount",
    "umount",
];
/// More than the interval of the rounds in which the agent reports what changes without a notification.
const SILENCE: Duration = Duration::from_millis(1300);
/// The user of the agent's requests.
const AGENT: &str = "system:serviceaccount:kni-system:kni-agent";
/// The minimum delay of reports to the API server: an attach that takes longer may overlap with those about an earlier
/// one.
const GATHERED: SignedDuration = SignedDuration::from_millis(50);

#[test]
fn a_pod_costs_no_plugin_and_no_request() -> Result<()> {
    require!(steady, root, netns, bpf, machine, strace);
    let mut scene = Scene::joined_by_kni("kni-quiet")?;
    // The node has its blocks of addresses after the first pod.
    scene.create(&[server("first", &json!({}))])?;
    let processes: Vec<u32> = scene
        .local()
        .processes()
        .filter(|(name, _)| ["containerd", "kubelet"].contains(name))
        .map(|(_, process)| process)
        .chain([scene.agent.pid()])
        .collect();
    ensure!(processes.len() == 3, "{processes:?}");
    let trace = Trace::start(&processes)?;
    let names: Vec<String> = (0..PODS).map(|number| format!("p-{number}")).collect();
    for name in &names {
        silence(&scene)?;
        scene.create(&[server(name, &json!({}))])?;
    }
    let executed = trace.finish()?;
    only_the_runtime(&executed)?;
    let address = scene.addresses("p-0")?[0].to_string();
    ensure!(scene.ask("first", &address, PORT, "tcp")? == "p-0");
    let mut quick = no_request(&scene, &names)?;
    // On a busy machine further pods follow until a call of one of them is quick.
    for number in 0.. {
        if quick > 0 {
            break;
        }
        ensure!(number < MORE, "waited for a quick call in vain");
        let name = format!("more-{number}");
        silence(&scene)?;
        scene.create(&[server(&name, &json!({}))])?;
        quick = no_request(&scene, &[name])?;
    }
    // The agent attaches it by what the kubelet sends, and reports it once it knows the mirror pod.
    let fixed = StaticPod::write(&scene, "fixed")?;
    fixed.answers(&mut scene, "first")?;
    fixed.is_reported(&mut scene)
}

/// Waits until the agent has sent no request for [`SILENCE`]: all reports about earlier pods are sent.
fn silence(scene: &Scene) -> Result<()> {
    let count = || -> Result<usize> {
        let audit = Audit::parse(&scene.local().audit_log()?);
        let ours = audit
            .requests()
            .iter()
            .filter(|request| request.user.starts_with(AGENT));
        Ok(ours.filter(|request| !request.is_discovery()).count())
    };
    let (mut last, mut since) = (count()?, Instant::now());
    eventually_sync(PATIENCE, || {
        let now = count()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
        ensure!(since.elapsed() > SILENCE, "the agent still sends requests");
        Ok(())
    })
}

/// Counts the executed programs by name; all of them belong to the container runtime.
fn only_the_runtime(lines: &[String]) -> Result<()> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    // The kubelet looks for its own chain once a minute, whether pods come or not.
    for line in lines.iter().filter(|line| !line.contains("KUBE-KUBELET-CANARY")) {
        // A program that is executed by its descriptor has no path of its own; its first argument is its name. An
        // interrupted call is completed by another line, which has neither.
        let mut texts = line.split('"').skip(1).step_by(2);
        let Some(path) = texts.find(|text| !text.is_empty() && !text.starts_with("/proc/self/fd/")) else {
            continue;
        };
        let name = path.rsplit('/').next().unwrap_or(path);
        ensure!(RUNTIME.contains(&name), "not a part of the runtime: {line}");
        *counts.entry(name).or_default() += 1;
    }
    println!("executed for {PODS} pods: {counts:?}");
    ensure!(
        counts.get("runc").is_some_and(|count| *count >= 2 * PODS),
        "the trace is incomplete: {counts:?}"
    );
    Ok(())
}

/// A call of the kubelet, as the agent logs it when it has answered.
#[derive(Debug)]
struct Call {
    begin: Timestamp,
    end: Timestamp,
}

/// The agent sent no request during the calls for these pods. Returns how many of the calls were quick.
fn no_request(scene: &Scene, names: &[String]) -> Result<usize> {
    let log = scene.agent.log();
    let audit = eventually_sync(PATIENCE, || {
        let audit = Audit::parse(&scene.local().audit_log()?);
        let last = names.last().context("no pod")?;
        let mut asked = audit.requests().iter();
        let reported = asked.any(|request| {
            request.user.starts_with(AGENT) && request.what.contains(&format!("podinterfaces/{last}.eth0."))
        });
        ensure!(reported, "the log has nothing about {last} of the agent");
        Ok(audit)
    })?;
    let (mut calls, mut quick, mut disturbed) = (0, 0, 0);
    for name in names {
        for method in ["CreateNetwork", "AttachInterface"] {
            let call = call(&log, method, name)?;
            let took = call.end.duration_since(call.begin);
            calls += 1;
            quick += usize::from(took < GATHERED);
            for request in audit.requests() {
                let received: Timestamp = request.received.parse()?;
                let within = request.user.starts_with(AGENT) && received > call.begin && received < call.end;
                let report = took >= GATHERED && request.what.starts_with("patch ");
                let unrelated = report || request.is_discovery();
                // The figures of the node follow earlier pods by up to ten seconds.
                let figures = within && request.what.contains("/nodenetworks/");
                disturbed += usize::from(figures);
                ensure!(
                    !within || unrelated || figures,
                    "{method} of {name}, {call:?}: {request:?}"
                );
            }
        }
    }
    ensure!(
        3 * disturbed <= calls.max(3),
        "{disturbed} of {calls} calls wrote figures of the node"
    );
    println!(
        "{quick} of {calls} calls took less than {GATHERED:#}; the agent sent no request during them, and only reports during others"
    );
    Ok(quick)
}

/// When the agent began and ended a call for a pod.
fn call(log: &str, method: &str, pod: &str) -> Result<Call> {
    let (method, pod) = (format!("method=\"{method}\""), format!("pod=\"default/{pod}\""));
    let mut lines = log.lines().filter(|line| line.contains("call done"));
    let line = lines
        .find(|line| line.contains(&method) && line.contains(&pod))
        .with_context(|| format!("no line with {method} and {pod} in the agent's log:\n{log}"))?;
    let end: Timestamp = line.split_whitespace().next().context("no time")?.parse()?;
    let took = line.split("took_ms=").nth(1).and_then(|rest| rest.split(' ').next());
    let took: i64 = took.context("no duration")?.parse()?;
    // The duration is rounded down.
    Ok(Call {
        begin: end - SignedDuration::from_millis(took + 1),
        end,
    })
}
