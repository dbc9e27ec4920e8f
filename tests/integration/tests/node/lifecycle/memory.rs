use std::{
    fmt::Write as _,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Kubelet, Manifest, agent::SOCKET, eventually, kubelet::Sandbox, long, manifest::network_policy, patience, require,
};
use kni_proto::runtime::ListMapsRequest;
use tokio::task::JoinSet;

use crate::watched::{Watched, warm};

/// As many pods as the kubelet runs by default.
const PODS: usize = 110;
/// Each of a namespace of its own.
const POLICIES: u32 = 4;
/// Ranges of each policy, each of which is a row. A namespace may not use all rows.
const RANGES: u32 = 2_500;
/// The maps with the rows of policies.
const TABLES: [&str; 3] = ["POLICY", "PORTS", "IDENTITIES"];
/// The agent's own memory with these pods and policies, in kB. Pages of the program's file are not counted: the kernel
/// drops them when it needs memory, and the programs of tests are larger than releases.
const MOST_KB: u64 = 40 * 1024;
const WORKERS: usize = 4;
/// Longer than the agent waits before it returns free pages to the kernel.
const TRIMMED: Duration = Duration::from_secs(11);
/// Attaches and detaches after which the memory is compared.
const FEW: usize = 1_000;

fn many() -> usize {
    if long() { 20_000 } else { 2_000 }
}

fn policies() -> Manifest {
    let mut text = String::new();
    for policy in 0..POLICIES {
        let mut peers = String::from("{podSelector: {}}");
        for n in policy * RANGES..(policy + 1) * RANGES {
            let [_, high, middle, low] = n.to_be_bytes();
            let _infallible = write!(peers, ", {{ipBlock: {{cidr: {}.{middle}.{low}.0/24}}}}", 64 + high);
        }
        let spec = format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: [{{from: [{peers}]}}]}}");
        text += &network_policy(&format!("memory-{policy}"), "ranges", &spec);
    }
    Manifest::file("memory.yaml", text)
}

/// What the agent's process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Use {
    resident_kb: u64,
    /// The part that no file holds.
    anonymous_kb: u64,
    threads: u64,
    descriptors: usize,
}

impl Use {
    fn of(stage: &Watched) -> Result<Self> {
        let process = format!("/proc/{}", stage.agent.pid());
        let status = fs::read_to_string(format!("{process}/status"))?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let value = line.and_then(|rest| rest.split_whitespace().next());
            Ok(value.with_context(|| format!("no {name}"))?.parse()?)
        };
        Ok(Self {
            resident_kb: field("VmRSS:")?,
            anonymous_kb: field("RssAnon:")?,
            threads: field("Threads:")?,
            descriptors: fs::read_dir(format!("{process}/fd"))?.count(),
        })
    }
}

async fn policy_rows(stage: &Watched) -> Result<u32> {
    let listed = stage
        .kubelet
        .runtime()
        .list_maps(ListMapsRequest {})
        .await?
        .into_inner();
    let policies = listed.maps.iter().filter(|map| TABLES.contains(&map.name.as_str()));
    Ok(policies.map(|map| map.entries).sum())
}

/// Attaches and detaches this many pods, a few at once.
async fn churn(stage: &Watched, lives: usize) -> Result<()> {
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
        workers.spawn(async move {
            for _ in 0..lives / WORKERS {
                let name = format!("churn-{worker}");
                let netns = kubelet.create_network("memory", &name).await?;
                let sandbox = Sandbox::new("memory", &name, &netns);
                kubelet.attach(&sandbox).await?;
                kubelet.detach(&sandbox.id).await?;
                kubelet.delete_network(&sandbox.id).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    stage.settled().await
}

/// The use of the agent when it has returned its free pages.
async fn least(stage: &Watched) -> Result<Use> {
    let (start, mut least) = (Instant::now(), Use::of(stage)?);
    while start.elapsed() < TRIMMED {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = Use::of(stage)?;
        if now.anonymous_kb < least.anonymous_kb {
            least = now;
        }
    }
    Ok(least)
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_bounded_with_many_pods_and_rows_and_does_not_grow_with_churn() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut options = warm(8);
    options.manifests.push(policies());
    let stage = Watched::with("memory", options).await?;
    let before = stage.picture().await?;
    let started = Use::of(&stage)?;
    let mut pods = Vec::new();
    for pod in 0..PODS {
        let namespace = format!("memory-{}", pod % 4);
        let pod = stage.kubelet.run_pod(&namespace, &format!("web-{pod}"), &[]).await?;
        pods.push(pod);
    }
    stage.settled().await?;
    let rows = policy_rows(&stage).await?;
    ensure!(rows >= POLICIES * RANGES, "only {rows} policy rows");
    let full = eventually(patience(), async || {
        let full = Use::of(&stage)?;
        ensure!(full.anonymous_kb <= MOST_KB, "at most {MOST_KB} kB: {full:?}");
        Ok(full)
    })
    .await?;
    println!("at the start {started:?}; with {PODS} pods and {rows} policy rows {full:?}");
    for pod in pods {
        stage.kubelet.kill_pod(pod).await?;
    }
    stage.settled().await?;

    churn(&stage, FEW).await?;
    let few = least(&stage).await?;
    churn(&stage, many() - FEW).await?;
    let many_lives = many();
    // Free pages are returned, and threads for blocking work end, some time after the last call.
    let after = eventually(patience(), async || {
        let after = Use::of(&stage)?;
        ensure!(
            after.anonymous_kb * 100 <= few.anonymous_kb * 105,
            "the memory grows: {few:?}, then {after:?}"
        );
        // How many threads run blocking work at once depends on the machine's load.
        ensure!(
            after.threads <= started.threads,
            "threads leak: {started:?}, then {after:?}"
        );
        // The agent closes the connections of clients soon after their end.
        ensure!(
            after.descriptors <= few.descriptors,
            "descriptors leak: {few:?}, then {after:?}"
        );
        Ok(after)
    })
    .await?;
    println!("after {FEW} attaches {few:?}; after {many_lives} {after:?}");
    stage.assert_as(&before).await
}
