//! Removes everything that the agent made from the node, with the agent stopped.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, bail};
use kni_dataplane as dataplane;
use kni_fabric as fabric;
use kni_grpc as grpc;
use kni_model::error_chain;
use kni_pods::{cleanup, remove_pending_deletes};
use kni_store::{Contents, RecordCopy, Store};
use kni_uplink as uplink;

use super::record_copy::KernelCopy;
use crate::{cli::PathArgs, footprint::Footprint};

/// Removes everything that the agent made from the node.
pub async fn clean_up(paths: &PathArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("cleaning up the node's network needs root");
    }
    let footprint = Footprint::load(&paths.state_dir);
    let store = if paths.state_dir.join("state.redb").exists() {
        Some(Store::open(&paths.state_dir).context("an agent still runs: stop it first")?)
    } else {
        None
    };
    let records = store.as_ref().map(|store| load(store, &paths.bpf_root)).transpose()?;
    cleanup(records.unwrap_or_default())
        .await
        .context("removing interfaces, namespaces, routes and rules")?;
    if let Some(store) = &store {
        uplink::cleanup(store).await.context("leaving the uplink")?;
    }
    fabric::cleanup().await.context("removing the tunnel device")?;
    dataplane::remove_pins(&paths.bpf_root).context("removing the pins")?;
    drop(store);
    remove_files(paths)?;
    remove_pending_deletes(&paths.cni_state_dir);
    // The folder stays if it contains files of others.
    std::fs::remove_dir(&paths.cni_state_dir).ok();
    footprint.undo(paths);
    Ok(())
}

/// The records of the last agent. Only their copy in the kernel has all of them if it was killed.
fn load(store: &Store, bpf_root: &Path) -> Result<Contents> {
    let copy = match dataplane::RecordMap::open_pinned(bpf_root) {
        Ok(copy) => copy.map(|copy| -> Box<dyn RecordCopy> { Box::new(KernelCopy(Arc::new(copy))) }),
        Err(error) => {
            tracing::warn!(
                error = error_chain(&error),
                "the copy of the state in the kernel cannot be read"
            );
            None
        }
    };
    store.load(copy).context("reading the state")
}

fn remove_files(paths: &PathArgs) -> Result<()> {
    for socket in paths.sockets.iter().chain(&paths.pod_network_sockets) {
        if let Err(error) = grpc::socket::remove_dead(socket) {
            tracing::warn!(%error, "left in place");
        }
    }
    remove_if_there(&paths.state_dir.join(Footprint::FILE))?;
    for file in state_files(&paths.state_dir) {
        remove_if_there(&file)?;
    }
    match std::fs::remove_dir(&paths.state_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            tracing::warn!(path = %paths.state_dir.display(), "left in place: it holds files that are not ours");
            Ok(())
        }
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", paths.state_dir.display()))
        }
        _ => Ok(()),
    }
}

/// The state, and files that were kept aside because they could not be read.
fn state_files(state_dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(state_dir) else {
        return Vec::new();
    };
    let entries = entries.filter_map(Result::ok);
    let ours = entries.filter(|entry| entry.file_name().to_str().is_some_and(kni_store::is_state_file));
    ours.map(|entry| entry.path()).collect()
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}
