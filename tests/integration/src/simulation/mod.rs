//! Simulates a large cluster: a real API server, etcd and kni-controller, and agents on nodes that exist in memory
//! only.
//!
//! `docs/design/scale.md` explains what is real and what is not.

pub mod backlog;
mod fleet;
mod load;
pub mod meters;
pub mod model;
pub mod report;
mod scene;

use std::{
    collections::BTreeMap,
    sync::atomic::AtomicUsize,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

pub use self::load::Latency;
use self::{
    fleet::{Fleet, Observed},
    load::{Changes, attached, visible},
    meters::{Cost, Meters, Reader},
    model::{Measured, Size},
    scene::{FLAT_SHARE, Scene, Standing},
};
use crate::{
    cluster::{Cluster, objects},
    wait,
};

/// No agent and no replica of kni-controller has written for this time: all that follows a change is written.
const QUIET: Duration = Duration::from_secs(1);
/// How long the simulation waits until all pods that stay are confirmed.
const SETTLING: Duration = Duration::from_mins(4);
/// Pause between two looks at what the nodes have observed.
const LOOK: Duration = Duration::from_millis(300);
/// A change of a pod is sent to fewer watches than this: that of its own agent, and those of who follows all pods.
pub const FEW: f64 = 6.0;
/// The most writes of the figures of nodes after the change of a pod: its own node's, and once more.
const OWN_FIGURES: f64 = 2.0;
/// How many times a change is measured at most.
const ATTEMPTS: u32 = 6;
/// Maximum duration of a phase that ends by itself.
const PATIENCE: Duration = Duration::from_mins(15);

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Options {
    /// Nodes.
    pub nodes: usize,
    /// Pods that stay.
    pub pods: usize,
    /// Networks, the default one included.
    pub networks: usize,
    /// Pods that start in a second.
    pub rate: f64,
    /// Pods that stay are created at this rate, in a second.
    pub fill: f64,
    /// How long pods start and end.
    pub duration: Duration,
    /// How long addresses rest and empty blocks are kept, in seconds, if not the usual time.
    pub rest: Option<u64>,
}

/// What one change costs.
#[derive(Debug, Clone)]
pub struct OneChange {
    /// The change.
    pub what: &'static str,
    /// The cost.
    pub cost: Cost,
}

/// What was measured.
#[derive(Debug)]
pub struct Outcome {
    /// What was simulated.
    pub options: Options,
    /// Its size, for the model.
    pub size: Size,
    /// Seconds until an agent could attach pods, all agents started at once.
    pub starts: Latency,
    /// Seconds until a node held a block, all nodes claiming at once.
    pub claims: Latency,
    /// While the pods that stay were created, with the pods that were confirmed in a second.
    pub filling: (Cost, f64),
    /// Pods that stay and were confirmed then; all of them, unless the control plane was saturated.
    pub confirmed: usize,
    /// While nothing happened.
    pub idle: Cost,
    /// While pods came and went.
    pub load: Cost,
    /// Pods that started meanwhile, and how many of these in a second.
    pub started: (usize, f64),
    /// From the creation of a pod to its attach.
    pub attaches: Latency,
    /// From the creation of a pod to the last node that knows it.
    pub joins: Latency,
    /// From a change of labels to the last node that knows it.
    pub relabels: Latency,
    /// Resident bytes by program after all that, and of the simulated nodes' process before it had any agent.
    pub memory: (BTreeMap<String, f64>, f64),
    /// Open watches by resource.
    pub watches: BTreeMap<String, f64>,
    /// Single changes.
    pub changes: Vec<OneChange>,
    /// Seconds until an agent that is started again could attach pods, and the bytes that it has read, by resource.
    pub restart: (f64, BTreeMap<String, f64>),
}

/// A running simulation.
struct Simulation {
    cluster: Cluster,
    fleet: Fleet,
    reader: Reader,
    /// What the simulated nodes know of each node. The last one is started alone.
    places: Vec<Value>,
}

/// Runs a simulation. `say` gets what begins.
pub async fn run(options: Options, say: impl Fn(&str)) -> Result<Outcome> {
    say("control plane");
    let mut simulation = Simulation::without_agents(&options).await?;
    say("agents");
    let before = simulation.read().await?;
    let starts = simulation.start_agents()?;
    simulation.quiet().await?;
    say("all nodes claim a block");
    let claims = simulation.claim_at_once().await?;
    say("pods that stay");
    let begin = simulation.read().await?;
    let scene = scene::fill(&simulation.cluster, &options, &AtomicUsize::new(0)).await?;
    let confirmed = scene::confirmed(&simulation.cluster, options.pods, SETTLING).await?;
    let filled = simulation.read().await?.since(&begin);
    simulation.quiet().await?;
    say("nothing happens");
    let idle = simulation.idle(options.duration / 3).await?;
    say("pods come and go");
    drop(simulation.fleet.observed()?);
    let begin = simulation.read().await?;
    let changes = load::run(&simulation.cluster.client, &scene, options.rate, options.duration).await?;
    let end = simulation.read().await?;
    let observed = simulation.observe(&changes).await?;
    let load = end.since(&begin);
    load::end_all(&simulation.cluster.client, options.networks).await?;
    simulation.released(&scene).await?;
    say("one change at a time");
    let (one_by_one, restart) = simulation.changes(&scene).await?;
    let rate = count(changes.starts.len()) / load.seconds;
    Ok(Outcome {
        size: size(&options, rate),
        starts,
        claims,
        filling: (filled.clone(), count(confirmed) / filled.seconds),
        confirmed,
        idle,
        started: (changes.starts.len(), rate),
        attaches: attached(&changes.starts, &observed),
        joins: visible(&changes.starts, &observed),
        relabels: visible(&changes.relabels, &observed),
        memory: (
            end.memory.clone(),
            before.memory.get("agents").copied().unwrap_or_default(),
        ),
        watches: end.watches,
        load,
        changes: one_by_one,
        restart,
        options,
    })
}

fn size(options: &Options, rate: f64) -> Size {
    Size {
        nodes: count(options.nodes),
        pods: count(options.pods),
        networks: count(options.networks),
        flat: if options.networks < 2 {
            1.0
        } else {
            1.0 / count(FLAT_SHARE)
        },
        rate,
    }
}

impl Simulation {
    /// A control plane with the nodes and the networks of the tenants.
    async fn without_agents(options: &Options) -> Result<Self> {
        let mut cluster = Cluster::without_nodes("simulation").await?;
        let fleet = Fleet::start(&mut cluster)?;
        let places = scene::register(&cluster, options.nodes, options.rest).await?;
        scene::tenants(&cluster, options.networks).await?;
        Ok(Self {
            cluster,
            fleet,
            reader: Reader::default(),
            places,
        })
    }

    async fn read(&mut self) -> Result<Meters> {
        self.reader.read(&self.cluster, &self.fleet).await
    }

    /// Waits until an agent or kni-controller has written since the last reading.
    async fn written(&mut self) -> Result<()> {
        let before = self.reader.own_writes(&self.cluster)?;
        wait::until("the change is written", PATIENCE, || {
            let now = self.reader.own_writes(&self.cluster);
            async move { Ok(now? > before) }
        })
        .await
        .map(drop)
    }

    /// Waits until neither agents nor kni-controller have written for [`QUIET`], but for what they write on a timer.
    async fn quiet(&mut self) -> Result<()> {
        let (mut last, mut since) = (self.reader.own_writes(&self.cluster)?, Instant::now());
        wait::until("all that follows is written", PATIENCE, || {
            let now = self.reader.own_writes(&self.cluster).map(|now| {
                if now > last {
                    (last, since) = (now, Instant::now());
                }
                since.elapsed() > QUIET
            });
            async move { now }
        })
        .await
        .map(drop)
    }

    /// Waits until only nodes with a pod that stays have blocks of a network, and all those of the default one.
    async fn released(&mut self, scene: &Scene) -> Result<()> {
        let expected = scene.holders();
        wait::until(
            "the blocks of pods that have ended are released",
            PATIENCE,
            async || {
                let held = scene::holders(&self.cluster).await?;
                ensure!(held == expected, "held {held:?}, expected {expected:?}");
                Ok(true)
            },
        )
        .await?;
        self.quiet().await
    }

    /// What the nodes have observed of changes: waits until all of them are known, but not longer than [`SETTLING`].
    async fn observe(&mut self, changes: &Changes) -> Result<Observed> {
        let start = Instant::now();
        let mut all = Observed::default();
        loop {
            all.add(self.fleet.observed()?);
            let missing = [
                attached(&changes.starts, &all),
                visible(&changes.starts, &all),
                visible(&changes.relabels, &all),
            ];
            if missing.iter().all(|latency| latency.missing == 0) || start.elapsed() > SETTLING {
                return Ok(all);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn start_agents(&mut self) -> Result<Latency> {
        let (last, others) = self.places.split_last().context("no nodes")?;
        let mut times = self.fleet.start_nodes(others, PATIENCE)?;
        times.push(self.fleet.start_alone(last, PATIENCE)?.0);
        Ok(Latency::of(times, 0))
    }

    async fn claim_at_once(&mut self) -> Result<Latency> {
        let begin = scene::flat(&self.cluster).await?;
        let mut times = Vec::new();
        let nodes = self.places.len();
        for _round in 0..120 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let held = self.fleet.observed()?.blocks;
            times.extend(held.get("default").into_iter().flatten().map(|(_, at)| at - begin));
            if times.len() >= nodes {
                break;
            }
        }
        let missing = nodes.saturating_sub(times.len());
        Ok(Latency::of(times, missing))
    }

    async fn idle(&mut self, duration: Duration) -> Result<Cost> {
        let begin = self.read().await?;
        tokio::time::sleep(duration).await;
        Ok(self.read().await?.since(&begin))
    }

    /// The cost of single changes: of the change and of the time after it.
    async fn changes(&mut self, scene: &Scene) -> Result<(Vec<OneChange>, (f64, BTreeMap<String, f64>))> {
        let mut all = Vec::new();
        let cost = self.idle(QUIET).await?;
        all.push(OneChange { what: "nothing", cost });
        // On a node that has a pod of the network, and on one that has none.
        let tenant = scene.networks.min(2) - 1;
        let followers = scene.followers.get(&tenant).context("nobody follows the network")?;
        let inside = *followers.first().context("no node")?;
        let outside = (0..scene.nodes).find(|node| !followers.contains(node));
        let names = ["a pod comes, its node has others of the network", "it goes"];
        all.extend(self.comes_and_goes(scene, (inside, tenant), names).await?);
        if let Some(outside) = outside {
            let names = [
                "a pod comes, the first of its network on its node",
                "it goes, the last of its network on its node",
            ];
            all.extend(self.comes_and_goes(scene, (outside, tenant), names).await?);
            // The release of its block is no cost of what follows.
            self.released(scene).await?;
        }
        let one = scene
            .standing
            .iter()
            .find(|one| one.network == tenant)
            .context("no pod")?;
        all.push(self.relabelled(one).await?);
        let rule = json!({ "podSelector": { "matchLabels": { "app": "app-2" } }, "policyTypes": ["Ingress"] });
        let policy = objects::policy(&scene::namespace(tenant), "other", &rule);
        let begin = self.read().await?;
        self.cluster.apply(&[policy]).await?;
        all.push(self.after("a policy changes", &begin).await?);
        let last = self.places.last().context("no node")?.clone();
        let begin = self.read().await?;
        self.fleet.stop(last["name"].as_str().unwrap_or_default())?;
        let restart = self.fleet.start_alone(&last, PATIENCE)?;
        all.push(self.after("an agent restarts", &begin).await?);
        Ok((all, restart))
    }

    /// The costs of a pod of a network that starts on a node, and of its end.
    async fn comes_and_goes(
        &mut self,
        scene: &Scene,
        place: (usize, usize),
        [comes, goes]: [&'static str; 2],
    ) -> Result<[OneChange; 2]> {
        let (node, network) = place;
        let mut attempt = 0;
        loop {
            let object = scene::pod(network, "single", node, &json!({}));
            let begin = self.read().await?;
            scene::create(&self.cluster, &object, place).await?;
            self.written().await?;
            let start = self.after(comes, &begin).await?;
            let begin = self.read().await?;
            load::end_pod(self.cluster.client.clone(), network, "single".to_owned()).await?;
            self.written().await?;
            let end = self.after(goes, &begin).await?;
            attempt += 1;
            if attempt == ATTEMPTS
                || !(Self::is_disturbed(&start, OWN_FIGURES) || Self::is_disturbed(&end, OWN_FIGURES))
            {
                return Ok([start, end]);
            }
            // The pod is the first one of its network again only when the node has released the block.
            self.released(scene).await?;
        }
    }

    /// The cost of a change of a pod's labels.
    async fn relabelled(&mut self, pod: &Standing) -> Result<OneChange> {
        let mut attempt = 0;
        loop {
            let begin = self.read().await?;
            self.relabel(pod, attempt).await?;
            self.written().await?;
            let change = self.after("a label changes", &begin).await?;
            attempt += 1;
            if attempt == ATTEMPTS || !Self::is_disturbed(&change, 0.0) {
                return Ok(change);
            }
        }
    }

    /// Whether what happens on a timer happened meanwhile: many watches of pods received each change, or many nodes
    /// wrote their figures. Each watch gets a bookmark a minute, which the API server counts as an event, and a node
    /// writes the figures of earlier changes after up to ten seconds; agents that were started together do so in the
    /// same second. A change that does reach all nodes does so each time.
    fn is_disturbed(change: &OneChange, own_figures: f64) -> bool {
        let watches = change.cost.watchers().get("pods").copied().unwrap_or_default();
        let mut requests = change.cost.requests.iter();
        let figures = requests.find(|(request, _)| request.is_write() && request.resource == "nodenetworks/status");
        watches >= FEW || figures.is_some_and(|(_, count)| *count > own_figures)
    }

    async fn after(&mut self, what: &'static str, begin: &Meters) -> Result<OneChange> {
        self.quiet().await?;
        let cost = self.read().await?.since(begin);
        Ok(OneChange { what, cost })
    }

    async fn relabel(&self, pod: &Standing, attempt: u32) -> Result<()> {
        let api: kube::Api<k8s_openapi::api::core::v1::Pod> =
            kube::Api::namespaced(self.cluster.client.clone(), &pod.namespace);
        let labels = json!({ "metadata": { "labels": { "single": format!("change-{attempt}") } } });
        let patch = kube::api::Patch::Merge(&labels);
        api.patch(&pod.name, &kube::api::PatchParams::default(), &patch).await?;
        Ok(())
    }
}

impl Outcome {
    /// The single change of this name.
    pub fn change(&self, what: &str) -> Result<&Cost> {
        let found = self.changes.iter().find(|one| one.what == what);
        found
            .map(|one| &one.cost)
            .with_context(|| format!("no change {what:?}"))
    }

    /// What the model predicts, as measured.
    pub fn measured(&self) -> Measured {
        let nodes = self.size.nodes;
        let program = |name: &str| self.load.cpu.get(name).copied().unwrap_or_default();
        let agents = self.memory.0.get("agents").copied().unwrap_or_default();
        // What this agent alone has read: others may receive events of earlier changes meanwhile.
        let start: f64 = self.restart.1.values().sum();
        let all = [
            ("writes", self.load.writes() / self.load.seconds),
            ("events", self.load.all_events() / self.load.seconds),
            ("fanout", self.load.all_event_bytes() / self.load.seconds),
            ("api-server cpu", program("kube-apiserver")),
            ("etcd cpu", program("etcd")),
            ("controller cpu", program("kni-controller")),
            ("agent cpu", program("agents") / nodes),
            ("agent memory", (agents - self.memory.1) / nodes),
            ("agent start", start),
        ];
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn count(number: usize) -> f64 {
    number as f64
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
