//! Tests that no pod joins a namespace that its author names, whichever of kubelet and containerd speaks KNI: a stock
//! kubelet passes on what the author wrote, and a stock containerd makes another namespace than the kubelet's.

use std::{collections::BTreeMap, fs, os::unix::fs::symlink};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, Machine, Manifest, machine, require, stage};
use kni_local_node::{LocalNode, Namespaces, cri::Sandbox};
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
    let (names, pods) = forgers(&paths(scene.local().inside())?);
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
    let others = add_namespace(&machine.local)?;
    let mut scene = Scene { agent, machine };
    let paths = paths(scene.local().inside())?;
    ensure!(paths.contains(&others), "{paths:?}");
    let (names, pods) = forgers(&paths);
    scene
        .local()
        .apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }))?;
    let why = "the container runtime has not used the pod's network namespace /run/netns/";
    for name in &names {
        is_refused(&mut scene.machine.local, name, &[why])?;
    }
    ip_netns(scene.local(), "delete")?;
    nothing_is_left_of_pods(&mut scene)
}

/// A stock kubelet passes the annotation on as it is, so this containerd refuses the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_stock_kubelet_gets_no_sandbox_in_a_namespace_of_somebody_else() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut kni = machine::kni()?;
    kni.kubelet = false;
    let mut machine = Machine::with_kni_runtime("kni-stock-kubelet", kni)?;
    // The kubelet stops a sandbox that is no pod's, and removes it a minute later; until then its namespace is taken.
    let its = add_namespace(&machine.local)?;
    let mut other = sandbox("other");
    other.annotations.insert(ANNOTATION.to_owned(), its.clone());
    let cri = machine.local.cri().await?;
    let id = cri.run_sandbox(&other).await?;
    let local = &mut machine.local;
    local.start_cluster("https://127.0.0.1:6443")?;
    // Without CNI this containerd has no network that could be missing.
    local.wait_ready(true)?;
    let refused = [
        ("/proc/1/ns/net", "is not in folder /run/netns".to_owned()),
        ("/run/netns/made-up", "no such file or directory".to_owned()),
        (its.as_str(), format!("is the namespace of sandbox {id}")),
    ];
    let (names, pods) = forgers(&refused.each_ref().map(|(path, _why)| (*path).to_owned()));
    local.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }))?;
    for (name, (path, why)) in names.iter().zip(&refused) {
        is_refused(local, name, &[ANNOTATION, &format!("pod default/{name}"), path, why])?;
    }
    let networks = local
        .inside()
        .enter(|| fs::read_dir("/run/netns").map(Iterator::count))??;
    ensure!(
        networks == 1,
        "{networks} namespaces, one of them that of the other sandbox"
    );
    Ok(())
}

/// The path of a new namespace that is not the agent's.
fn add_namespace(local: &LocalNode) -> Result<String> {
    ip_netns(local, "add")?;
    Ok("/run/netns/others".to_owned())
}

fn ip_netns(local: &LocalNode, action: &str) -> Result<()> {
    let done = local.command("ip").args(["netns", action, "others"]).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// Waits for an event of a pod with all these texts; the pod does not run.
fn is_refused(local: &mut LocalNode, name: &str, texts: &[&str]) -> Result<()> {
    local.wait(&format!("an event of {name} gives the reason"), PATIENCE, |node| {
        let selector = format!("involvedObject.name={name},reason=FailedCreatePodSandBox");
        let path = "jsonpath={range .items[*]}{.message}{\"\\n\"}{end}";
        let events = node.kubectl(&["get", "events", "--field-selector", &selector, "-o", path])?;
        // The kubelet quotes what is quoted in the error.
        let events = events.replace("\\\"", "\"");
        let complete = |event: &str| texts.iter().all(|text| event.contains(text));
        ensure!(events.lines().any(complete), "events of {name}: {events}");
        Ok(true)
    })?;
    let path = "jsonpath={.status.phase} {.status.containerStatuses[*].started} {.status.podIPs}";
    let state = local.kubectl(&["get", "pod", name, "-o", path])?;
    ensure!(
        state.starts_with("Pending ") && !state.contains("true") && !state.contains("ip"),
        "{name}: {state}"
    );
    Ok(())
}

/// The host's namespace, one that does not exist, and that of another pod, if the node has had one.
fn paths(inside: &Namespaces) -> Result<Vec<String>> {
    let other = inside.enter(|| {
        let mut entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
        entries.next().map(|entry| entry.path().display().to_string())
    })?;
    let always = ["/proc/1/ns/net", "/run/netns/made-up"].map(str::to_owned);
    Ok(always.into_iter().chain(other).collect())
}

/// Pods whose authors name these namespaces, and their names.
fn forgers(paths: &[String]) -> (Vec<String>, Vec<Value>) {
    let pods = paths.iter().enumerate().map(|(number, path)| {
        let name = format!("forger-{number}");
        let mut pod = server(&name, &json!({}));
        pod["metadata"]["annotations"] = json!({ ANNOTATION: path });
        (name, pod)
    });
    pods.unzip()
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
