//! Makes a task fail on request. For tests only: nothing requests it in operation.

use std::{future::pending, str::FromStr};

use tokio::sync::oneshot;

use crate::pulse::Fate;

/// How a task fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It panics.
    Panic,
    /// It returns.
    End,
    /// It makes no progress any more.
    Hang,
}

/// A text that names no fault.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not panic, end or hang")]
pub struct InvalidFault(String);

impl FromStr for Fault {
    type Err = InvalidFault;

    fn from_str(text: &str) -> Result<Self, InvalidFault> {
        match text {
            "panic" => Ok(Self::Panic),
            "end" => Ok(Self::End),
            "hang" => Ok(Self::Hang),
            other => Err(InvalidFault(other.to_owned())),
        }
    }
}

/// Waits for a fault and carries it out in the task that polls this.
#[expect(clippy::panic, reason = "the fault that tests request")]
pub(super) async fn after(fault: oneshot::Receiver<Fault>) -> Fate {
    match fault.await {
        Ok(Fault::Panic) => panic!("a test requested this panic"),
        Ok(Fault::End) => Fate::End,
        Ok(Fault::Hang) => Fate::Hang,
        Err(_no_requests) => pending().await,
    }
}
