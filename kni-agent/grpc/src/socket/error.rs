//! Errors of binding a socket.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The agent cannot serve at a path. An existing file at the path is left unchanged.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path cannot name a socket.
    #[error("socket {}: not an absolute path of a file", path.display())]
    NotAPath {
        /// The path.
        path: PathBuf,
    },
    /// Another file exists at the path.
    #[error("socket {}: {kind} of uid {owner} is in the way; remove it if it is not needed", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// Its file type ("a folder").
        kind: &'static str,
        /// Its owner.
        owner: u32,
    },
    /// Another process serves at the path.
    #[error("socket {}: another process serves on {}", path.display(), path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Another user could replace the socket.
    #[error("socket folder {}: {reason}", path.display())]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
        /// Which user could, and why.
        reason: String,
    },
    /// The kernel refused a step.
    #[error("socket {}: {step}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The step.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl BindError {
    pub(super) fn io(path: &Path, step: &'static str, source: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            step,
            source,
        }
    }
}
