//! Writes scripts that run programs inside nodes or with the kubeconfig.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt as _, fs::symlink},
    path::Path,
};

use anyhow::{Context, Result};
use kni_local_node::{LocalNode, Programs};

use crate::Folders;

/// The name under which kubectl finds knictl.
const PLUGIN: &str = "kubectl-kni";
/// Every file that this module writes.
pub(crate) const FILES: [&str; 6] = ["kubeconfig", "enter", "kubectl", "knictl", "import", PLUGIN];

/// A command that enters the network and mounts of a node.
pub(crate) fn enter(node: &LocalNode) -> Result<String> {
    let mut processes = node.processes();
    // Etcd on the control plane, which has no containers.
    let (_, pid) = processes
        .find(|(name, _)| ["containerd", "etcd"].contains(name))
        .with_context(|| format!("the processes of {} have ended", node.name()))?;
    Ok(format!(
        // Without this option ctr would use another namespace than the kubelet.
        "nsenter --target {pid} --mount --net -- env PATH='{}':\"$PATH\" CONTAINERD_NAMESPACE=k8s.io",
        node.programs().folder().display()
    ))
}

/// Writes an executable script of one or more lines of shell.
pub(crate) fn script(folder: &Path, name: &str, lines: &str) -> Result<()> {
    write(&folder.join(name), &format!("#!/bin/sh\n{lines}\n"), 0o755)
}

/// Writes the kubeconfig, and `kubectl`, which uses it and finds knictl as its plugin.
pub(crate) fn kubectl(folders: &Folders, programs: &Programs, kubeconfig: &str) -> Result<()> {
    let folder = &folders.folder;
    let file = folder.join("kubeconfig");
    write(&file, kubeconfig, 0o600)?;
    let plugin = folder.join(PLUGIN);
    if plugin.symlink_metadata().is_ok() {
        fs::remove_file(&plugin).with_context(|| format!("remove {}", plugin.display()))?;
    }
    symlink(folders.ours("knictl")?, &plugin).with_context(|| format!("link {}", plugin.display()))?;
    script(
        folder,
        "kubectl",
        &format!(
            "export KUBECONFIG='{}' PATH='{}':\"$PATH\"\nexec '{}' \"$@\"",
            file.display(),
            folder.display(),
            programs.path("kubectl").display()
        ),
    )
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(path, text)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .with_context(|| format!("write {}", path.display()))
}
