use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{Agent, eventually_sync, long, patience, require};
use serde_json::json;

use super::scene::{Call, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn b18_an_agent_that_dies_during_add_leaves_one_address_or_none() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("dies").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    // The kills cover the time from before the connection until after the answer.
    let step = if long() { 1 } else { 2 };
    for delay in [0, 1, 2, 3, 4, 5, 6, 8, 10, 14].into_iter().step_by(step) {
        let (node, options) = (&scene.stage.node, scene.stage.options.clone());
        let (outcome, agent) = std::thread::scope(|scope| -> Result<_> {
            let adding = scope.spawn(|| scene.call("ADD", &call));
            std::thread::sleep(Duration::from_millis(delay));
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(i32::try_from(scene.stage.agent.pid())?),
                nix::sys::signal::Signal::SIGKILL,
            )?;
            let agent = Agent::start_unready(node, options)?;
            agent.wait_ready(patience())?;
            Ok((adding.join().expect("no panic")?, agent))
        })?;
        scene.stage.agent = agent;
        // The plugin repeats its own call, so the runtime sees no failure.
        outcome.result();
        assert_eq!(scene.used("default").await?, 2, "after a kill at {delay} ms");
        assert_eq!(scene.listed("abc").await?.len(), 1);
        // A runtime that repeats the call is refused, as it would be without a kill.
        scene.call("ADD", &call)?.error(101);
        scene.del(&call)?;
        assert_eq!(scene.used("default").await?, 0);
    }
    scene.stage.assert_as(&before).await
}

/// Number of containers with concurrent calls.
const WORKERS: usize = 4;

fn kills() -> u64 {
    if long() { 12 } else { 6 }
}

/// Adds and deletes until `stop`, as a runtime does: a failed ADD is followed by a DEL, and a DEL is repeated until it
/// succeeds. Counts the pods.
fn live(scene: &Scene, worker: usize, stop: &AtomicBool, lives: &AtomicU32) -> Result<()> {
    let netns = format!("worker{worker}");
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let call = Call::new(&format!("w{worker}-{turn}"), &netns);
        let call = if turn % 3 == 0 {
            call.annotated(&json!({"kni.io/multi-network": "blue"}))
        } else {
            call
        };
        if scene.call("ADD", &call)?.success {
            lives.fetch_add(1, Ordering::Relaxed);
        }
        eventually_sync(patience(), || {
            let outcome = scene.call("DEL", &call)?;
            ensure!(outcome.success, "DEL never succeeds: {outcome:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_at_any_moment_of_add_and_del_leak_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("storm").await?;
    for worker in 0..WORKERS {
        scene.netns(&format!("worker{worker}"))?;
    }
    let before = scene.stage.picture().await?;
    let (stop, lives) = (AtomicBool::new(false), AtomicU32::new(0));
    let agent = std::thread::scope(|scope| -> Result<Agent> {
        let (scene, stop, lives) = (&scene, &stop, &lives);
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| scope.spawn(move || live(scene, worker, stop, lives)))
            .collect();
        let stormed = storm(scene, lives);
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no panic")?;
        }
        stormed
    })?;
    scene.stage.agent = agent;
    let pods = lives.load(Ordering::Relaxed);
    assert!(u64::from(pods) > kills(), "only {pods} pods lived: this was no storm");
    scene
        .until("the end of pending deletes", || async {
            Ok(scene.pending()?.is_empty())
        })
        .await?;
    assert_eq!((scene.used("default").await?, scene.used("blue").await?), (0, 0));
    println!("{pods} pods lived through {} kills", kills());
    scene.stage.assert_as(&before).await
}

/// Kills a series of agents, and until more pods have lived than there were kills; the last one remains.
fn storm(scene: &Scene, lives: &AtomicU32) -> Result<Agent> {
    let kill = |pid: u32| {
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        )
    };
    let mut agent: Option<Agent> = None;
    let enough = Instant::now() + patience();
    for number in 0.. {
        let few = u64::from(lives.load(Ordering::Relaxed)) <= kills();
        if number >= kills() && !(few && Instant::now() < enough) {
            break;
        }
        // Each at a different moment of a call, which takes a few milliseconds.
        std::thread::sleep(Duration::from_millis(150 + number * 37 % 200));
        match &mut agent {
            Some(agent) => agent.kill9()?,
            None => kill(scene.stage.agent.pid())?,
        }
        let next = Agent::start_unready(&scene.stage.node, scene.stage.options.clone())?;
        next.wait_ready(patience())?;
        agent = Some(next);
    }
    agent.ok_or_else(|| anyhow::anyhow!("no kill"))
}
