//! Prepares the folder of a socket: makes it where it is missing, refuses it where another user could replace the
//! socket.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::Path,
};

use super::error::BindError;

/// Makes the folder and its missing parents with mode 0700; checks an existing one.
pub(super) fn prepare(folder: &Path) -> Result<(), BindError> {
    let metadata = match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|source| BindError::io(folder, "making the folder", source))?;
            fs::metadata(folder)
        }
        found => found,
    };
    let metadata = metadata.map_err(|source| BindError::io(folder, "looking at the folder", source))?;
    let refuse = |reason| {
        Err(BindError::UnsafeFolder {
            path: folder.to_owned(),
            reason,
        })
    };
    let own = nix::unistd::geteuid().as_raw();
    let (owner, mode) = (metadata.uid(), metadata.mode());
    if !metadata.is_dir() {
        return refuse("not a folder".to_owned());
    }
    if owner != 0 && owner != own {
        return refuse(format!("belongs to uid {owner}, who could replace the socket"));
    }
    // In a sticky folder only the owner of a file, or of the folder, can remove or rename it.
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        return refuse(format!("mode {:o} lets others replace the socket", mode & 0o7777));
    }
    Ok(())
}
