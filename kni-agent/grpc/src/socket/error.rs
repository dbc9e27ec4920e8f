//! Why a socket cannot be bound.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A path at which the agent does not serve. Whatever lies there has been left alone.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path cannot name a socket.
    #[error("socket {}: not an absolute path of a file", path.display())]
    NotAPath {
        /// The path.
        path: PathBuf,
    },
    /// Something else lies at the path.
    #[error("socket {}: {kind} of uid {owner} is in the way; remove it if it is not needed", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// What lies there ("a folder").
        kind: &'static str,
        /// Who owns it.
        owner: u32,
    },
    /// A process answers at the path.
    #[error("socket {}: another process serves on {}", path.display(), path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Others could replace the socket.
    #[error("socket folder {}: {reason}", path.display())]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
        /// Who could.
        reason: String,
    },
    /// The kernel refused a step.
    #[error("socket {}: {step}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What was being done.
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
