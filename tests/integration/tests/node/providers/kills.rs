use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use kni_integration::{Agent, Kubelet, agent::SOCKET, eventually, kubelet::Sandbox, long, patience, require};
use kni_proto::kni::DeleteNetworkRequest;
use tokio::task::JoinSet;

use super::scene::{self, CACHE};
use crate::watched::Watched;

fn kills() -> u64 {
    if long() { 14 } else { 7 }
}

/// As many pods must have been attached.
const LIVES: u64 = 5;

/// Timeout of a call over all its repetitions: it waits for plugins of a killed agent.
fn insistence() -> Duration {
    patience() + Duration::from_secs(30)
}

/// The annotations of each worker's pods.
const WISHES: [&[(&str, &str)]; 3] = [
    &[("k8s.v1.cni.cncf.io/networks", "lan,nic,vm")],
    &[
        ("kni.dev/network", "bridged"),
        ("k8s.v1.cni.cncf.io/networks", "default,vm"),
    ],
    &[("kni.dev/network", "lan"), ("k8s.v1.cni.cncf.io/networks", "bridged")],
];

/// Runs pods of one kind one after the other until `stop`, and counts them.
async fn live(kubelet: Kubelet, worker: usize, stop: Arc<AtomicBool>, lives: Arc<AtomicU64>) -> Result<()> {
    let name = format!("web-{worker}");
    while !stop.load(Ordering::Relaxed) {
        let Ok(netns) = kubelet.create_network("storm", &name).await else {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        };
        let mut sandbox = Sandbox::new("storm", &name, &netns);
        sandbox.annotate(WISHES[worker]);
        if kubelet.attach(&sandbox).await.is_ok() {
            lives.fetch_add(1, Ordering::Relaxed);
        }
        let detached = eventually(insistence(), async || Ok(kubelet.detach(&sandbox.id).await?)).await;
        detached.with_context(|| format!("{name} cannot be detached"))?;
        let deleted = eventually(insistence(), async || Ok(kubelet.delete_network(&sandbox.id).await?)).await;
        deleted.with_context(|| format!("{name} cannot be deleted"))?;
    }
    Ok(())
}

/// The moments of the kills are random; the running operation at each of them is not recorded.
#[tokio::test(flavor = "multi_thread")]
async fn kills_at_random_moments_leave_the_node_as_it_was() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut stage = Watched::with("kills", scene::options(scene::networks())).await?;
    scene::add_device(&stage)?;
    scene::write_chain(&stage.node)?;
    // The bridge, which its plugin never removes; a port gives it a permanent carrier.
    let first = stage.kubelet.run_pod("calm", "first", WISHES[1]).await?;
    scene::keep_bridge(&stage.node)?;
    stage.kubelet.kill_pod(first).await?;
    let before = scene::picture(&stage).await?;

    let stop = Arc::new(AtomicBool::new(false));
    let lives = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for worker in 0..WISHES.len() {
        let kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
        workers.spawn(live(kubelet, worker, Arc::clone(&stop), Arc::clone(&lives)));
    }
    let mut pause = 7_u64;
    let enough = Instant::now() + patience();
    for kill in 0.. {
        if kill >= kills() && (lives.load(Ordering::Relaxed) >= LIVES || Instant::now() > enough) {
            break;
        }
        pause = pause * 31 % 601;
        tokio::time::sleep(Duration::from_millis(60 + pause)).await;
        stage.agent.kill9()?;
        stage.agent = Agent::start_unready(&stage.node, stage.options.clone())?;
        stage.agent.wait_ready(patience())?;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(worker) = workers.join_next().await {
        worker.map_err(|e| anyhow!(e))??;
    }
    let lives = lives.load(Ordering::Relaxed);
    println!("{lives} pods lived");
    assert!(lives >= LIVES, "only {lives} pods lived: this was no storm");
    stage.kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
    for worker in 0..WISHES.len() {
        // Namespaces of unanswered create calls.
        let unheard = DeleteNetworkRequest {
            name: format!("web-{worker}"),
            namespace: "storm".into(),
            ..Default::default()
        };
        stage.kubelet.kni().delete_network(unheard).await?;
    }
    stage.node.wait_for_local("nic0", "fe80")?;
    scene::assert_as(&stage, &before).await?;
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    assert_eq!(scene::files(&stage.node, CACHE)?, Vec::<String>::new());
    Ok(())
}
