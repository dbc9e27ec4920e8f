use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use kni_integration::{Agent, AgentOptions, Manifest, Node, agent::MANIFESTS, patience, require};
use tempfile::TempDir;

/// A shell script in place of the agent.
fn script(text: &str) -> Result<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("fake-agent");
    fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok((folder, path))
}

fn alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn an_agent_is_started_killed_started_again_and_stopped() -> Result<()> {
    require!(root, netns, ip);
    let node = Node::new("scripted")?;
    let (_folder, binary) = script(
        "trap 'echo stopping; exit 7' TERM
        [ \"$1\" = cleanup ] && { touch /run/cleaned; exit 3; }
        echo \"args $*; $GREETING\" >&2
        ls \"$3\"
        echo 'kni-agent: serving on /run/kni/kni.sock'
        while :; do sleep 0.02; done",
    )?;
    let options = AgentOptions {
        binary: Some(binary),
        args: vec!["--warm-sandboxes".into(), "0".into()],
        env: vec![("GREETING".into(), "hello".into())],
        manifests: vec![Manifest::network("green", &["10.1.0.0/16"]).spec("mtu: 1400")],
        ..AgentOptions::default()
    };
    let mut agent = Agent::start(&node, options)?;
    let wanted = format!("args --standalone --manifests {MANIFESTS} --warm-sandboxes 0; hello");
    assert!(agent.wait_for_log(&wanted, patience()), "{}", agent.log());
    assert!(agent.log().contains("green.yaml"), "{}", agent.log());
    let manifest = node.enter(|| fs::read_to_string(Path::new(MANIFESTS).join("green.yaml")))??;
    assert!(
        manifest.contains("\n  subnets:\n    - 10.1.0.0/16\n") && manifest.ends_with("\n  mtu: 1400\n"),
        "{manifest}"
    );
    let inside = node.enter(|| fs::read_link("/proc/thread-self/ns/net"))??;
    assert_eq!(fs::read_link(format!("/proc/{}/ns/net", agent.pid()))?, inside);

    assert!(agent.restart().is_err(), "a running agent was started again");
    let first = agent.pid();
    agent.kill9()?;
    assert!(!alive(first));
    agent.restart()?;
    assert_ne!(agent.pid(), first);
    assert_eq!(
        agent.log().matches("serving on").count(),
        2,
        "ready by an old line: {}",
        agent.log()
    );
    assert_eq!(agent.terminate()?.code(), Some(7));
    assert_eq!(agent.cleanup()?.status.code(), Some(3));
    assert!(
        node.enter(|| fs::exists("/run/cleaned"))??,
        "cleanup did not run in the node"
    );
    agent.restart()?;
    let last = agent.pid();
    drop(agent);
    assert!(!alive(last), "the agent outlived its handle");
    Ok(())
}

#[test]
fn an_agent_that_does_not_serve_is_told_with_its_log() -> Result<()> {
    require!(root, netns, ip);
    let node = Node::new("mute")?;
    let (_folder, binary) = script("echo 'bpffs is missing' >&2; exit 1")?;
    let options = AgentOptions {
        binary: Some(binary),
        ..AgentOptions::default()
    };
    let mut agent = Agent::start_unready(&node, options)?;
    assert_eq!(agent.wait_exit(patience())?.code(), Some(1));
    let error = agent
        .wait_ready(Duration::from_millis(200))
        .expect_err("nothing serves")
        .to_string();
    assert!(error.contains("bpffs is missing"), "{error}");
    Ok(())
}
