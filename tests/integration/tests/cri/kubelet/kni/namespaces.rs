//! Tests that no pod joins a namespace that its author names, whichever of kubelet and containerd speaks KNI: a stock kubelet
//! passes on what the author wrote, and a stock containerd makes another namespace than the kubelet's.

use std::{collections::BTreeMap, fs, os::unix::fs::symlink};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, Machine, Manifest, machine, require, stage};
use kni_local_node::cri::Sandbox;
use serde_json::{Value, json};

use super::{
    super::scene::{PATIENCE, PORT, Scene, server},
    nothing_is_left, nothing_is_left_of_pods,
};

const ANNOTATION: &str = "kni.dev/netns";

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_of_somebody_else_is_refused_by_name() -> Result<()> {
    require!(root, netns, bpf, machine);
    let mut machine = Machine::with_kni_runtime("kni-namespaces", machine::kni()?)?;
    let _agent = Agent::start(&machine.node, Machine::agent_options(Manifest::overlapping()))?;
    let cri = machine.local.cri().await?;
    let condition = cri.network_ready().await?;
    ensure!(condition.status, "no plugin is needed: {condition:?}");
    // A pod without an annotation has a namespace of its own.
    let other = sandbox("other");
    let id = cri.run_sandbox(&other).await?;
    let its = namespace_of(&cri.sandbox(&id).await?)?;
    machine.node.enter(|| -> std::io::Result<()> {
        fs::create_dir_all("/run/netns/folder")?;
        fs::write("/run/netns/file", "")?;
        symlink(&its, "/run/netns/link")?;
        symlink("/proc/self/ns/net", "/run/netns/host")
    })??;
    machine.mount_namespace("net", "/run/netns/mounted-host")?;
    machine.mount_namespace("uts", "/run/netns/uts")?;
    for (number, (path, why)) in [
        (its.as_str(), "is the namespace of sandbox"),
        ("/proc/1/ns/net", "is not in folder /run/netns"),
        ("/proc/self/ns/net", "is not in folder /run/netns"),
        ("/run/netns/../../proc/1/ns/net", "is not in folder /run/netns"),
        ("", "is not in folder /run/netns"),
        ("/run/netns/made-up", "no such file or directory"),
        ("/run/netns/folder", "no namespace is mounted there"),
        ("/run/netns/file", "no namespace is mounted there"),
        ("/run/netns/link", "too many levels of symbolic links"),
        ("/run/netns/host", "too many levels of symbolic links"),
        ("/run/netns/mounted-host", "is the namespace of the node"),
        ("/run/netns/uts", "a namespace of another kind is mounted there"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut pod = sandbox(&format!("forger-{number}"));
        pod.annotations.insert(ANNOTATION.to_owned(), path.to_owned());
        let Err(refused) = cri.run_sandbox(&pod).await else {
            anyhow::bail!("{path:?} was joined");
        };
        let message = refused.message();
        ensure!(
            message.contains(why) && message.contains(ANNOTATION) && message.contains(&pod.name),
            "{path:?}: {message}"
        );
    }
    // What others have mounted there is still there.
    cri.stop_sandbox(&id).await?;
    cri.remove_sandbox(&id).await?;
    machine.node.enter(|| fs::metadata("/run/netns/uts").map(drop))??;
    machine.local.stop(kni_local_node::Part::Containerd)
}

#[test]
fn what_an_author_writes_is_replaced_by_the_kubelet() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::by_kni("kni-authors")?;
    scene.create(&[server("other", &json!({}))])?;
    let (names, pods) = forgers(&scene)?;
    scene.create(&pods)?;
    let mut owners = BTreeMap::new();
    for name in names.iter().map(String::as_str).chain(["other"]) {
        for address in scene.addresses(name)? {
            ensure!(owners.insert(address, name).is_none(), "{address} is that of two pods");
            let answer = scene.ask("other", &address.to_string(), PORT, "tcp")?;
            ensure!(answer == name, "{answer} answers at {address}, which is {name}'s");
        }
    }
    for address in scene.local().addresses() {
        ensure!(
            !owners.contains_key(&address.parse()?),
            "a pod has the node's {address}"
        );
    }
    nothing_is_left(&mut scene)
}

#[test]
fn a_containerd_that_takes_no_namespace_is_refused_by_name() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut kni = machine::kni()?;
    kni.containerd = false;
    let mut machine = Machine::with_kni("kni-stock-runtime", kni)?;
    stage::forwarding(&machine.node)?;
    // A configuration of CNI, without which this containerd would create no sandbox at all.
    let agent = machine.start_agent(Manifest::overlapping())?;
    machine.local.wait_ready(true)?;
    let mut scene = Scene { agent, machine };
    let (names, pods) = forgers(&scene)?;
    scene
        .local()
        .apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }))?;
    for name in &names {
        let what = format!("an event of {name} gives the reason");
        scene.machine.local.wait(&what, PATIENCE, |node| {
            let selector = format!("involvedObject.name={name},reason=FailedCreatePodSandBox");
            let path = "jsonpath={.items[*].message}";
            let events = node.kubectl(&["get", "events", "--field-selector", &selector, "-o", path])?;
            Ok(events.contains("the container runtime has not used the pod's network namespace /run/netns/"))
        })?;
        let started = scene.get(&format!("pod/{name}"), "{.status.containerStatuses[*].started}")?;
        ensure!(!started.contains("true"), "{name} runs");
    }
    nothing_is_left_of_pods(&mut scene)
}

/// Pods whose authors name the host's namespace, that of another pod and one that does not exist, and their names.
fn forgers(scene: &Scene) -> Result<(Vec<String>, Vec<Value>)> {
    // The folder is missing on a node that has had no pod.
    let other = scene.local().inside().enter(|| {
        let mut entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
        entries.next().map(|entry| entry.path().display().to_string())
    })?;
    let paths = ["/proc/1/ns/net".to_owned(), "/run/netns/made-up".to_owned()]
        .into_iter()
        .chain(other);
    let pods = paths.enumerate().map(|(number, path)| {
        let name = format!("forger-{number}");
        let mut pod = server(&name, &json!({}));
        pod["metadata"]["annotations"] = json!({ ANNOTATION: path });
        (name, pod)
    });
    Ok(pods.unzip())
}

fn sandbox(name: &str) -> Sandbox {
    Sandbox {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        ..Sandbox::default()
    }
}

fn namespace_of(status: &kni_local_node::cri::v1::PodSandboxStatusResponse) -> Result<String> {
    let info = status.info.get("info").context("no verbose status")?;
    let info: serde_json::Value = serde_json::from_str(info)?;
    let namespaces = info
        .pointer("/runtimeSpec/linux/namespaces")
        .and_then(|list| list.as_array());
    let network = namespaces
        .into_iter()
        .flatten()
        .find(|namespace| namespace["type"] == "network")
        .and_then(|namespace| namespace["path"].as_str());
    let path = network.context("no network namespace")?;
    // The folder has two names.
    Ok(path.replace("/var/run/", "/run/"))
}
