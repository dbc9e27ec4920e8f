//! Tests that the attach path is local: between request and response the agent sends no API request and executes no
//! program.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kni_api::PodInterface;
use kni_integration::{
    Cluster,
    cluster::{HELD, Member, audit::Request, objects, patience},
    kubelet::Sandbox,
    require,
    trace::Trace,
    wait,
};
use kube::{Api, ResourceExt as _};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::scene::tenants;

const PODS: usize = 6;
/// The most attaches until one of them is quick.
const MOST: usize = 60;
/// More than the interval of the rounds in which the agent reports what changes without a notification.
const SILENCE: Duration = Duration::from_millis(1300);
/// The minimum delay of reports to the API server. An attachment that takes longer may overlap with reports about its
/// own start, as patches; no other request is allowed.
const GATHERED: Duration = Duration::from_millis(50);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "three proofs about the same pods, in order")]
async fn an_attach_asks_nobody_and_runs_nothing() -> Result<()> {
    require!(root, netns, bpf, machine, strace);
    let mut cluster = Cluster::start("cluster-quiet", 1).await?;
    tenants(&cluster).await?;
    cluster
        .apply(&[objects::attachment("plain", "extra", "blue", "data0")])
        .await?;
    let member = &cluster.nodes[0];
    member.kubelet.hold();
    // Half of them with only a primary interface, half with one of the namespace's network, one of an attachment and
    // one of an annotation.
    let more = json!({
        "labels": { HELD: "yes", "join": "extra" },
        "annotations": { "k8s.v1.cni.cncf.io/networks": "red@red0" },
    });
    let objects: Vec<_> = (0..PODS)
        .map(|n| {
            let simple = json!({ "labels": { HELD: "yes" } });
            let more = if n % 2 == 0 { &simple } else { &more };
            objects::pod_with("plain", &format!("p-{n}"), "node1", more)
        })
        .collect();
    let pods = cluster.create_pods(&objects).await?;
    // Runs only after the agent knows it and all earlier pods; makes the node claim blocks of all three networks.
    let mut last = more.clone();
    last["labels"] = json!({ "join": "extra" });
    cluster
        .run(&[objects::pod_with("plain", "last", "node1", &last)])
        .await?;

    let told: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    let mut windows: Vec<Window> = Vec::new();
    // On a busy machine further attaches follow until one of them is quick.
    for (number, pod) in pods.iter().cycle().enumerate() {
        if number >= PODS && windows.iter().any(Window::is_quick) {
            break;
        }
        ensure!(number < MOST, "waited for a quick attach in vain: {windows:#?}");
        silence(&cluster, &member.user).await?;
        let (window, id) = attach(member, pod).await?;
        let uid = pod.uid().context("a pod without UID")?;
        let name = kni_api::pod_interface::name(&pod.name_any(), &uid, "eth0");
        wait::until("it is told of afterwards", patience(), async || {
            Ok(told.get_opt(&name).await?.is_some())
        })
        .await?;
        take_away(member, &id).await?;
        windows.push(window);
    }
    silence(&cluster, &member.user).await?;
    let audit = cluster.audit()?;
    let asked = audit.of(&member.user);
    let (mut looked_at, mut disturbed) = (0, 0);
    for window in &windows {
        let within = |request: &&&Request| request.received >= window.begin && request.received <= window.end;
        let within = asked.iter().filter(within);
        let quick = window.is_quick();
        looked_at += usize::from(quick);
        let within: Vec<_> = within
            .filter(|request| quick || !request.what.starts_with("patch "))
            .filter(|request| !request.is_discovery())
            .collect();
        // The figures of the node follow earlier pods by up to ten seconds.
        let (figures, within): (Vec<&Request>, Vec<&Request>) = within
            .into_iter()
            .copied()
            .partition(|request| request.what.contains("/nodenetworks/"));
        disturbed += usize::from(!figures.is_empty());
        ensure!(within.is_empty(), "requests in {window:?}: {within:#?}");
    }
    ensure!(
        3 * disturbed <= windows.len(),
        "figures of the node in {disturbed} attaches: {windows:#?}"
    );
    println!("{looked_at} of {} attaches were quick, no request", windows.len());
    ensure!(
        asked
            .iter()
            .any(|request| request.what.contains("podinterfaces/p-0.eth0.")),
        "the log has what the agent asks for"
    );

    // The attachment does not wait for an answer either: the API server does not answer.
    signal_api_server(&mut cluster, Signal::SIGSTOP)?;
    let frozen = attach(&cluster.nodes[0], &pods[1]).await;
    signal_api_server(&mut cluster, Signal::SIGCONT)?;
    let (frozen, id) = frozen?;
    take_away(&cluster.nodes[0], &id).await?;
    println!("with an API server that is frozen it took {:?}", frozen.took);
    let longest = windows.iter().map(|window| window.took).max().unwrap_or_default();
    ensure!(
        frozen.took < Duration::from_secs(1) + 10 * longest,
        "{frozen:?}, at most {longest:?} before"
    );

    let trace = Trace::start(&[cluster.nodes[0].agent.pid()])?;
    for pod in &pods {
        let (_window, id) = attach(&cluster.nodes[0], pod).await?;
        take_away(&cluster.nodes[0], &id).await?;
    }
    let executed = trace.finish()?;
    ensure!(executed.is_empty(), "the agent ran programs:\n{}", executed.join("\n"));
    Ok(())
}

