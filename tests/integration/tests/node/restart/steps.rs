use std::{
    io::Write as _,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, Kubelet, agent::SOCKET, kubelet::Sandbox, long, patience, require, wait};
use kni_proto::kni::DeleteNetworkRequest;
use tonic::Status;

use crate::watched::{Watched, warm};

/// The calls of one pod's life take less than this.
const LIFE: Duration = Duration::from_millis(6);

/// Time between two kills: short enough for each step of the calls, or for some of them.
fn step() -> Duration {
    Duration::from_micros(if long() { 100 } else { 600 })
}

/// What a kubelet knows of a pod, whichever of its calls were answered.
type Known = Arc<Mutex<Option<Sandbox>>>;

/// All calls for one pod, without a repetition.
async fn live(kubelet: Kubelet, known: Known) -> Result<(), Status> {
    let netns = kubelet.create_network("steps", "pod").await?;
    let sandbox = Sandbox::new("steps", "pod", &netns);
    *known.lock().expect("no panic") = Some(sandbox.clone());
    kubelet.attach(&sandbox).await?;
    kubelet.detach(&sandbox.id).await?;
    kubelet.delete_network(&sandbox.id).await
}

/// Sleeps with the precision that the steps need.
fn pause(duration: Duration) {
    let end = Instant::now() + duration;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// As the kubelet does after a lost connection: it repeats the attach, or gives the pod up.
async fn go_on(stage: &Watched, known: Option<Sandbox>, attaches: bool) -> Result<()> {
    let kubelet = &stage.kubelet;
    if let Some(sandbox) = known {
        if attaches && kubelet.attach(&sandbox).await.is_ok() {
            let answer = kubelet.query(&sandbox.id).await?;
            let eth0 = answer.ipconfigs.get("eth0").context("no eth0")?;
            ensure!(eth0.ip.len() == 2, "{answer:?}");
            ensure!(stage.interfaces().await?.len() == 1, "not one interface");
        }
        kubelet.detach(&sandbox.id).await?;
        kubelet.delete_network(&sandbox.id).await?;
    }
    delete_by_name(kubelet).await?;
    ensure!(stage.interfaces().await?.is_empty(), "an interface is left");
    Ok(())
}

/// As the kubelet does that never got the path of the namespace.
async fn delete_by_name(kubelet: &Kubelet) -> Result<()> {
    let unheard = DeleteNetworkRequest {
        name: "pod".into(),
        namespace: "steps".into(),
        ..Default::default()
    };
    kubelet.kni().delete_network(unheard).await?;
    Ok(())
}

/// Starts another agent after one that was killed.
async fn replace_agent(stage: &mut Watched) -> Result<()> {
    stage.agent = Agent::start_unready(&stage.node, stage.options.clone())?;
    stage.agent.wait_ready(patience())?;
    stage.kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
    Ok(())
}

/// Returns in how many lives the kill was before the last answer.
async fn sweep(sandboxes: u32) -> Result<usize> {
    let mut stage = Watched::with("steps", warm(sandboxes)).await?;
    let before = stage.picture().await?;
    let (mut delay, mut cut_off) = (Duration::ZERO, 0);
    while delay < LIFE {
        let known = Known::default();
        let life = tokio::spawn(live(stage.kubelet.clone(), Arc::clone(&known)));
        tokio::task::block_in_place(|| pause(delay));
        stage.agent.kill9()?;
        cut_off += usize::from(life.await?.is_err());
        replace_agent(&mut stage).await?;
        let known = known.lock().expect("no panic").take();
        let attaches = cut_off % 2 == 0;
        go_on(&stage, known, attaches)
            .await
            .with_context(|| format!("after a kill at {delay:?}, {sandboxes} sandboxes prewarmed"))?;
        delay += step();
    }
    stage.assert_as(&before).await?;
    Ok(cut_off)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_at_any_step_of_a_pods_life_leaves_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in [2, 0] {
        let cut_off = sweep(sandboxes).await?;
        println!(
            "{sandboxes} prewarmed: {cut_off} lives cut off by kills each {:?}",
            step()
        );
        assert!(cut_off > 2, "the kills came too late");
    }
    Ok(())
}

/// How long after a change the agent writes it to the file. Some of these are much less than the 400 ms after which the
/// agent writes it in any case, so that most lives detect a missing write.
const IN_FILE: Duration = Duration::from_millis(20);
/// As many writes of the test itself, each after that time, show how late the agent's may be on this machine now.
const CONTROLS: usize = 3;

/// Waits as long as the agent needs for its write.
async fn written(stage: &Watched) -> Result<()> {
    for _ in 0..CONTROLS {
        tokio::time::sleep(IN_FILE).await;
        stage.node.enter(|| {
            let mut control = std::fs::File::create("/run/control")?;
            control.write_all(b"as the agent does")?;
            control.sync_all()
        })??;
    }
    stage.node.enter(|| std::fs::remove_file("/run/control"))??;
    Ok(())
}

/// Kills the agent, and starts one that finds the file alone, as releases without the copy do.
async fn replace_by_file(stage: &mut Watched) -> Result<()> {
    written(stage).await?;
    stage.agent.kill9()?;
    stage.node.run("rm", &["/sys/fs/bpf/kni/records"])?;
    replace_agent(stage).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_alone_soon_has_what_clients_get_and_return() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in [2, 0] {
        let mut stage = Watched::with("soon", warm(sandboxes)).await?;
        let before = stage.picture().await?;
        for life in 0..4 {
            let netns = stage.kubelet.create_network("steps", "pod").await?;
            wait::until("the pool is full", patience(), async || {
                Ok(stage.status().await?.warm_sandboxes == sandboxes)
            })
            .await?;
            replace_by_file(&mut stage).await?;
            let exists = |stage: &Watched| stage.node.run("test", &["-e", &netns]).is_ok();
            ensure!(exists(&stage), "life {life}: {netns} was removed");
            delete_by_name(&stage.kubelet).await?;
            ensure!(!exists(&stage), "life {life}: the file does not have who got {netns}");

            let pod = stage.kubelet.run_pod("steps", "pod", &[]).await?;
            stage.settled().await?;
            stage.kubelet.detach(&pod.id).await?;
            replace_by_file(&mut stage).await?;
            let left = stage.status().await?.sandboxes;
            ensure!(left == 0, "life {life}: the file does not have the detach");
            stage.kubelet.delete_network(&pod.id).await?;
            stage.settled().await?;
        }
        stage.assert_as(&before).await?;
    }
    Ok(())
}
