//! Tests concurrent changes of policies and pods with concurrent queries of operators: consistent order, no losses, no
//! leftovers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Kubelet, Manifest, Namespaces, Node, Pod, Stage,
    agent::SOCKET,
    eventually, eventually_sync,
    manifest::network_policy,
    patience, require,
    stage::address,
    traffic::{NoAnswer, Servers, Stream, udp_ask},
};
use serde_json::Value;
use tokio::task::JoinSet;

use super::{PATIENCE, PORT};

const WORKERS: usize = 2;
const LASTING: Duration = Duration::from_secs(8);
const CONTAINER_PORTS: (&str, &str) = (
    "kni.dev/container-ports",
    r#"[{"name": "serve", "containerPort": 8080, "protocol": "UDP"}, {"name": "web", "containerPort": 8080}]"#,
);
/// Maps whose rows come only from policies and pods.
const MAPS: [&str; 4] = ["ENDPOINTS", "IDENTITIES", "POLICY", "PORTS"];

/// The server answers only its client, at its named ports.
fn steady() -> Manifest {
    let peer = "{podSelector: {}, namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: guests}}}";
    let ports = "[{port: serve, protocol: UDP}, {port: web}]";
    let spec = format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: [{{from: [{peer}], ports: {ports}}}]}}");
    Manifest::file("50-steady.yaml", network_policy("steady", "guests", &spec))
}

/// Policies for the changing pods, different in each round; `None` for no policies.
fn restless(round: Option<u16>) -> Manifest {
    let text = round.map(|round| {
        let (port, last) = (10_000 + round, round % 200 + 1);
        let named = format!("{{podSelector: {{}}, ingress: [{{ports: [{{port: serve, protocol: UDP}}, {{port: {port}}}]}}]}}");
        let block = format!(
            "{{podSelector: {{}}, policyTypes: [Egress], egress: [{{to: [{{ipBlock: {{cidr: 203.0.113.{last}/32}}}}]}}]}}"
        );
        let towards = format!(
            "{{podSelector: {{}}, policyTypes: [Egress], egress: [{{to: [{{namespaceSelector: {{}}}}], ports: [{{port: web}}, {{port: {port}, endPort: {}}}]}}]}}",
            port + 77
        );
        network_policy("crowd", "named", &named) + &network_policy("crowd", "block", &block) + &network_policy("crowd", "towards", &towards)
    });
    Manifest::file("60-restless.yaml", text.unwrap_or_default())
}

/// Runs pods one after the other, until `stop`.
async fn come_and_go(kubelet: Kubelet, name: String, stop: Arc<AtomicBool>, lives: Arc<AtomicU64>) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let pod = kubelet.run_pod("crowd", &name, &[CONTAINER_PORTS]).await;
        let pod = pod.with_context(|| format!("run crowd/{name}"))?;
        tokio::time::sleep(Duration::from_millis(10)).await;
        kubelet
            .kill_pod(pod)
            .await
            .with_context(|| format!("kill crowd/{name}"))?;
        lives.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// The results of an operator's queries.
#[derive(Debug, Default)]
struct Looks {
    answered: u64,
    /// Answers that exceeded the timeout of knictl. Link changes share one lock of the kernel with the whole machine.
    late: u64,
    longest: Duration,
}

/// Runs all queries of an operator until `stop`.
fn look_on(stage: &Stage, stop: &AtomicBool, answered: &AtomicU64) -> Result<Looks> {
    let mut looks = Looks::default();
    while !stop.load(Ordering::Relaxed) {
        for command in [
            &["status"][..],
            &["networks"],
            &["interfaces", "-o", "json"],
            &["drops"],
            &["flows", "-o", "json"],
            &["explain", "guests/client", "steady/server", "udp/8080"],
            &["policy", "steady/server", "-o", "json"],
            &["services"],
            &["maps", "-o", "json"],
        ] {
            let begun = Instant::now();
            match stage.knictl(command) {
                Ok(_) => looks.answered = answered.fetch_add(1, Ordering::Relaxed) + 1,
                Err(error) if format!("{error:#}").contains("did not answer within") => looks.late += 1,
                Err(error) => return Err(error).with_context(|| format!("{command:?}")),
            }
            looks.longest = looks.longest.max(begun.elapsed());
        }
    }
    Ok(looks)
}

/// The numbers of rows in the maps that policies and pods fill.
fn rows(stage: &Stage) -> Result<Vec<(String, u64)>> {
    let document: Value = serde_json::from_str(&stage.knictl(&["maps", "-o", "json"])?)?;
    let maps = document["maps"].as_array().context("no maps")?;
    let mut rows = Vec::new();
    for map in maps {
        let name = map["name"].as_str().context("a map without a name")?;
        if MAPS.contains(&name) {
            rows.push((name.to_owned(), map["entries"].as_u64().context("no entries")?));
        }
    }
    ensure!(rows.len() == MAPS.len(), "{document:#}");
    rows.sort();
    Ok(rows)
}

