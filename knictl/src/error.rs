//! What can go wrong, in the words that the operator reads.

use std::{io, path::PathBuf, time::Duration};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The socket does not exist, or nobody listens on it.
    #[error("no agent is serving on {}: is kni-agent running?", path.display())]
    NoAgent { path: PathBuf },
    /// The socket is root's.
    #[error("permission denied on {}: knictl needs root", path.display())]
    NeedsRoot { path: PathBuf },
    /// Any other reason why there is no connection.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect { path: PathBuf, source: io::Error },
    /// Something listens, but it does not speak HTTP/2.
    #[error("cannot speak gRPC on {}: {source}", path.display())]
    Protocol {
        path: PathBuf,
        source: tonic::transport::Error,
    },
    /// The agent has no such method.
    #[error("the agent does not know {call}: is it of another version than knictl?")]
    Unknown { call: &'static str },
    /// The agent refused, failed, or went away.
    #[error("{call} failed: {message} ({code:?})")]
    Call {
        call: &'static str,
        code: tonic::Code,
        message: String,
    },
    /// The agent accepted the call and stayed silent.
    #[error("{call}: the agent did not answer within {} s", limit.as_secs())]
    Silent { call: &'static str, limit: Duration },
    /// The output took no more; a broken pipe is not told as an error.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// The answer has no JSON form.
    #[error("cannot write the answer as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The answer has no YAML form.
    #[error("cannot write the answer as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
}

impl Error {
    /// The failure of `call` that the agent, or the connection to it, reported.
    pub(crate) fn of_call(call: &'static str, status: &tonic::Status) -> Self {
        let code = status.code();
        if code == tonic::Code::Unimplemented {
            return Self::Unknown { call };
        }
        Self::Call {
            call,
            code,
            message: status.message().to_owned(),
        }
    }
}
