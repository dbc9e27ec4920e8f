use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use anyhow::{Result, anyhow};
use kni_integration::require;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::scene::{Call, PENDING, STATE, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn b04_del_of_what_was_never_added_succeeds() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("never").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    scene.del(&Call::new("never", "web-0"))?;
    scene.del(&Call::new("never", "no-namespace"))?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b05_del_twice_succeeds() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("again").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    scene.add(&call)?;
    assert_eq!(scene.used("default").await?, 2);
    scene.del(&call)?;
    scene.del(&call)?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b06_del_without_a_namespace_frees_everything() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("gone").await?;
    let before = scene.stage.picture().await?;
    for gone in [false, true] {
        scene.netns("web-0")?;
        let call = Call::new("abc", "web-0");
        scene.add(&call)?;
        if gone {
            scene.remove_netns("web-0")?;
        }
        let bare = Call {
            netns: String::new(),
            ..call
        };
        scene.del(&bare)?;
        assert_eq!(scene.used("default").await?, 0);
        if !gone {
            scene.remove_netns("web-0")?;
        }
        scene.stage.assert_as(&before).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b07_del_needs_no_previous_result() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("previous").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    let whole = scene.add(&call)?;
    for previous in [None, Some(whole), Some(json!({})), Some(json!("nonsense"))] {
        let del = match previous {
            None => call.clone(),
            Some(previous) => {
                scene.add(&call)?;
                call.clone().with("prevResult", previous)
            }
        };
        scene.del(&del)?;
        assert_eq!(scene.used("default").await?, 0);
    }
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b08_del_without_an_agent_is_kept_and_done_at_its_start() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("away").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    scene.add(&call)?;
    scene.stage.agent.kill9()?;
    let outcome = scene.call("DEL", &call)?;
    outcome.assert_silent_success();
    let control = scene.call("VERSION", &call)?.took;
    assert!(
        outcome.took < Duration::from_secs(4) + control * 10,
        "{outcome:?}, VERSION after {control:?}"
    );
    assert_eq!(scene.pending()?, ["abc.json"]);
    let mode = scene
        .stage
        .node
        .enter(|| fs::metadata(format!("{PENDING}/abc.json")))??
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    // A delete that cannot be recorded is not acknowledged.
    let unkept = Call::new("abd", "web-0").with("stateDir", json!("/proc/none"));
    let error = scene.call("DEL", &unkept)?.error(11);
    assert!(
        error["details"]
            .as_str()
            .is_some_and(|details| details.contains("/proc/none")),
        "{error}"
    );
    // Invalid files do not prevent the agent from starting.
    scene
        .stage
        .node
        .enter(|| fs::write(format!("{PENDING}/odd.json"), "{"))??;
    scene.stage.restart().await?;
    assert_eq!(scene.used("default").await?, 0, "done before it serves");
    assert_eq!(scene.pending()?, [""; 0]);
    let aside = format!("{STATE}/cni/rejected/odd.json");
    assert!(
        scene.stage.node.enter(|| Path::new(&aside).exists())?,
        "{}",
        scene.stage.agent.log()
    );
    scene
        .stage
        .node
        .enter(|| fs::remove_dir_all(format!("{STATE}/cni/rejected")))??;
    // The same id is used again, and its pod remains.
    scene.add(&call)?;
    assert_eq!(scene.used("default").await?, 2);
    scene.del(&call)?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_is_uninstalled_while_it_waits_leaves_nothing_behind() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("gone").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    scene.add(&call)?;
    scene.use_copy()?;
    scene.stage.agent.kill9()?;
    let patient = call.clone().with("timeouts", json!({"delConnectMs": 4000}));
    let error = std::thread::scope(|threads| {
        let waiting = threads.spawn(|| scene.call("DEL", &patient));
        scene.wait_for_copy()?;
        scene.uninstall_copy()?;
        let outcome = waiting.join().map_err(|_panic| anyhow!("the call panicked"))??;
        Ok::<_, anyhow::Error>(outcome.error(11))
    })?;
    let details = error["details"].as_str().unwrap_or_default();
    assert!(details.contains("uninstalled"), "{error}");
    assert_eq!(scene.pending()?, [""; 0]);
    // Nothing was acknowledged, so nothing is missing.
    scene.stage.restart().await?;
    assert_eq!(scene.used("default").await?, 2);
    scene.stage.kubelet.detach("abc").await?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_del_that_the_agent_did_not_answer_never_removes_a_later_add() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("slow").await?;
    scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    let impatient = call
        .clone()
        .with("timeouts", json!({"delConnectMs": 100, "delMs": 200}));
    let agent = Pid::from_raw(i32::try_from(scene.stage.agent.pid())?);
    for again in [false, true] {
        scene.add(&call)?;
        kill(agent, Signal::SIGSTOP)?;
        let deleted = scene.call("DEL", &impatient);
        let pending = scene.pending();
        kill(agent, Signal::SIGCONT)?;
        deleted?.assert_silent_success();
        assert_eq!(pending?, ["abc.json"]);
        if again {
            // It is older than the new call, so it is processed first, unless it has been processed already.
            scene.add(&call)?;
            scene
                .until("the end of the pending delete", || async {
                    Ok(scene.pending()?.is_empty())
                })
                .await?;
            // Longer than the agent's interval of checks.
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(scene.used("default").await?, 2, "the later one is gone");
            scene.del(&call)?;
        } else {
            scene
                .until("the delete", || async { Ok(scene.used("default").await? == 0) })
                .await?;
            scene
                .until("the end of its file", || async { Ok(scene.pending()?.is_empty()) })
                .await?;
        }
    }
    scene.stage.assert_as(&before).await
}
