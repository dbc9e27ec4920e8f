//! Measures how long pods take to run and to be ready, by CNI and by KNI, with the same agent.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    process::{Child, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use kni_integration::{long, require};
use serde_json::{Value, json};

use super::super::scene::{PATIENCE, Scene, server};

/// At most this many alternations of a way with the other one.
const ROUNDS: usize = 3;
/// Within this time kubectl watches.
const WATCHING: Duration = Duration::from_secs(1);

#[test]
fn pods_start_by_kni_as_fast_as_by_cni() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut ways = [
        ("CNI", Scene::start("figures-cni")?),
        ("KNI", Scene::by_kni("figures-kni")?),
    ];
    // Creates what remains after a first pod.
    for (_, scene) in &mut ways {
        let _first = measure(scene, "first", 1)?;
    }
    let (sizes, fewest): (&[usize], usize) = if long() { (&[30, 100, 110], ROUNDS) } else { (&[10], 1) };
    sizes.iter().try_for_each(|&size| compare(&mut ways, size, fewest))
}

/// Measures `size` pods at once by both ways in at least `fewest` rounds. The figures are for docs/performance.md; only
/// a gross difference of the medians is a failure, and only one that further rounds do not refute: on a busy machine a
/// single round can take twice as long as another of the same way.
fn compare(ways: &mut [(&str, Scene); 2], size: usize, fewest: usize) -> Result<()> {
    let mut found = [Vec::new(), Vec::new()];
    let mut medians = [Duration::MAX; 2];
    for round in 0..ROUNDS {
        // Each is the first one in turn.
        for way in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            found[way].extend(measure(&mut ways[way].1, &format!("pod-{size}-{round}"), size)?);
        }
        medians = [report(ways[0].0, size, &found[0]), report(ways[1].0, size, &found[1])];
        if round + 1 >= fewest && medians[1] < 2 * medians[0] {
            return Ok(());
        }
    }
    bail!("KNI takes {:?}, CNI {:?}", medians[1], medians[0])
}

/// Prints the percentiles of all rounds so far and returns the median of the time to be ready.
fn report(way: &str, size: usize, times: &[Times]) -> Duration {
    let running = percentiles(times.iter().map(|times| times.running).collect());
    let ready = percentiles(times.iter().map(|times| times.ready).collect());
    println!(
        "{} by {way}, {size} at once: Running p50 {} ms, p99 {} ms; Ready p50 {} ms, p99 {} ms",
        times.len(),
        running[0].as_millis(),
        running[1].as_millis(),
        ready[0].as_millis(),
        ready[1].as_millis()
    );
    running[0].max(ready[0])
}

/// Times since the creation of a pod, as a client of the API server sees them.
#[derive(Debug, Clone, Copy)]
struct Times {
    running: Duration,
    ready: Duration,
}

/// p50 and p99.
fn percentiles(mut times: Vec<Duration>) -> [Duration; 2] {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100).saturating_sub(1)];
    [at(50), at(99)]
}

/// Creates pods at once, waits until all are ready, and deletes them. Their names are new: of 110 pods with the names
/// of deleted ones, some waited for two minutes, by CNI as well.
fn measure(scene: &mut Scene, name: &str, count: usize) -> Result<Vec<Times>> {
    let watch = Watch::start(scene)?;
    // kubectl prints nothing when the watch begins.
    thread::sleep(WATCHING);
    let pods: Vec<Value> = (0..count).map(|n| server(&format!("{name}-{n}"), &json!({}))).collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": pods });
    scene.local().apply(&list)?;
    scene.machine.local.wait("all pods are ready", PATIENCE, |_| {
        let seen = watch.seen();
        Ok(seen.len() == count && seen.values().all(|seen| seen.ready.is_some()))
    })?;
    let times = watch.seen().into_values().map(|seen| {
        Ok(Times {
            running: seen.running.context("never Running")? - seen.created,
            ready: seen.ready.context("never Ready")? - seen.created,
        })
    });
    let times = times.collect::<Result<Vec<_>>>()?;
    drop(watch);
    let patience = format!("--timeout={}s", PATIENCE.as_secs());
    let delete = ["delete", "pods", "--all", "--grace-period=1", &patience];
    scene.local().kubectl(&delete)?;
    Ok(times)
}

/// When the states of a pod arrived.
#[derive(Debug, Clone, Copy)]
struct Seen {
    created: Instant,
    running: Option<Instant>,
    ready: Option<Instant>,
}

/// A watch of all pods, until it is dropped.
struct Watch {
    kubectl: Child,
    seen: Arc<Mutex<BTreeMap<String, Seen>>>,
}

impl Watch {
    fn start(scene: &Scene) -> Result<Self> {
        let mut command = scene.local().kubectl_command();
        let line =
            "jsonpath={.metadata.name} {.status.phase} {.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}";
        command.args(["get", "pods", "--watch", "-o", line]);
        let mut kubectl = command.stdout(Stdio::piped()).spawn().context("kubectl get --watch")?;
        let output = kubectl.stdout.take().context("no stdout")?;
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let shared = Arc::clone(&seen);
        // Ends with kubectl.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                note(&mut shared.lock().unwrap_or_else(PoisonError::into_inner), &line);
            }
        });
        Ok(Self { kubectl, seen })
    }

    fn seen(&self) -> BTreeMap<String, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn note(all: &mut BTreeMap<String, Seen>, line: &str) {
    let now = Instant::now();
    let mut words = line.split(' ');
    let (Some(name), Some(phase)) = (words.next(), words.next()) else {
        return;
    };
    let seen = all.entry(name.to_owned()).or_insert(Seen {
        created: now,
        running: None,
        ready: None,
    });
    if phase == "Running" {
        seen.running.get_or_insert(now);
    }
    if words.next() == Some("True") {
        seen.ready.get_or_insert(now);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.kubectl.kill());
        drop(self.kubectl.wait());
    }
}
