//! Defines the errors of plugins, with configuration and plugin.

use std::{io, path::PathBuf, sync::Arc};

use super::configuration_error::ConfigurationError;

/// "Try again later" of the specification.
const TRY_AGAIN: u32 = 11;

/// Failure of a plugin, or of a call of plugins.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// There is no such configuration.
    #[error("{what} is not in {}", dir.display())]
    NotFound {
        /// The configuration.
        what: String,
        /// The folder.
        dir: PathBuf,
    },
    /// A configuration is not valid.
    #[error("{}: {source}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: ConfigurationError,
    },
    /// A plugin is not installed.
    #[error("{configuration}: plugin {plugin} is in none of {dirs}")]
    NoPlugin {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// The folders of plugins.
        dirs: String,
    },
    /// A plugin returned an error.
    #[error("{configuration}: plugin {plugin}: {verb}: {message} (code {code})")]
    Refused {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// The CNI command.
        verb: &'static str,
        /// The error code; 0 without one.
        code: u32,
        /// The message and the details of the error.
        message: String,
    },
    /// A plugin could not be run, or its result cannot be read.
    #[error("{configuration}: plugin {plugin}: {verb}: {source}")]
    Failed {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// The CNI command.
        verb: &'static str,
        /// The cause.
        source: RunError,
    },
    /// An entry cannot be written or read.
    #[error("{}: {source}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// An attachment has no entry.
    #[error("{}: is missing: the work of the plugins cannot be checked", .0.display())]
    NoEntry(PathBuf),
    /// Several errors.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<Self>),
}

impl CniError {
    /// Combines errors; `None` without any.
    pub(super) fn all(mut errors: Vec<Self>) -> Option<Self> {
        if errors.len() > 1 {
            return Some(Self::Several(errors));
        }
        errors.pop()
    }

    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::NoPlugin { .. } | Self::Refused { code: TRY_AGAIN, .. } => true,
            Self::Invalid { .. }
            | Self::Refused { .. }
            | Self::Failed { .. }
            | Self::Entry { .. }
            | Self::NoEntry(_)
            | Self::Several(_) => false,
        }
    }
}

/// A plugin that could not be run, or whose result cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be executed.
    #[error("cannot execute {}: {source}", program.display())]
    Execute {
        /// The program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process has no standard streams.
    #[error("has no streams")]
    NoStreams,
    /// The process exceeded the time limit.
    #[error("took too long and was killed")]
    TimedOut,
    /// The end of the process cannot be awaited.
    #[error("cannot wait for its end: {0}")]
    Wait(#[source] io::Error),
    /// Its output cannot be read.
    #[error("cannot read its answer: {0}")]
    Read(#[source] io::Error),
    /// Its output exceeds the limit.
    #[error("answered more than {0} bytes")]
    TooMuchOutput(u64),
    /// Its output is not JSON.
    #[error("its answer is not JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    /// It returned no result where one is required.
    #[error("returned no result")]
    NoResult,
    /// Its result does not follow the specification.
    #[error("its result cannot be read: {0}")]
    Result(#[source] serde_json::Error),
}

/// Why the plugins of a network cannot be run now.
#[derive(Debug, Clone, thiserror::Error)]
#[error(transparent)]
pub struct NotReady(Arc<CniError>);

impl From<CniError> for NotReady {
    fn from(error: CniError) -> Self {
        Self(Arc::new(error))
    }
}
