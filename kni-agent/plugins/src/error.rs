//! What can go wrong with plugins, always naming the configuration and the plugin.

use std::{io, path::PathBuf};

/// "Try again later" of the specification.
const TRY_AGAIN: u32 = 11;

/// Why plugins could not do their part.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// There is no such configuration.
    #[error("{what} is not in {}", dir.display())]
    NotFound {
        /// What was looked for.
        what: String,
        /// Where.
        dir: PathBuf,
    },
    /// A configuration is not valid.
    #[error("{}: {reason}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A plugin is not installed.
    #[error("{configuration}: plugin {plugin} is in none of {dirs}")]
    NoPlugin {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// Where it was looked for.
        dirs: String,
    },
    /// A plugin refused.
    #[error("{configuration}: plugin {plugin}: {verb}: {message} (code {code})")]
    Refused {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// What it was asked to do.
        verb: &'static str,
        /// Its code; 0 if it told none.
        code: u32,
        /// Its words, with the details.
        message: String,
    },
    /// A plugin could not be run, or its answer cannot be read.
    #[error("{configuration}: plugin {plugin}: {verb}: {reason}")]
    Failed {
        /// Name of the configuration.
        configuration: String,
        /// The plugin.
        plugin: String,
        /// What it was asked to do.
        verb: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// An entry cannot be written or read.
    #[error("{}: {source}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The entry of an attachment is not there.
    #[error("{}: is missing: what the plugins made cannot be checked", .0.display())]
    Forgotten(PathBuf),
    /// Several went wrong.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<Self>),
}

impl CniError {
    /// All of them as one.
    pub(super) fn all(mut errors: Vec<Self>) -> Option<Self> {
        if errors.len() > 1 {
            return Some(Self::Several(errors));
        }
        errors.pop()
    }

    /// Whether the same call may work later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::NoPlugin { .. } | Self::Refused { code: TRY_AGAIN, .. } => true,
            Self::Invalid { .. }
            | Self::Refused { .. }
            | Self::Failed { .. }
            | Self::Entry { .. }
            | Self::Forgotten(_)
            | Self::Several(_) => false,
        }
    }
}
