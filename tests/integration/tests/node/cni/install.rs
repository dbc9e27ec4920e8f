use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use kni_integration::{
    agent::{agent_binary, shim_binary},
    require,
};
use serde_json::{Value, json};

use super::scene::{Call, STATE, Scene};

const BIN: &str = "/run/cni/bin";
const CONF: &str = "/run/cni/net.d";
const OTHERS: &str = r#"{"cniVersion":"1.0.0","name":"bridge","plugins":[{"type":"bridge"}]}"#;

#[expect(
    clippy::too_many_lines,
    reason = "one call after the other, each with what must come of it"
)]
#[tokio::test(flavor = "multi_thread")]
async fn what_is_installed_works_and_others_files_stay() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("install").await?;
    scene.netns("web-0")?;
    let agent = agent_binary()?;
    let agent = agent.to_str().context("not UTF-8")?.to_owned();
    let shim = shim_binary()?;
    let run = |scene: &Scene, command: &str| {
        let shim = shim.to_str().context("not UTF-8")?;
        let args = [
            "--bin-dir",
            BIN,
            "--conf-dir",
            CONF,
            "--shim",
            shim,
            "--cni-state-dir",
            STATE,
            "--network-name",
            "pods",
        ];
        scene
            .stage
            .node
            .run(&agent, &[&[command][..], &args].concat())
            .map(drop)
    };
    let others = format!("{CONF}/20-bridge.conflist");
    scene
        .stage
        .node
        .enter(|| fs::create_dir_all(CONF).and_then(|()| fs::write(&others, OTHERS)))??;
    let names = |scene: &Scene, dir: &'static str| -> Result<Vec<String>> {
        let listed = scene.stage.node.enter(|| {
            let mut names = Vec::new();
            for entry in fs::read_dir(dir)? {
                names.push(entry?.file_name().to_string_lossy().into_owned());
            }
            names.sort();
            Ok::<_, std::io::Error>(names)
        });
        Ok(listed??)
    };
    run(&scene, "install-cni")?;
    run(&scene, "install-cni")?;
    assert_eq!(names(&scene, CONF)?, ["10-kni.conflist", "20-bridge.conflist"]);
    assert_eq!(names(&scene, BIN)?, ["kni-cni"]);
    // A runtime uses the plugin's part of the list, with the name and version of the list.
    let conflist = scene
        .stage
        .node
        .enter(|| fs::read(format!("{CONF}/10-kni.conflist")))??;
    let conflist: Value = serde_json::from_slice(&conflist)?;
    let mut config = conflist["plugins"][0].clone();
    config["name"] = conflist["name"].clone();
    config["cniVersion"] = conflist["cniVersion"].clone();
    let call = Call {
        config,
        ..Call::new("abc", "web-0")
    };
    scene.call("STATUS", &call)?.assert_silent_success();
    let result = scene.add(&call)?;
    assert_eq!(result["cniVersion"], json!("1.1.0"));
    // Neither the exit nor the cleanup of the agent removes the configuration: the runtime would fail to delete pods.
    scene.stage.agent.terminate()?;
    assert_eq!(names(&scene, CONF)?.len(), 2);
    scene.del(&call)?;
    scene.stage.agent.cleanup()?;
    assert_eq!(names(&scene, CONF)?.len(), 2);
    run(&scene, "uninstall-cni")?;
    run(&scene, "uninstall-cni")?;
    assert_eq!(names(&scene, CONF)?, ["20-bridge.conflist"]);
    assert!(names(&scene, BIN)?.is_empty());
    let there = scene.stage.node.enter(|| fs::read(Path::new(&others)))??;
    assert_eq!(there, OTHERS.as_bytes());
    Ok(())
}
