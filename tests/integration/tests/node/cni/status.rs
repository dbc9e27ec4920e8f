use std::{fs, os::unix::net::UnixListener, time::Duration};

use anyhow::Result;
use kni_integration::{Manifest, agent::MANIFESTS, require};
use serde_json::json;

use super::scene::{Call, Scene};

/// Maximum duration: runtimes wait for the answer every few seconds.
const QUICK: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn b10_status_says_quickly_that_no_agent_serves() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("absent").await?;
    let call = Call::new("", "");
    let call = Call {
        netns: String::new(),
        ifname: String::new(),
        ..call
    };
    scene.call("STATUS", &call)?.assert_silent_success();
    scene.stage.agent.kill9()?;
    // The file of the socket exists without a listener.
    let socket = "/run/kni/kni.sock";
    assert!(scene.stage.node.enter(|| fs::exists(socket))??);
    let refuses = scene.call("STATUS", &call)?;
    let error = refuses.error(50);
    assert!(error["msg"].as_str().is_some_and(|msg| msg.contains(socket)), "{error}");
    assert!(refuses.took < QUICK, "{refuses:?}");
    scene.stage.node.enter(|| fs::remove_file(socket))??;
    let absent = scene.call("STATUS", &call)?;
    absent.error(50);
    assert!(absent.took < QUICK, "{absent:?}");
    // A listener that never answers.
    let silent = scene.stage.node.enter(|| UnixListener::bind("/run/silent.sock"))??;
    let mute = scene.call("STATUS", &call.clone().with("socket", json!("/run/silent.sock")))?;
    mute.error(50);
    assert!(mute.took < QUICK, "{mute:?}");
    drop(silent);
    scene.stage.restart().await?;
    scene.call("STATUS", &call)?.assert_silent_success();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b11_status_says_that_the_pool_is_empty_and_del_still_works() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    // Five addresses for pods; free IPv6 addresses alone do not suffice.
    let small = Manifest::default_network("small", &["10.50.0.0/29", "fd50::/64"]);
    let scene = Scene::with("empty", vec![small, Manifest::network("blue", &["10.51.0.0/24"])]).await?;
    let mut calls = Vec::new();
    for index in 0..5 {
        let name = format!("pod{index}");
        scene.netns(&name)?;
        let call = Call::new(&name, &name);
        scene.call("STATUS", &call)?.assert_silent_success();
        scene.add(&call)?;
        calls.push(call);
    }
    let error = scene.call("STATUS", &calls[0])?.error(50);
    assert!(
        error["msg"]
            .as_str()
            .is_some_and(|msg| msg.contains("small has no IPv4 address left")),
        "{error}"
    );
    assert!(
        scene.network("small").await?.ready,
        "exhaustion is no reason to evict pods"
    );
    // A configuration of another network is not affected.
    scene
        .call("STATUS", &calls[0].clone().with("network", json!("blue")))?
        .assert_silent_success();
    scene.netns("late")?;
    scene.call("ADD", &Call::new("late", "late"))?.error(102);
    scene.del(&calls[0])?;
    scene.call("STATUS", &calls[1])?.assert_silent_success();
    scene.add(&Call::new("late", "late"))?;
    // No default network, and one that does not exist.
    scene
        .call("STATUS", &calls[0].clone().with("network", json!("red")))?
        .error(50);
    for call in &calls[1..] {
        scene.del(call)?;
    }
    scene.del(&Call::new("late", "late"))?;
    scene
        .stage
        .node
        .enter(|| fs::remove_file(format!("{MANIFESTS}/small.yaml")))??;
    scene
        .until("the end of the default network", || async {
            Ok(!scene.call("STATUS", &calls[0])?.success)
        })
        .await?;
    scene.call("STATUS", &calls[0])?.error(50);
    Ok(())
}