fn write(stage: &Stage, manifest: Manifest) -> Result<()> {
    Manifest::apply(&[manifest], &stage.node)
}

fn is_silent(from: &Namespaces, to: std::net::IpAddr) -> bool {
    udp_ask(from, to, PORT, PATIENCE) == Err(NoAnswer::Timeout)
}

/// The pods without changes.
struct Scene {
    server: Pod,
    stranger: Pod,
    streams: Vec<Stream>,
    _servers: Servers,
    stage: Stage,
}

impl Scene {
    async fn set() -> Result<Self> {
        let node = Node::new("churn")?;
        Manifest::apply(&[steady()], &node)?;
        let stage = Stage::on(node, Manifest::overlapping()).await?;
        let server = stage.kubelet.run_pod("steady", "server", &[CONTAINER_PORTS]).await?;
        let client = stage.kubelet.run_pod("guests", "client", &[]).await?;
        let stranger = stage.kubelet.run_pod("strangers", "stranger", &[]).await?;
        let servers = Servers::start(&server.inside, "server", PORT)?;
        let mut streams = Vec::new();
        for v4 in [true, false] {
            let to = (address(&server, v4), PORT).into();
            streams.push(Stream::udp(&client.inside, to)?);
            streams.push(Stream::tcp(&client.inside, to)?);
        }
        Ok(Self {
            server,
            stranger,
            streams,
            _servers: servers,
            stage,
        })
    }

    fn stranger_hears_nothing(&self, v4: bool) -> bool {
        is_silent(&self.stranger.inside, address(&self.server, v4))
    }

    /// Changes the policies for a while, and until there were enough pods and answers, with concurrent queries.
    fn stir(&self, stop: &AtomicBool, lives: &AtomicU64) -> Result<Looks> {
        let answered = AtomicU64::new(0);
        thread::scope(|scope| {
            let operator = scope.spawn(|| look_on(&self.stage, stop, &answered));
            let (begun, deadline) = (Instant::now(), Instant::now() + patience());
            let lasts = || {
                let enough = lives.load(Ordering::Relaxed) > 10 && answered.load(Ordering::Relaxed) > 50;
                begun.elapsed() < LASTING || !enough && Instant::now() < deadline
            };
            let changed = (0_u16..)
                .take_while(|_| lasts() && !operator.is_finished())
                .try_for_each(|round| {
                    write(&self.stage, restless(Some(round)))?;
                    // Long and short pauses: the agent itself waits for a pause between changes.
                    thread::sleep(Duration::from_millis(if round % 3 == 0 { 150 } else { 20 }));
                    ensure!(self.stranger_hears_nothing(round % 2 == 0), "a stranger is answered");
                    Ok(())
                });
            stop.store(true, Ordering::Relaxed);
            let looks = operator.join().expect("an operator does not panic")?;
            changed.map(|()| looks)
        })
    }

    /// Waits until the maps contain the previous rows.
    async fn wait_until_restored(&self, before: &[(String, u64)]) -> Result<()> {
        write(&self.stage, restless(None))?;
        eventually(patience(), async || {
            let now = rows(&self.stage)?;
            ensure!(now == before, "left behind: {now:?}, before: {before:?}");
            Ok(())
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_pods_and_operators_at_once_lose_and_leave_nothing() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set().await?;
    let before = rows(&scene.stage)?;
    let (stop, lives) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut workers = JoinSet::new();
    for number in 0..WORKERS {
        let kubelet = Kubelet::connect(&scene.stage.node, SOCKET).await?;
        let (name, stop, lives) = (format!("pod-{number}"), Arc::clone(&stop), Arc::clone(&lives));
        workers.spawn(come_and_go(kubelet, name, stop, lives));
    }
    let stirred = scene.stir(&stop, &lives);
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    let (looks, pods) = (stirred?, lives.load(Ordering::Relaxed));
    println!("{pods} pods lived, {looks:?}");
    ensure!(
        pods > 10 && looks.answered > 50,
        "this was no churn: {pods} pods, {looks:?}"
    );
    // Each question was answered at some time; how many were late depends on the machine.
    ensure!(looks.late < looks.answered, "operators get no answers: {looks:?}");
    println!("{}", scene.stage.knictl(&["drops"])?);
    for stream in scene.streams.drain(..) {
        stream.wait_for_answers(1001_u64.saturating_sub(stream.answered()))?;
        let report = stream.stop();
        ensure!(report.sent > 1000, "{report:?}");
        report.assert_whole("server");
    }
    scene.wait_until_restored(&before).await?;
    let log = scene.stage.agent.log();
    ensure!(!log.contains("panicked"), "{log}");
    // Without the policy the stranger would get an answer.
    let nothing = Manifest {
        text: String::new(),
        ..steady()
    };
    write(&scene.stage, nothing)?;
    eventually_sync(patience(), || {
        let silent = scene.stranger_hears_nothing(true);
        ensure!(!silent, "the server answers no stranger in any case");
        Ok(())
    })
}
