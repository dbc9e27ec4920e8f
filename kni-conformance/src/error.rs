//! Defines why a run cannot start, and why a case does not pass.

use std::{io, path::PathBuf, time::Duration};

use tonic::Code;

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No server accepts connections.
    #[error("cannot connect to {}", .socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// There is no case of this name.
    #[error("there is no case {0:?}")]
    UnknownCase(String),
    /// No case is of the selected level and has a selected name.
    #[error("no case has both the level and the name that were selected")]
    NoCase,
    /// The machine refused what every run needs.
    #[error("cannot {what}")]
    Machine {
        /// The refused operation.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

/// Why a case does not pass.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The server lacks an optional feature.
    #[error("{0}")]
    NotOffered(String),
    /// The server refused a call.
    #[error("{method} fails with {code:?}: {message}")]
    Call {
        method: &'static str,
        code: Code,
        message: String,
    },
    /// The server exceeded the time limit of a call.
    #[error("{method} does not answer within {limit:?}")]
    Late { method: &'static str, limit: Duration },
    /// An answer or the state of the kernel is not as required.
    #[error("{0}")]
    Wrong(String),
    /// The kernel refused an operation of the case.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

/// Result of a case and of its steps.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The code of a refused call.
    pub(crate) fn code(&self) -> Option<Code> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::NotOffered(_) | Self::Late { .. } | Self::Wrong(_) | Self::Io { .. } => None,
        }
    }

    /// Puts a text in front of the reason, unless it is that of a missing feature or of a refused call.
    pub(crate) fn about(self, what: &str) -> Self {
        match self {
            Self::Wrong(reason) => Self::Wrong(format!("{what}: {reason}")),
            Self::Io { what: inner, source } => Self::Io {
                what: format!("{what}: {inner}"),
                source,
            },
            other @ (Self::NotOffered(_) | Self::Call { .. } | Self::Late { .. }) => other,
        }
    }
}

/// Turns an error of the kernel into a [`Failure`].
pub(crate) trait During<T> {
    /// Names the failed operation.
    fn during(self, what: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: impl Into<String>) -> Result<T> {
        self.map_err(|error| Failure::Io {
            what: what.into(),
            source: error.into(),
        })
    }
}

/// Returns [`Failure::Wrong`] from the surrounding function unless the condition holds.
macro_rules! require {
    ($condition:expr, $($format:tt)+) => {
        if !$condition {
            return Err($crate::error::Failure::Wrong(format!($($format)+)));
        }
    };
}
pub(crate) use require;
