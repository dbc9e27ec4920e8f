//! Defines the errors of this driver, with operation, interface and namespace.

use std::{
    borrow::Cow,
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The operation that failed, and its subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The operation ("create veth").
    pub operation: Cow<'static, str>,
    /// The interface, by name or as `#index`.
    pub interface: Option<String>,
    /// Path of the namespace; none for the agent's own.
    pub netns: Option<Arc<Path>>,
}

impl Place {
    pub(super) fn new(operation: impl Into<Cow<'static, str>>) -> Self {
        Self {
            operation: operation.into(),
            interface: None,
            netns: None,
        }
    }

    pub(super) fn interface(mut self, interface: impl Into<String>) -> Self {
        self.interface = Some(interface.into());
        self
    }

    pub(super) fn netns(mut self, netns: Option<Arc<Path>>) -> Self {
        self.netns = netns;
        self
    }

    pub(super) fn path(self, path: &Path) -> Self {
        self.netns(Some(path.into()))
    }

    /// The error of this operation for a refusal of the kernel.
    pub(super) fn refused(self, refusal: impl Into<Refusal>) -> Error {
        Error::Refused {
            place: self,
            refusal: refusal.into(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.operation)?;
        if let Some(interface) = &self.interface {
            write!(f, ", interface {interface}")?;
        }
        if let Some(netns) = &self.netns {
            write!(f, ", namespace {}", netns.display())?;
        }
        Ok(())
    }
}

/// An error number of the kernel, with its message where it sent one (extended acknowledgement).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{detail}", io::Error::from_raw_os_error(*errno))]
pub struct Refusal {
    /// The error number, positive.
    pub errno: i32,
    /// Empty, or `: ` and the kernel's message.
    pub detail: String,
}

impl From<nix::Error> for Refusal {
    fn from(error: nix::Error) -> Self {
        Self {
            errno: error as i32,
            detail: String::new(),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        error.raw_os_error().map_or_else(
            || Self {
                errno: libc::EIO,
                detail: format!(": {error}"),
            },
            |errno| Self {
                errno,
                detail: String::new(),
            },
        )
    }
}

/// An existing object that prevents a creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Existing {
    /// A host-side interface of that name.
    HostName(String),
    /// An interface of that name inside the pod's namespace.
    PodName(String),
    /// An interface with that index in the host's namespace.
    IfIndex(u32),
    /// A file at that path.
    File(PathBuf),
}

impl fmt::Display for Existing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostName(name) => write!(f, "host interface {name}"),
            Self::PodName(name) => write!(f, "pod interface {name}"),
            Self::IfIndex(index) => write!(f, "interface index {index}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// An error of this driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused.
    #[error("{place}: {refusal}")]
    Refused {
        /// The operation.
        place: Place,
        /// The kernel's error.
        #[source]
        refusal: Refusal,
    },
    /// The object exists already.
    #[error("{place}: {what} exists already")]
    Exists {
        /// The operation.
        place: Place,
        /// The existing object.
        what: Existing,
    },
    /// The file is not a network namespace.
    #[error("{} is not a network namespace: it is {found}", path.display())]
    NotANamespace {
        /// The path.
        path: PathBuf,
        /// The kind of file.
        found: &'static str,
    },
    /// The object is not KNI's and is not changed.
    #[error("{place}: left alone, because {reason}")]
    Foreign {
        /// The operation.
        place: Place,
        /// Why it is considered foreign.
        reason: String,
    },
    /// The kernel did not answer in time; whether it performed the request is unknown.
    #[error("{place}: no answer from the kernel within {seconds} s")]
    Timeout {
        /// The operation.
        place: Place,
        /// The wait in seconds.
        seconds: u64,
    },
    /// The connection or the thread ended before the work was done.
    #[error("{place}: {what} ended before the work was done")]
    Ended {
        /// The operation.
        place: Place,
        /// The connection or thread.
        what: &'static str,
    },
    /// The kernel's answer lacks a required part.
    #[error("{place}: the kernel's answer lacks {missing}")]
    Unexpected {
        /// The operation.
        place: Place,
        /// The missing part.
        missing: &'static str,
    },
}

impl Error {
    /// The kernel's error number, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { refusal, .. } => Some(refusal.errno),
            Self::Exists { .. } => Some(libc::EEXIST),
            Self::NotANamespace { .. }
            | Self::Foreign { .. }
            | Self::Timeout { .. }
            | Self::Ended { .. }
            | Self::Unexpected { .. } => None,
        }
    }
}
