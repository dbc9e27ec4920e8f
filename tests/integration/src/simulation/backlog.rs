//! Creates pods faster than the control plane confirms them, and measures how fast it does until all are confirmed.

use std::{
    fmt::{self, Display, Formatter},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::Result;
use tokio::time::sleep;

use super::{Options, Simulation, count, scene};
use crate::{cluster::Cluster, cpu_times::CpuTimes};

/// Confirmations are counted over this time.
const WINDOW: Duration = Duration::from_secs(20);
/// Pause between two looks at all members, each of which costs the API server a list of them.
const LOOK: Duration = Duration::from_secs(2);
/// How long it may take until all pods are confirmed.
const PATIENCE: Duration = Duration::from_mins(15);

/// A part of the time until all pods were confirmed.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its length in seconds.
    pub seconds: f64,
    /// Pods that were created and not confirmed, when it began and when it ended.
    pub waiting: (usize, usize),
    /// Pods that were confirmed in a second.
    pub rate: f64,
    /// The share of the machine's CPU time that was used.
    pub busy: f64,
}

/// How pods were confirmed.
#[derive(Debug)]
pub struct Backlog {
    /// Nodes and pods.
    pub size: (usize, usize),
    /// Pods that were confirmed in the end.
    pub confirmed: usize,
    /// Seconds from the first pod until then.
    pub seconds: f64,
    /// The time in parts.
    pub windows: Vec<Window>,
}

impl Backlog {
    /// Pods that were confirmed in a second, on average.
    pub fn rate(&self) -> f64 {
        count(self.confirmed) / self.seconds
    }

    /// Whether all pods are confirmed.
    pub fn is_drained(&self) -> bool {
        self.confirmed == self.size.1
    }

    /// The parts that began and ended with so many pods to confirm: their creation did not hold up anything.
    pub fn saturated(&self, waiting: f64) -> impl Iterator<Item = &Window> {
        let has = move |pods| count(pods) >= waiting;
        let parts = self.windows.iter();
        parts.filter(move |one| has(one.waiting.0) && has(one.waiting.1))
    }
}

impl Display for Backlog {
    fn fmt(&self, text: &mut Formatter<'_>) -> fmt::Result {
        let (nodes, pods) = self.size;
        let (confirmed, seconds, rate) = (self.confirmed, self.seconds, self.rate());
        writeln!(
            text,
            "{nodes} nodes: {confirmed} of {pods} pods confirmed after {seconds:.0} s, {rate:.1}/s"
        )?;
        for one in &self.windows {
            let Window {
                seconds,
                waiting: (before, after),
                rate,
                busy,
            } = one;
            writeln!(
                text,
                "  {seconds:.0} s: {rate:.1}/s, {before} waiting, then {after}, {:.0} % of the CPU",
                busy * 100.0
            )?;
        }
        Ok(())
    }
}

/// Simulates the nodes, without a load but the creation of the pods that stay. `say` gets what begins.
pub async fn run(options: Options, say: impl Fn(&str)) -> Result<Backlog> {
    say("control plane");
    let mut simulation = Simulation::without_agents(&options).await?;
    say("agents");
    simulation.start_agents()?;
    simulation.quiet().await?;
    say("all nodes claim a block");
    simulation.claim_at_once().await?;
    simulation.quiet().await?;
    say("pods");
    let created = AtomicUsize::new(0);
    let cluster = &simulation.cluster;
    let (_scene, backlog) = tokio::try_join!(
        scene::fill(cluster, &options, &created),
        watch(cluster, &options, &created),
    )?;
    Ok(backlog)
}

/// Counts until all pods are confirmed, but not longer than [`PATIENCE`].
async fn watch(cluster: &Cluster, options: &Options, created: &AtomicUsize) -> Result<Backlog> {
    let cores = count(std::thread::available_parallelism()?.get());
    let first = Instant::now();
    let (mut windows, mut begin) = (Vec::new(), (first, 0, 0, CpuTimes::read()?));
    loop {
        sleep(LOOK).await;
        let confirmed = scene::confirmed_now(cluster).await?;
        let (since, confirmed_before, waiting_before, busy_before) = &begin;
        let is_last = confirmed >= options.pods || first.elapsed() > PATIENCE;
        if is_last || since.elapsed() >= WINDOW {
            let now = Instant::now();
            let seconds = (now - *since).as_secs_f64();
            let waiting = created.load(Ordering::Relaxed).saturating_sub(confirmed);
            let busy = CpuTimes::read()?;
            windows.push(Window {
                seconds,
                waiting: (*waiting_before, waiting),
                rate: count(confirmed.saturating_sub(*confirmed_before)) / seconds,
                busy: busy.busy().saturating_sub(busy_before.busy()).as_secs_f64() / seconds / cores,
            });
            begin = (now, confirmed, waiting, busy);
        }
        if is_last {
            return Ok(Backlog {
                size: (options.nodes, options.pods),
                confirmed,
                seconds: first.elapsed().as_secs_f64(),
                windows,
            });
        }
    }
}
