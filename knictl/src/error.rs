//! Defines the errors of commands and their messages for operators.

use std::{io, path::PathBuf, time::Duration};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The socket does not exist, or no process listens on it.
    #[error("no agent is serving on {}: is kni-agent running?", path.display())]
    NoAgent { path: PathBuf },
    /// The socket belongs to root.
    #[error("permission denied on {}: knictl needs root", path.display())]
    NeedsRoot { path: PathBuf },
    /// Any other reason why there is no connection.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect { path: PathBuf, source: io::Error },
    /// A process listens, but it does not speak HTTP/2.
    #[error("cannot speak gRPC on {}: {source}", path.display())]
    Protocol {
        path: PathBuf,
        source: tonic::transport::Error,
    },
    /// The agent has no such method.
    #[error("the agent does not know {call}: is it of another version than knictl?")]
    Unknown { call: &'static str },
    /// The agent refused, failed, or ended.
    #[error("{call} failed: {message} ({code:?})")]
    Call {
        call: &'static str,
        code: tonic::Code,
        message: String,
    },
    /// The agent accepted the call but did not answer.
    #[error("{call}: the agent did not answer within {} s", limit.as_secs())]
    Silent { call: &'static str, limit: Duration },
    /// The cluster cannot be reached, or its address is not configured.
    #[error("cannot reach the cluster: {0}")]
    Cluster(String),
    /// The API server refused a request.
    #[error("{what}: {}", api_message(source))]
    Request { what: String, source: Box<kube::Error> },
    /// The arguments of a command of knictl are not valid, or ask for its help.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// No argument identifies the node whose agent to ask.
    #[error("{0}")]
    Node(String),
    /// The output could not be written; a broken pipe is not reported as an error.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// The answer has no JSON form.
    #[error("cannot write the answer as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The answer has no YAML form.
    #[error("cannot write the answer as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
}

/// The API server's own message, if it answered.
fn api_message(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
    }
    error.to_string()
}

impl Error {
    /// The error of a request for `what`.
    pub(crate) fn of_request(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |source| Self::Request {
            what,
            source: Box::new(source),
        }
    }

    /// The error of `call` that the agent, or the connection to it, reported.
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
