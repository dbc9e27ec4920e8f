//! Simulates a large cluster: a real API server, etcd and kni-controller, and agents on nodes that exist in memory
//! only.
//!
//! `docs/design/scale.md` explains what is real and what is not.

mod fleet;
mod load;
pub mod meters;
pub mod model;
pub mod report;
mod scene;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

pub use self::load::Latency;
use self::{
    fleet::Fleet,
    load::{attached, visible},
    meters::{Cost, Meters, Reader},
    model::{Measured, Size},
    scene::{FLAT_SHARE, Scene, Standing},
};
use crate::cluster::{Cluster, objects};

/// Time in which all that follows a change is written.
const REST: Duration = Duration::from_secs(3);
/// Time in which the blocks of pods that have ended are released.
const RELEASE: Duration = Duration::from_secs(22);
/// How long the simulation waits until all pods that stay are confirmed.
const SETTLING: Duration = Duration::from_mins(4);
/// How many times a change is measured at most.
const ATTEMPTS: u32 = 3;
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
    let mut cluster = Cluster::without_nodes("simulation").await?;
    let fleet = Fleet::start(&mut cluster)?;
    let mut simulation = Simulation {
        places: scene::register(&cluster, options.nodes).await?,
        reader: Reader::default(),
        cluster,
        fleet,
    };
    scene::tenants(&simulation.cluster, options.networks).await?;
    say("agents");
    let before = simulation.read().await?;
    let starts = simulation.start_agents()?;
    tokio::time::sleep(REST).await;
    say("all nodes claim a block");
    let claims = simulation.claim_at_once().await?;
    say("pods that stay");
    let begin = simulation.read().await?;
    let scene = scene::fill(&simulation.cluster, &options).await?;
    let confirmed = scene::confirmed(&simulation.cluster, options.pods, SETTLING).await?;
    let filled = simulation.read().await?.since(&begin);
    tokio::time::sleep(REST * 3).await;
    say("nothing happens");
    let idle = simulation.idle(options.duration / 3).await?;
    say("pods come and go");
    drop(simulation.fleet.observed()?);
    let begin = simulation.read().await?;
    let changes = load::run(&simulation.cluster.client, &scene, options.rate, options.duration).await?;
    let end = simulation.read().await?;
    tokio::time::sleep(REST).await;
    let observed = simulation.fleet.observed()?;
    let load = end.since(&begin);
    load::end_all(&simulation.cluster.client, options.networks).await?;
    tokio::time::sleep(RELEASE).await;
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
    async fn read(&mut self) -> Result<Meters> {
        self.reader.read(&self.cluster, &self.fleet).await
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
        let cost = self.idle(REST).await?;
        all.push(OneChange { what: "nothing", cost });
        // On a node that has a pod of the network, and on one that has none.
        let tenant = scene.networks.min(2) - 1;
        let followers = scene.followers.get(&tenant).context("nobody follows the network")?;
        let inside = *followers.first().context("no node")?;
        let outside = (0..scene.nodes).find(|node| !followers.contains(node));
        let names = ["a pod comes, its node has others of the network", "it goes"];
        all.extend(self.comes_and_goes((inside, tenant), names).await?);
        if let Some(outside) = outside {
            let names = [
                "a pod comes, the first of its network on its node",
                "it goes, the last of its network on its node",
            ];
            all.extend(self.comes_and_goes((outside, tenant), names).await?);
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
        place: (usize, usize),
        [comes, goes]: [&'static str; 2],
    ) -> Result<[OneChange; 2]> {
        let (node, network) = place;
        let mut attempt = 0;
        loop {
            let object = scene::pod(network, "single", node, &json!({}));
            let begin = self.read().await?;
            scene::create(&self.cluster, &object, place).await?;
            let start = self.after(comes, &begin).await?;
            let begin = self.read().await?;
            load::end_pod(self.cluster.client.clone(), network, "single".to_owned()).await?;
            let end = self.after(goes, &begin).await?;
            attempt += 1;
            if attempt == ATTEMPTS || !(self.reached_all(&start) || self.reached_all(&end)) {
                return Ok([start, end]);
            }
            // The pod is the first one of its network again only when the node has released the block.
            tokio::time::sleep(RELEASE).await;
        }
    }

    /// The cost of a change of a pod's labels.
    async fn relabelled(&mut self, pod: &Standing) -> Result<OneChange> {
        let mut attempt = 0;
        loop {
            let begin = self.read().await?;
            self.relabel(pod, attempt).await?;
            let change = self.after("a label changes", &begin).await?;
            attempt += 1;
            if attempt == ATTEMPTS || !self.reached_all(&change) {
                return Ok(change);
            }
        }
    }

    /// Whether each node's watch of pods received an event. Most probably these were bookmarks: each watch gets one a
    /// minute and the API server counts them as events; the watches of agents that were started together get them in
    /// the same second. A change that does reach all nodes does so each time.
    fn reached_all(&self, change: &OneChange) -> bool {
        let events = change.cost.events.get("pods").copied().unwrap_or_default();
        events >= count(self.places.len())
    }

    async fn after(&mut self, what: &'static str, begin: &Meters) -> Result<OneChange> {
        tokio::time::sleep(REST).await;
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
