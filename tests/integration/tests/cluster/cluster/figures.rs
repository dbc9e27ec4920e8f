//! Measures the delay between the API server's answer and the enforcement of a policy, and the agent's memory.
//!
//! A benchmark, and so a long test. `KNI_FIGURES=1` measures with the numbers of pods, policies and changes in the
//! documentation; without it a small run shows that the measurement works. That policies apply, also changed ones and
//! to flows that exist, is shown by `faults`, `fabric::policies` and `fabric::peers` in every run.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kni_api::NodeNetwork;
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    require, wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::scene::{address, tenants};

const PORT: u16 = 7100;
/// Interval of probes: the resolution of the measurement.
const PERIOD: Duration = Duration::from_micros(250);
/// Number of consecutive lost probes that count as a denial.
const DENIED: usize = 12;
/// A probe that has not arrived after this time counts as lost.
const LAG: Duration = Duration::from_millis(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: a benchmark, which has the machine alone"]
async fn policies_hold_soon_after_the_answer() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let full = std::env::var("KNI_FIGURES").is_ok_and(|value| value == "1");
    let (pods, policies, changes) = if full { (500, 1000, 200) } else { (30, 50, 15) };
    let cluster = Cluster::start("cluster-figures", 1).await?;
    tenants(&cluster).await?;
    let running = many(&cluster, pods, policies).await?;
    let [client, server] = &running[..2] else {
        unreachable!("there are more");
    };
    println!(
        "{pods} pods, {policies} policies known: the agent's RSS is {} MiB",
        rss(&cluster)? >> 10
    );

    let probes = Probes::start(client, server)?;
    wait::until("probes arrive", patience(), async || Ok(probes.arrives())).await?;
    let about = json!({ "podSelector": { "matchLabels": { "number": "1" } }, "policyTypes": ["Ingress"] });
    let new = objects::policy("red-team", "new", &about);
    let mut times = Vec::new();
    for _change in 0..changes {
        times.push(denied_after(&cluster, &probes, &new).await?);
        cluster.delete(&new).await?;
        wait::until("probes arrive again", patience(), async || Ok(probes.arrives())).await?;
    }
    report("new policy", times);

    let from = |number: &str| {
        let mut policy = objects::policy("red-team", "changed", &about);
        let peer = json!({ "podSelector": { "matchLabels": { "number": number } } });
        policy["spec"]["ingress"] = json!([{ "from": [peer] }]);
        policy
    };
    let (open, closed) = (from("0"), from("2"));
    let mut times = Vec::new();
    for _change in 0..changes {
        cluster.apply(std::slice::from_ref(&open)).await?;
        wait::until("probes arrive again", patience(), async || Ok(probes.arrives())).await?;
        times.push(denied_after(&cluster, &probes, &closed).await?);
    }
    report("changed policy", times);
    println!("the agent's RSS is {} MiB", rss(&cluster)? >> 10);
    Ok(())
}

/// Pods in red, and policies for some of them, all applied.
async fn many(cluster: &Cluster, pods: usize, policies: usize) -> Result<Vec<Pod>> {
    let start = Instant::now();
    let objects: Vec<Value> = (0..pods)
        .map(|n| {
            let labels = json!({ "labels": { "number": n.to_string() } });
            objects::pod_with("red-team", &format!("p-{n}"), "node1", &labels)
        })
        .collect();
    let running = cluster.run(&objects).await?;
    println!("{pods} pods run after {:?}", start.elapsed());
    let start = Instant::now();
    let objects: Vec<Value> = (0..policies)
        .map(|n| {
            let spec = json!({
                // Excludes the two measured pods.
                "podSelector": { "matchLabels": { "number": (2 + n % (pods - 2)).to_string() } },
                "ingress": [{
                    "from": [{ "podSelector": { "matchLabels": { "number": (n % 50).to_string() } } }],
                    "ports": [{ "port": 1000 + n }],
                }],
            });
            objects::policy("red-team", &format!("many-{n}"), &spec)
        })
        .collect();
    let applied = stream::iter(objects.iter().map(|object| cluster.apply_one(object))).buffer_unordered(16);
    applied.try_for_each(async |_applied| Ok(())).await?;
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    wait::until("all policies are in force", 2 * patience(), async || {
        let known = api.get("node1").await?.status.context("no status yet")?.policies;
        Ok(known.programmed && known.known == i64::try_from(policies)?)
    })
    .await?;
    println!("{policies} policies are in force after {:?}", start.elapsed());
    Ok(running)
}

