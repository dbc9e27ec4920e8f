//! What can go wrong in this driver, always naming the operation, the interface and the namespace.

use std::{
    borrow::Cow,
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Where something went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What was being done ("create veth").
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

    /// The error of this place for a refusal.
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

/// An error number of the kernel, with the kernel's own words where it gave some (extended acknowledgement).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{detail}", io::Error::from_raw_os_error(*errno))]
pub struct Refusal {
    /// The error number, positive.
    pub errno: i32,
    /// Empty, or `: ` and the kernel's explanation.
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

/// What exists already where something was to be created.
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
        /// Where.
        place: Place,
        /// Why.
        #[source]
        refusal: Refusal,
    },
    /// Something exists already.
    #[error("{place}: {what} exists already")]
    Exists {
        /// Where.
        place: Place,
        /// What.
        what: Existing,
    },
    /// The path leads to something that is not a network namespace.
    #[error("{} is not a network namespace: it is {found}", path.display())]
    NotANamespace {
        /// The path.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// The object was not made by KNI and is left alone.
    #[error("{place}: left alone, because {reason}")]
    Foreign {
        /// Where.
        place: Place,
        /// What shows that it is foreign.
        reason: String,
    },
    /// The kernel did not answer in time; whether the request was carried out is unknown.
    #[error("{place}: no answer from the kernel within {seconds} s")]
    Timeout {
        /// Where.
        place: Place,
        /// How long was waited.
        seconds: u64,
    },
    /// The connection or the thread that was to do the work ended first.
    #[error("{place}: {what} ended before the work was done")]
    Ended {
        /// Where.
        place: Place,
        /// What ended.
        what: &'static str,
    },
    /// The kernel's answer does not say what it must.
    #[error("{place}: the kernel's answer lacks {missing}")]
    Unexpected {
        /// Where.
        place: Place,
        /// What is missing.
        missing: &'static str,
    },
}

impl Error {
    /// The kernel's error number, where there is one.
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
