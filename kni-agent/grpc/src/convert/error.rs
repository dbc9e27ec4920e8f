//! Errors of requests that are refused before any work begins.

use kni_model::{PodRef, SelectionError};

/// Longest name of a pod or namespace and longest id, in bytes (the limit of a DNS subdomain in Kubernetes).
pub(super) const MAX_NAME: usize = 253;

/// A request that breaks a rule of the interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    /// A field is not valid.
    #[error("pod {pod}, sandbox {sandbox}: {field}: {reason}")]
    InvalidField {
        /// The pod, as given.
        pod: Box<PodRef>,
        /// The sandbox, as given.
        sandbox: String,
        /// Path of the field in the request (`port_mappings[2].protocol`).
        field: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The networks that the annotations ask for are not valid.
    #[error("pod {pod}, sandbox {sandbox}: {source}")]
    InvalidSelection {
        /// The pod, as given.
        pod: Box<PodRef>,
        /// The sandbox, as given.
        sandbox: String,
        /// What is wrong.
        source: Box<SelectionError>,
    },
}

/// A field and its error, before the pod of the request is known.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) field: String,
    pub(super) reason: String,
}

impl Refusal {
    pub(super) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason: reason.into(),
        }
    }

    pub(super) fn of(self, pod: &PodRef, sandbox: &str) -> RequestError {
        RequestError::InvalidField {
            pod: Box::new(pod.clone()),
            sandbox: sandbox.chars().take(MAX_NAME).collect(),
            field: self.field,
            reason: self.reason,
        }
    }
}
