//! Starts one node with a control plane, an agent as a process, and DNS.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use kni_local_node::{Kni, LocalNode, Namespaces, Node, Programs, StaticPrograms};

use crate::{DEPLOY, Folders, shortcuts};

const AGENT_PATIENCE: Duration = Duration::from_secs(30);

/// A running node.
pub(crate) struct Single {
    local: LocalNode,
    node: Node,
}

impl Single {
    /// Starts it; its API server is reached at `server` from outside.
    pub(crate) fn start(
        folders: &Folders,
        (programs, statics): (&Programs, &StaticPrograms),
        (standalone, kni): (bool, Option<Kni>),
        server: &str,
    ) -> Result<Self> {
        let by_kni = kni.is_some();
        let node = Node::whole(LocalNode::NAME)?;
        let mut local = LocalNode::new(&node, programs, statics, &folders.folder.join("logs"))?;
        if let Some(kni) = kni {
            local.use_kni(kni)?;
        }
        println!("containerd");
        local.start_containerd()?;
        println!("cluster");
        let kubeconfig = local.start_cluster(server)?;
        shortcuts::kubectl(folders, programs, &kubeconfig)?;
        println!("agent");
        start_agent(&mut local, folders, standalone)?;
        if !by_kni {
            install_cni(&local, folders)?;
        }
        local.wait_ready(true)?;
        println!("DNS");
        local.start_dns()?;
        write_shortcuts(&local, folders)?;
        Ok(Self { local, node })
    }

    /// Where the API server runs.
    pub(crate) fn api_server(&self) -> &Namespaces {
        &self.node
    }

    /// Names and process ids of its processes, without pods.
    pub(crate) fn processes(&self) -> Vec<(String, u32)> {
        let processes = self.local.processes();
        processes.map(|(name, pid)| (name.to_owned(), pid)).collect()
    }
}

/// Starts the agent, and waits until it serves.
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
    })
}

/// Makes the agent the network of the container runtime.
fn install_cni(local: &LocalNode, folders: &Folders) -> Result<()> {
    let agent = local.inside().install(&folders.ours("kni-agent")?)?;
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

/// Writes scripts that run programs inside the node.
fn write_shortcuts(local: &LocalNode, folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let enter = shortcuts::enter(local)?;
    let knictl = local.inside().install(&folders.ours("knictl")?)?;
    for (name, line) in [
        ("enter", format!("exec {enter} \"$@\"")),
        ("knictl", format!("exec {enter} '{}' \"$@\"", knictl.display())),
        // The archive is opened outside: the node has its own /tmp.
        ("import", format!("exec {enter} ctr images import - < \"$1\"")),
    ] {
        shortcuts::script(folder, name, &line)?;
    }
    Ok(())
}
