//! Records what the node lacked before the first agent, so that a cleanup can remove exactly that again.
//! Layer: root.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MntFlags, umount2},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use serde::{Deserialize, Serialize};

use crate::cli::PathArgs;

/// What the agent created on the node outside its own folders.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Footprint {
    /// The folder for namespaces was missing; the agent makes it a mount of its own.
    made_netns_dir: bool,
    /// bpffs was not mounted.
    mounted_bpffs: bool,
}

const BPFFS: &str = "/sys/fs/bpf";

impl Footprint {
    /// Name of the file in the state folder.
    pub const FILE: &'static str = "footprint.json";

    /// Examines the node and writes the record, unless an earlier agent did. Call it before anything but the state
    /// folder is made.
    pub fn record(paths: &PathArgs) -> io::Result<()> {
        let file = paths.state_dir.join(Self::FILE);
        if file.exists() {
            return Ok(());
        }
        let footprint = Self {
            made_netns_dir: !paths.netns_dir.exists(),
            mounted_bpffs: !is_bpffs(Path::new(BPFFS)),
        };
        fs::write(file, serde_json::to_vec(&footprint)?)
    }

    /// The record; empty where there is no file.
    pub fn load(state_dir: &Path) -> Self {
        let read = fs::read(state_dir.join(Self::FILE)).ok();
        read.and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    /// Removes what the agent created, unless another process uses it now.
    pub fn undo(&self, paths: &PathArgs) {
        if self.made_netns_dir && is_empty(&paths.netns_dir) {
            unmount(&paths.netns_dir);
            if let Err(error) = fs::remove_dir(&paths.netns_dir) {
                tracing::warn!(path = %paths.netns_dir.display(), %error, "left in place");
            }
        }
        if self.mounted_bpffs && is_bpffs(Path::new(BPFFS)) && is_empty(&PathBuf::from(BPFFS)) {
            unmount(Path::new(BPFFS));
        }
    }
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

fn unmount(path: &Path) {
    if let Err(errno) = umount2(path, MntFlags::MNT_DETACH) {
        tracing::warn!(path = %path.display(), %errno, "cannot unmount");
    }
}
