//! Errors as CNI wants them: a number, a sentence, and details.

use serde::Serialize;
use tonic::{Code, Status};

/// The numbers of the CNI specification, and from 100 on the plugin's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorCode {
    /// The configuration's version does not have what is asked for.
    IncompatibleVersion = 1,
    /// A variable of the environment is missing or not valid.
    InvalidEnvironment = 4,
    /// Input or output failed.
    Io = 5,
    /// The configuration is no JSON, or fields of it are of wrong types.
    Decode = 6,
    /// The configuration makes no sense.
    InvalidConfig = 7,
    /// The network namespace does not exist.
    InvalidNetns = 8,
    /// The same call will work later.
    TryAgainLater = 11,
    /// No pod can be added.
    NotAvailable = 50,
    /// The agent could not do it.
    Failed = 100,
    /// The interface is there already, or something else has what was asked for.
    Exists = 101,
    /// No address, or no endpoint, is left.
    Exhausted = 102,
    /// What CHECK found is not what ADD made.
    CheckFailed = 103,
    /// Some of the garbage stays.
    GarbageLeft = 104,
}

/// Why a verb failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CniError {
    pub(crate) code: ErrorCode,
    pub(crate) msg: String,
    pub(crate) details: String,
}

#[derive(Serialize)]
struct Wire<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'a str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

impl CniError {
    pub(crate) fn new(code: ErrorCode, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    pub(crate) fn details(self, details: impl Into<String>) -> Self {
        Self {
            details: details.into(),
            ..self
        }
    }

    pub(crate) fn io(what: &str, error: &std::io::Error) -> Self {
        Self::new(ErrorCode::Io, format!("{what}: {error}"))
    }

    /// What the agent answered.
    pub(crate) fn refused(method: &str, status: &Status) -> Self {
        let code = match status.code() {
            Code::InvalidArgument | Code::NotFound => ErrorCode::InvalidConfig,
            Code::AlreadyExists => ErrorCode::Exists,
            Code::ResourceExhausted => ErrorCode::Exhausted,
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Aborted
            // No default network yet, or a disabled one.
            | Code::FailedPrecondition => ErrorCode::TryAgainLater,
            Code::Ok
            | Code::Unknown
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss => ErrorCode::Failed,
        };
        Self::new(code, status.message()).details(format!("kni-agent answered {method} with {:?}", status.code()))
    }

    /// On one line, of the version that the runtime speaks.
    pub(crate) fn to_json(&self, version: &str) -> String {
        let wire = Wire {
            cni_version: version,
            code: self.code as u32,
            msg: &self.msg,
            details: &self.details,
        };
        // Text and numbers always have a form in JSON.
        serde_json::to_string(&wire).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_is_that_of_the_specification() {
        let error = CniError::new(ErrorCode::InvalidConfig, "a \"name\"\nis missing").details("more");
        assert_eq!(
            error.to_json("0.4.0"),
            r#"{"cniVersion":"0.4.0","code":7,"msg":"a \"name\"\nis missing","details":"more"}"#
        );
        let bare = CniError::new(ErrorCode::TryAgainLater, "later").to_json("1.1.0");
        assert_eq!(bare, r#"{"cniVersion":"1.1.0","code":11,"msg":"later"}"#);
    }

    #[test]
    fn each_answer_of_the_agent_has_a_number() {
        for (code, number) in [
            (Code::InvalidArgument, 7),
            (Code::NotFound, 7),
            (Code::AlreadyExists, 101),
            (Code::ResourceExhausted, 102),
            (Code::Unavailable, 11),
            (Code::DeadlineExceeded, 11),
            (Code::FailedPrecondition, 11),
            (Code::Internal, 100),
        ] {
            let error = CniError::refused("AttachInterface", &Status::new(code, "why"));
            assert_eq!((error.code as u32, error.msg.as_str()), (number, "why"), "{code:?}");
            assert!(error.details.contains("AttachInterface"));
        }
    }
}
