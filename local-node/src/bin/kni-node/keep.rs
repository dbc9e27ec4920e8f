//! The process that owns the node: starts it, and leads connections to its API server in.

use std::{
    fs::{self, Permissions},
    io,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use kni_local_node::{LocalNode, Namespaces, Node};

use crate::{Folders, state::State};

/// What it says last.
pub(crate) const READY: &str = "ready";
/// The port of the machine that leads to the API server; any other when it is taken.
const PORT: u16 = 16443;
const AGENT_PATIENCE: Duration = Duration::from_secs(30);

/// The manifests a new node begins with, by file name.
const MANIFESTS: [(&str, &str); 3] = [
    (
        "default.yaml",
        "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: default\nspec:\n  default: true\n  subnets: \
         [10.244.0.0/16, fd00:244::/64]\n",
    ),
    (
        "blue.yaml",
        "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: blue\nspec:\n  subnets: [10.10.0.0/16, \
         fd10::/64]\n",
    ),
    (
        "red.yaml",
        "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: red\nspec:\n  subnets: [10.10.0.0/16, \
         fd10::/64]\n",
    ),
];

/// Runs the command; returns only when the node could not be started.
pub(crate) fn command(folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let (programs, statics) = folders.build(&mut |line| println!("{line}"))?;
    let node = Node::whole("node1")?;
    node.forward()?;
    let mut local = LocalNode::new(&node, &programs, &statics, &folder.join("logs"))?;
    println!("containerd");
    local.start_containerd()?;
    println!("agent");
    start_agent(&mut local, folders)?;
    println!("cluster");
    let listener = TcpListener::bind(("127.0.0.1", PORT)).or_else(|_taken| TcpListener::bind("127.0.0.1:0"));
    let listener = listener.context("a port for the API server")?;
    let server = format!("https://{}", listener.local_addr()?);
    let kubeconfig = local.start_cluster(&server)?;
    write(&folder.join("kubeconfig"), &kubeconfig, 0o600)?;
    local.wait_ready(true)?;
    write_shortcuts(&local, folders)?;
    State {
        keeper: std::process::id(),
        group: local.group().into(),
        processes: local.processes().map(|(name, pid)| (name.to_owned(), pid)).collect(),
    }
    .save(folder)?;
    println!("{READY}");
    // From here on nobody reads what is printed.
    lead_in(&listener, &node);
    bail!("the port of the API server was closed")
}

/// Starts the agent and makes it the network of the container runtime.
fn start_agent(local: &mut LocalNode, folders: &Folders) -> Result<()> {
    let manifests = folders.folder.join("manifests");
    fs::create_dir_all(&manifests).with_context(|| format!("create {}", manifests.display()))?;
    for (name, text) in MANIFESTS {
        let file = manifests.join(name);
        // Those of an earlier node may have been changed.
        if !file.exists() {
            fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        }
    }
    let agent = local.inside().install(&folders.ours("kni-agent")?)?;
    let shim = local.inside().install(&folders.ours("kni-cni")?)?;
    let mut command = local.command(&agent);
    command.arg("--standalone").arg("--manifests").arg(&manifests);
    local.start_as("kni-agent", command)?;
    let knictl = folders.ours("knictl")?;
    local.wait("the agent serves", AGENT_PATIENCE, |node| {
        let asked = node.command(&knictl).arg("status").output().context("run knictl")?;
        Ok(asked.status.success())
    })?;
    let [bin, conf] = LocalNode::cni_folders();
    let mut install = local.command(&agent);
    install.arg("install-cni").arg("--shim").arg(shim);
    install.arg("--bin-dir").arg(bin).arg("--conf-dir").arg(conf);
    let done = install.output().context("run kni-agent install-cni")?;
    if !done.status.success() {
        bail!(
            "kni-agent install-cni: {}",
            String::from_utf8_lossy(&done.stderr).trim()
        );
    }
    Ok(())
}

/// Programs that save the user from knowing where the node is.
fn write_shortcuts(local: &LocalNode, folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let Some((_, pid)) = local.processes().find(|(name, _)| *name == "containerd") else {
        bail!("containerd has ended");
    };
    let enter = format!("exec nsenter --target {pid} --mount --net --");
    let kubectl = local.programs().path("kubectl");
    let kubeconfig = folder.join("kubeconfig");
    for (name, line) in [
        ("enter", format!("{enter} \"$@\"")),
        (
            "knictl",
            format!("{enter} '{}' \"$@\"", folders.ours("knictl")?.display()),
        ),
        (
            "kubectl",
            format!(
                "exec '{}' --kubeconfig '{}' \"$@\"",
                kubectl.display(),
                kubeconfig.display()
            ),
        ),
    ] {
        write(&folder.join(name), &format!("#!/bin/sh\n{line}\n"), 0o755)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(path, text)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .with_context(|| format!("write {}", path.display()))
}

/// Connects whoever comes to `listener` with the API server inside the node, for ever.
fn lead_in(listener: &TcpListener, node: &Namespaces) {
    for outer in listener.incoming().flatten() {
        let Ok(Ok(inner)) = node.enter(|| TcpStream::connect("127.0.0.1:6443")) else {
            // The API server is not there at the moment; the client sees its connection end.
            continue;
        };
        for (from, to) in [(&outer, &inner), (&inner, &outer)] {
            let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
                continue;
            };
            thread::spawn(move || copy(&from, &to));
        }
    }
}

fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    // A connection that breaks ends like one that was closed.
    drop(io::copy(&mut from, &mut to));
    drop(to.shutdown(Shutdown::Write));
}
