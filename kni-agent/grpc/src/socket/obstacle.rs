//! Inspects an existing file at a socket's path and decides whether it may be replaced.

use std::{
    fs, io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::Path,
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};

use super::{Identity, error::BindError};

/// The dead socket of the agent's user or of root at the path, which may be replaced; `None` if no file exists. Any
/// other file is an error. Symlinks are not followed.
pub(super) fn stale_socket(path: &Path) -> Result<Option<Identity>, BindError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(BindError::io(path, "looking at what is there", source)),
    };
    let own = nix::unistd::geteuid().as_raw();
    let trusted = metadata.uid() == 0 || metadata.uid() == own;
    if !metadata.file_type().is_socket() || !trusted {
        let (kind, owner) = (kind(metadata.file_type()), metadata.uid());
        return Err(BindError::Occupied {
            path: path.to_owned(),
            kind,
            owner,
        });
    }
    match probe(path) {
        Ok(()) | Err(Errno::EAGAIN) => Err(BindError::InUse { path: path.to_owned() }),
        Err(Errno::ECONNREFUSED) => Ok(Some(Identity::of(&metadata))),
        Err(Errno::ENOENT) => Ok(None),
        // Only a stream socket can be the agent's.
        Err(Errno::EPROTOTYPE) => {
            let (kind, owner) = ("a socket that is no stream socket", metadata.uid());
            Err(BindError::Occupied {
                path: path.to_owned(),
                kind,
                owner,
            })
        }
        Err(errno) => Err(BindError::io(path, "asking whether anybody serves there", errno.into())),
    }
}

/// Connects and disconnects at once. Does not wait: `EAGAIN` means that a process listens whose queue is full.
fn probe(path: &Path) -> nix::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(client.as_raw_fd(), &UnixAddr::new(path)?)
}

fn kind(found: fs::FileType) -> &'static str {
    if found.is_symlink() {
        "a symbolic link"
    } else if found.is_dir() {
        "a folder"
    } else if found.is_fifo() {
        "a fifo"
    } else if found.is_block_device() || found.is_char_device() {
        "a device"
    } else if found.is_socket() {
        "a socket"
    } else {
        "a file"
    }
}