/// The time from request to response.
#[derive(Debug)]
struct Window {
    begin: String,
    end: String,
    took: Duration,
}

impl Window {
    /// Whether no report of an earlier attach, or of its own start, can be in it.
    fn is_quick(&self) -> bool {
        self.took < GATHERED
    }
}

/// Attaches a pod, and checks that its interfaces exist when the response arrives; returns the sandbox's id.
async fn attach(member: &Member, pod: &Pod) -> Result<(Window, String)> {
    let kni = member.kubelet.kni();
    let netns = kni.create_network("plain", &pod.name_any()).await?;
    let mut sandbox = Sandbox::new("plain", &pod.name_any(), &netns);
    sandbox.uid = pod.uid().context("a pod without UID")?;
    sandbox.annotations.extend(pod.annotations().clone());
    let mut request = sandbox.attach_request();
    request.labels.extend(pod.labels().clone());
    let (begin, start) = (now()?, Instant::now());
    kni.kni().attach_interface(request).await?;
    let (end, took) = (now()?, start.elapsed());
    let inside = member.node.net_at(&pod.name_any(), netns.as_ref())?;
    let names = inside.run("ip", &["-o", "link", "show"])?;
    let all = pod.labels().contains_key("join");
    for name in ["eth0", "data0", "red0"].into_iter().take(if all { 3 } else { 1 }) {
        ensure!(names.contains(name), "{name} is there when the answer is: {names}");
    }
    Ok((Window { begin, end, took }, sandbox.id))
}

async fn take_away(member: &Member, id: &str) -> Result<()> {
    let kni = member.kubelet.kni();
    kni.detach(id).await?;
    Ok(kni.delete_network(id).await?)
}

fn signal_api_server(cluster: &mut Cluster, signal: Signal) -> Result<()> {
    let mut processes = cluster.control.local().processes();
    let (_name, process) = processes
        .find(|(name, _)| *name == "kube-apiserver")
        .context("no API server")?;
    Ok(kill(Pid::from_raw(process.cast_signed()), signal)?)
}

/// Waits until the agent has sent no request for [`SILENCE`].
async fn silence(cluster: &Cluster, user: &str) -> Result<()> {
    let count = || -> Result<usize> {
        let audit = cluster.audit()?;
        Ok(audit.of(user).len())
    };
    let (mut last, mut since) = (count()?, Instant::now());
    wait::until("the agent is silent", patience(), || {
        let silent = count().map(|now| {
            if now != last {
                (last, since) = (now, Instant::now());
            }
            since.elapsed() > SILENCE
        });
        async { silent }
    })
    .await
    .map(drop)
}

/// The current time in the format of the audit log.
fn now() -> Result<String> {
    let now = Timestamp::try_from(SystemTime::now())?;
    Ok(format!("{now:.6}"))
}
