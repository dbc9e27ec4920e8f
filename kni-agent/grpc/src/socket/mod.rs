//! Owns the unix sockets: binds them with mode 0600 from the start, removes only files that this process made.
//!
//! /tmp is writable for all users, so an existing file at a socket's path is inspected without following symlinks, and
//! only a dead socket of the agent's user or of root is replaced. Any other file is refused and left unchanged.

mod error;
mod folder;
mod obstacle;
#[cfg(test)]
mod tests;

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{fs::MetadataExt as _, net::UnixListener},
    },
    path::{Path, PathBuf},
};

pub use error::BindError;
use nix::sys::{
    socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr},
    stat::{Mode, fchmod},
};

/// Length of the accept queue.
const BACKLOG: i32 = 512;

/// A listening socket and its file. Dropping it removes the file if it is still this socket's.
#[derive(Debug)]
pub struct BoundSocket {
    // Dropped first, so that no client finds a path without a listener.
    file: SocketFile,
    listener: UnixListener,
}

impl BoundSocket {
    /// The path that clients connect to.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The listener in non-blocking mode, and the guard of its file.
    pub(super) fn into_parts(self) -> (SocketFile, UnixListener) {
        (self.file, self.listener)
    }
}

/// Removes a socket's file when dropped, if the file at the path is still the same.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = remove_if_same(&self.path, self.identity) {
            tracing::warn!(path = %self.path.display(), %error, "socket file could not be removed");
        }
    }
}

/// Device and inode, which identify a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    dev: u64,
    inode: u64,
}

impl Identity {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            dev: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

/// Makes and binds a socket at each path. The first one has to succeed; the error of another is logged and added to
/// `refused`: any user may put a file into /tmp, which must not keep the agent from serving at its own path. The folder
/// of a socket is made with mode 0700 where it is missing. A path that is given twice is bound once.
pub fn bind(paths: &[PathBuf], refused: &mut Vec<BindError>) -> Result<Vec<BoundSocket>, BindError> {
    let mut sockets: Vec<BoundSocket> = Vec::with_capacity(paths.len());
    for path in paths {
        if sockets.iter().any(|socket| socket.path() == path) {
            continue;
        }
        match bind_one(path) {
            Ok(socket) => sockets.push(socket),
            Err(error) if sockets.is_empty() => return Err(error),
            Err(error) => {
                tracing::error!(%error, "the agent serves without this socket");
                refused.push(error);
            }
        }
    }
    Ok(sockets)
}

/// Removes the socket file of a killed agent. Any other file at the path is an error and stays.
pub fn remove_dead(path: &Path) -> Result<(), BindError> {
    match obstacle::stale_socket(path)? {
        Some(dead) => remove_if_same(path, dead).map_err(|source| BindError::io(path, "remove", source)),
        None => Ok(()),
    }
}

fn bind_one(path: &Path) -> Result<BoundSocket, BindError> {
    let folder = path
        .parent()
        .filter(|_| path.is_absolute() && path.file_name().is_some());
    let folder = folder.ok_or_else(|| BindError::NotAPath { path: path.to_owned() })?;
    folder::prepare(folder)?;
    if let Some(stale) = obstacle::stale_socket(path)? {
        tracing::info!(path = %path.display(), "replacing the socket of a process that is gone");
        remove_if_same(path, stale).map_err(|source| BindError::io(path, "removing the dead socket", source))?;
    }
    listen(path)
}

/// Binds so that other users can connect at no moment: Linux gives a socket's file the mode of the socket itself, which
/// no other process can reach before (`unix_bind_bsd` in the kernel). bind(2) neither follows nor replaces a file that
/// appeared at the path meanwhile.
fn listen(path: &Path) -> Result<BoundSocket, BindError> {
    let step = |step: &'static str| move |errno: nix::Error| BindError::io(path, step, errno.into());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket: OwnedFd = nix::sys::socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)
        .map_err(step("making a socket"))?;
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR).map_err(step("setting the mode of the socket"))?;
    let address = UnixAddr::new(path).map_err(step("reading the path as a socket address"))?;
    nix::sys::socket::bind(socket.as_raw_fd(), &address).map_err(step("binding"))?;
    let metadata = fs::symlink_metadata(path).map_err(|source| BindError::io(path, "looking at the socket", source))?;
    let file = SocketFile {
        path: path.to_owned(),
        identity: Identity::of(&metadata),
    };
    if metadata.mode() & 0o077 != 0 {
        let error = io::Error::other(format!("mode is {:o}, not 600", metadata.mode() & 0o7777));
        return Err(BindError::io(path, "checking the mode of the socket", error));
    }
    let backlog = Backlog::new(BACKLOG).map_err(step("listening"))?;
    nix::sys::socket::listen(&socket, backlog).map_err(step("listening"))?;
    Ok(BoundSocket {
        file,
        listener: UnixListener::from(socket),
    })
}

/// Removes the file at the path if it has this identity. A missing file counts as removed.
fn remove_if_same(path: &Path, meant: Identity) -> io::Result<()> {
    let absent = |error: io::Error| {
        if error.kind() == io::ErrorKind::NotFound {
            Ok(())
        } else {
            Err(error)
        }
    };
    match fs::symlink_metadata(path) {
        Ok(metadata) if Identity::of(&metadata) == meant => fs::remove_file(path).or_else(absent),
        Ok(_another) => Ok(()),
        Err(error) => absent(error),
    }
}
