//! Runs the process that owns the node: starts the node, and forwards connections to its API server.

use std::{
    fs::{self, Permissions},
    io,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use kni_local_node::{LocalNode, Namespaces, Node};

use crate::{Folders, state::State};

/// Last line of the output.
pub(crate) const READY: &str = "ready";
/// The port of the machine that is forwarded to the API server; any free one if it is in use.
const PORT: u16 = 16443;
const AGENT_PATIENCE: Duration = Duration::from_secs(30);

/// The folder `deploy` of this source.
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy");

/// Runs the command; returns only when the node could not be started.
pub(crate) fn command(folders: &Folders, standalone: bool) -> Result<()> {
    let folder = &folders.folder;
    let (programs, statics) = folders.build(&mut |line| println!("{line}"))?;
    let node = Node::whole(LocalNode::NAME)?;
    node.forward()?;
    let mut local = LocalNode::new(&node, &programs, &statics, &folder.join("logs"))?;
    println!("containerd");
    local.start_containerd()?;
    println!("cluster");
    let listener = TcpListener::bind(("127.0.0.1", PORT)).or_else(|_taken| TcpListener::bind("127.0.0.1:0"));
    let listener = listener.context("a port for the API server")?;
    let server = format!("https://{}", listener.local_addr()?);
    let kubeconfig = local.start_cluster(&server)?;
    write(&folder.join("kubeconfig"), &kubeconfig, 0o600)?;
    println!("agent");
    start_agent(&mut local, folders, standalone)?;
    local.wait_ready(true)?;
    println!("DNS");
    local.start_dns()?;
    write_shortcuts(&local, folders)?;
    State {
        keeper: std::process::id(),
        group: local.group().into(),
        standalone,
        processes: local.processes().map(|(name, pid)| (name.to_owned(), pid)).collect(),
    }
    .save(folder)?;
    println!("{READY}");
    // `up` exits now, and with it the reader of standard output.
    forward(&listener, &node);
    bail!("the port of the API server was closed")
}

/// Starts the agent and makes it the network of the container runtime.
fn start_agent(local: &mut LocalNode, folders: &Folders, standalone: bool) -> Result<()> {
    let agent = local.inside().install(&folders.ours("kni-agent")?)?;
    let mut command = local.command(&agent);
    if standalone {
        command.arg("--standalone").arg("--manifests").arg(manifests(folders)?);
    } else {
        local.apply_deployment(Path::new(DEPLOY))?;
        command.args(["--kubeconfig", &LocalNode::agent_kubeconfig()]);
        command.args(["--node-name", LocalNode::NAME]);
    }
    local.start_as("kni-agent", command)?;
    if !standalone {
        let controller = local.inside().install(&folders.ours("kni-controller")?)?;
        local.start_controller(&controller)?;
    }
    let knictl = local.inside().install(&folders.ours("knictl")?)?;
    local.wait("the agent serves", AGENT_PATIENCE, |node| {
        let status = node.command(&knictl).arg("status").output().context("run knictl")?;
        Ok(status.status.success())
    })?;
    let shim = local.inside().install(&folders.ours("kni-cni")?)?;
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

/// The folder of manifests of a standalone agent. Initially it contains the networks of the examples; files of an
/// earlier node stay unchanged.
fn manifests(folders: &Folders) -> Result<PathBuf> {
    let manifests = folders.folder.join("manifests");
    fs::create_dir_all(&manifests).with_context(|| format!("create {}", manifests.display()))?;
    let examples = Path::new(DEPLOY).join("examples/networks");
    for entry in fs::read_dir(&examples).with_context(|| format!("read {}", examples.display()))? {
        let example = entry?.path();
        let file = manifests.join(example.file_name().context("a file without a name")?);
        if !file.exists() {
            fs::copy(&example, &file).with_context(|| format!("write {}", file.display()))?;
        }
    }
    Ok(manifests)
}

/// Writes scripts that run programs inside the node or with its kubeconfig.
fn write_shortcuts(local: &LocalNode, folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let Some((_, pid)) = local.processes().find(|(name, _)| *name == "containerd") else {
        bail!("containerd has ended");
    };
    let programs = local.programs();
    // Without this option ctr would use another namespace than the kubelet.
    let enter = format!(
        "exec nsenter --target {pid} --mount --net -- env PATH='{}':\"$PATH\" CONTAINERD_NAMESPACE=k8s.io",
        programs.folder().display()
    );
    let knictl = local.inside().install(&folders.ours("knictl")?)?;
    let (kubectl, kubeconfig) = (programs.path("kubectl"), folder.join("kubeconfig"));
    for (name, line) in [
        ("enter", format!("{enter} \"$@\"")),
        ("knictl", format!("{enter} '{}' \"$@\"", knictl.display())),
        // The archive is opened outside: the node has its own /tmp.
        ("import", format!("{enter} ctr images import - < \"$1\"")),
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

/// Forwards the connections of `listener` to the API server inside the node until the process ends.
fn forward(listener: &TcpListener, node: &Namespaces) {
    for outer in listener.incoming().flatten() {
        let Ok(Ok(inner)) = node.enter(|| TcpStream::connect("127.0.0.1:6443")) else {
            // The API server is not running: the client's connection is closed.
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
    // An error ends the connection like an end of file.
    drop(io::copy(&mut from, &mut to));
    drop(to.shutdown(Shutdown::Write));
}
