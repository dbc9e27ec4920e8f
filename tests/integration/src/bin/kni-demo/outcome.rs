//! What became of a part of the demo.

use std::fmt;

use anyhow::Result;

/// The result of a part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Everything was as expected.
    Ok,
    /// It was not run, for this reason.
    LeftOut(String),
    /// It failed, for this reason.
    Failed(String),
}

impl Outcome {
    /// The outcome of a part that ran.
    pub(crate) fn of(result: Result<()>) -> Self {
        match result {
            Ok(()) => Self::Ok,
            Err(error) => Self::Failed(format!("{error:#}")),
        }
    }

    /// Whether the demo as a whole failed because of it.
    pub(crate) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => write!(f, "ok"),
            Self::LeftOut(reason) => write!(f, "left out: {reason}"),
            Self::Failed(reason) => write!(f, "FAILED: {reason}"),
        }
    }
}