/// The time from the API server's answer to the first denied probe.
async fn denied_after(cluster: &Cluster, probes: &Probes, policy: &Value) -> Result<Duration> {
    cluster.apply(std::slice::from_ref(policy)).await?;
    let answered = Instant::now();
    let denied = wait::until_some("probes are denied", patience(), async || Ok(probes.denied_since())).await?;
    Ok(denied.saturating_duration_since(answered))
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
    let last = times.last().copied().unwrap_or_default();
    println!(
        "{what}, {} times: p50 {:?}, p99 {:?}, longest {last:?}",
        times.len(),
        at(50),
        at(99)
    );
    assert!(last < Duration::from_secs(2), "a policy took {last:?}");
}

fn rss(cluster: &Cluster) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.nodes[0].agent.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB").parse()?;
    ensure!(kib > 0);
    Ok(kib)
}

/// Datagrams from one pod to another, each in a new flow, so that policies are evaluated for each.
struct Probes {
    shared: Arc<Sent>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Sent {
    stop: AtomicBool,
    /// The time of sending of each probe, by its number.
    times: Mutex<Vec<Instant>>,
    arrived: Mutex<BTreeSet<usize>>,
}

impl Probes {
    fn start(client: &Pod, server: &Pod) -> Result<Self> {
        let any = if address(server, true).is_ipv4() {
            "0.0.0.0"
        } else {
            "::"
        };
        let at = SocketAddr::new(any.parse()?, PORT);
        let socket = server.enter(|| UdpSocket::bind(at))??;
        socket.set_read_timeout(Some(LAG))?;
        let to = SocketAddr::new(address(server, true), PORT);
        let shared = Arc::new(Sent::default());
        let (receiving, sending) = (Arc::clone(&shared), Arc::clone(&shared));
        let inside = client.inside.clone();
        let threads = vec![
            thread::spawn(move || receiving.receive(&socket)),
            thread::spawn(move || {
                // The thread of `enter` sends: each socket has to be created inside.
                let sent = inside.enter(|| sending.send(to));
                assert!(matches!(sent, Ok(Ok(()))), "{sent:?}");
            }),
        ];
        Ok(Self { shared, threads })
    }

    /// Whether the latest probes that had time to arrive have arrived.
    fn arrives(&self) -> bool {
        let (settled, arrived) = self.shared.settled();
        settled > DENIED && (settled - DENIED..settled).all(|number| arrived.contains(&number))
    }

    /// The time of the first lost probe, if the latest ones were lost.
    fn denied_since(&self) -> Option<Instant> {
        let (settled, arrived) = self.shared.settled();
        let first = arrived.last().map_or(0, |last| last + 1);
        let lost = settled.saturating_sub(first);
        let sent = self.shared.times.lock().unwrap_or_else(PoisonError::into_inner);
        (lost >= DENIED).then(|| sent.get(first).copied()).flatten()
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the thread has already been printed.
            drop(thread.join());
        }
    }
}

impl Sent {
    fn send(&self, to: SocketAddr) -> std::io::Result<()> {
        let mut next = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            let number = {
                let mut sent = self.times.lock().unwrap_or_else(PoisonError::into_inner);
                sent.push(Instant::now());
                sent.len() - 1
            };
            socket.send_to(&number.to_be_bytes(), to)?;
            next += PERIOD;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    fn receive(&self, socket: &UdpSocket) {
        let mut number = [0; size_of::<usize>()];
        while !self.stop.load(Ordering::Relaxed) {
            // An error leaves a gap in the probes.
            if matches!(socket.recv(&mut number), Ok(length) if length == number.len()) {
                let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
                arrived.insert(usize::from_be_bytes(number));
                // Older numbers are never read.
                while arrived.len() > 1024 {
                    arrived.pop_first();
                }
            }
        }
    }

    /// The number of probes that have arrived or are lost, and the latest of those that arrived.
    fn settled(&self) -> (usize, BTreeSet<usize>) {
        let before = Instant::now().checked_sub(LAG);
        let sent = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let settled = sent.partition_point(|at| before.is_some_and(|before| *at < before));
        drop(sent);
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        (settled, arrived.clone())
    }
}
