//! Maps errors to gRPC codes in one table, and bounds their messages.

use kni_model::flow_view::QuestionError;
use kni_pods::{AttachError, ErrorKind, GateError};
use tonic::{Code, Status};

use super::convert::RequestError;

/// Longest message, in bytes. Percent-encoded it still fits a client's limit for headers.
const MAX_MESSAGE: usize = 1024;

/// The code depends on what a client can do about the error: `Unavailable` means that the same call will work later.
fn code(kind: &ErrorKind) -> Code {
    match kind {
        // The services behind the gate retry in the background.
        ErrorKind::NotInSync
        | ErrorKind::NotReady(_)
        | ErrorKind::Stopping
        | ErrorKind::Unwritable(_)
        | ErrorKind::Gate(GateError::Policies(_) | GateError::Egress(_) | GateError::HostPorts(_))
        | ErrorKind::Provider { retryable: true, .. } => Code::Unavailable,
        ErrorKind::UnknownNetwork(_) | ErrorKind::NetnsNotFound(_) => Code::NotFound,
        ErrorKind::InvalidSelection(_)
        | ErrorKind::InvalidField { .. }
        | ErrorKind::AddressElsewhere { .. }
        | ErrorKind::AddressUnavailable { in_use: false, .. } => Code::InvalidArgument,
        ErrorKind::NoDefaultNetwork | ErrorKind::NetworkDisabled(_) | ErrorKind::Provider { retryable: false, .. } => {
            Code::FailedPrecondition
        }
        // The kubelet repeats the call: the namespace or the network may have changed by then.
        ErrorKind::NotAuthorized(_) => Code::PermissionDenied,
        ErrorKind::AddressesExhausted { .. } | ErrorKind::EndpointsExhausted { .. } => Code::ResourceExhausted,
        ErrorKind::AddressUnavailable { in_use: true, .. }
        | ErrorKind::Conflict(_)
        | ErrorKind::HostPortTaken { .. } => Code::AlreadyExists,
        ErrorKind::Timeout { .. } => Code::DeadlineExceeded,
        ErrorKind::Kernel { .. } | ErrorKind::Xdp { .. } | ErrorKind::Store(_) => Code::Internal,
    }
}

/// An error of a lower layer that the table maps. Both types are foreign, so [`From`] cannot be implemented.
pub(super) trait IntoStatus {
    /// The code and the message of the error.
    fn into_status(self) -> Status;
}

impl IntoStatus for AttachError {
    fn into_status(self) -> Status {
        Status::new(code(self.kind()), one_line(&self.to_string()))
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        Self::invalid_argument(one_line(&error.to_string()))
    }
}

impl IntoStatus for QuestionError {
    fn into_status(self) -> Status {
        let code = match &self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NotFound { .. } => Code::NotFound,
            Self::Failed(_) => Code::Internal,
        };
        Status::new(code, one_line(&self.to_string()))
    }
}

/// Text that fits a header, a log line and a terminal: no control characters, no line breaks, limited length.
pub(super) fn one_line(text: &str) -> String {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    // One character more than fits: the length then shows whether text is cut off.
    let mut line: String = text
        .chars()
        .take(MAX_MESSAGE + 1)
        .map(|c| if breaks(c) { ' ' } else { c })
        .collect();
    if line.len() > MAX_MESSAGE {
        line.truncate(line.floor_char_boundary(MAX_MESSAGE - '…'.len_utf8()));
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests;
