//! Defines errors in the format of CNI: a number, a sentence, and details.

use serde::Serialize;
use tonic::{Code, Status};

/// The numbers of the CNI specification, and the plugin's own from 100 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorCode {
    /// The configuration's version does not support the verb.
    IncompatibleVersion = 1,
    /// A variable of the environment is missing or not valid.
    InvalidEnvironment = 4,
    /// Input or output failed.
    Io = 5,
    /// The configuration is not JSON, or fields have wrong types.
    Decode = 6,
    /// The configuration is not valid.
    InvalidConfig = 7,
    /// The network namespace does not exist.
    InvalidNetns = 8,
    /// The same call will work later.
    TryAgainLater = 11,
    /// No pod can be added.
    NotAvailable = 50,
    /// The agent failed to perform the call.
    Failed = 100,
    /// The interface exists, or a requested resource belongs to another attachment.
    Exists = 101,
    /// No address, or no endpoint, is left.
    Exhausted = 102,
    /// The state that CHECK found differs from the result of ADD.
    CheckFailed = 103,
    /// Some of the garbage could not be removed.
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

    /// The agent's refusal.
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

    /// On one line, in the version that the runtime uses.
    pub(crate) fn to_json(&self, version: &str) -> String {
        let wire = Wire {
            cni_version: version,
            code: self.code as u32,
            msg: &self.msg,
            details: &self.details,
        };
        // Text and numbers can always be serialized as JSON.
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
