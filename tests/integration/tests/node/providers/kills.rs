use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use kni_integration::{Agent, Kubelet, agent::SOCKET, eventually, kubelet::Sandbox, long, require};
use kni_proto::kni::DeleteNetworkRequest;
use tokio::task::JoinSet;

use super::scene::{self, CACHE};
use crate::watched::Watched;

fn kills() -> u64 {
    if long() { 14 } else { 7 }
}

/// Timeout of a call over all its repetitions: it waits for plugins of a killed agent.
const PATIENCE: Duration = Duration::from_secs(90);
/// The annotations of each worker's pods.
const WISHES: [&[(&str, &str)]; 3] = [
    &[("k8s.v1.cni.cncf.io/networks", "lan,nic,vm")],
    &[
        ("kni.dev/network", "bridged"),
        ("k8s.v1.cni.cncf.io/networks", "default,vm"),
    ],
    &[("kni.dev/network", "lan"), ("k8s.v1.cni.cncf.io/networks", "bridged")],
];

/// Runs pods of one kind one after the other until `stop`. Returns their number.
async fn live(kubelet: Kubelet, worker: usize, stop: Arc<AtomicBool>) -> Result<u64> {
    let mut lives = 0;
    let name = format!("web-{worker}");
    while !stop.load(Ordering::Relaxed) {
        let Ok(netns) = kubelet.create_network("storm", &name).await else {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        };
        let mut sandbox = Sandbox::new("storm", &name, &netns);
        sandbox.annotate(WISHES[worker]);
        if kubelet.attach(&sandbox).await.is_ok() {
            lives += 1;
        }
        let detached = eventually(PATIENCE, async || Ok(kubelet.detach(&sandbox.id).await?)).await;
        detached.with_context(|| format!("{name} cannot be detached"))?;
        let deleted = eventually(PATIENCE, async || Ok(kubelet.delete_network(&sandbox.id).await?)).await;
        deleted.with_context(|| format!("{name} cannot be deleted"))?;
    }
    Ok(lives)
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
        workers.spawn(live(kubelet, worker, Arc::clone(&stop)));
    }
    let mut pause = 7_u64;
    for _kill in 0..kills() {
        pause = pause * 31 % 601;
        tokio::time::sleep(Duration::from_millis(60 + pause)).await;
        stage.agent.kill9()?;
        stage.agent = Agent::start_unready(&stage.node, stage.options.clone())?;
        stage.agent.wait_ready(Duration::from_mins(1))?;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(worker) = workers.join_next().await {
        lives.fetch_add(worker.map_err(|e| anyhow!(e))??, Ordering::Relaxed);
    }
    let lives = lives.load(Ordering::Relaxed);
    println!("{lives} pods lived");
    assert!(lives >= 5, "only {lives} pods lived: this was no storm");
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
