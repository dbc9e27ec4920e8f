//! Holds what is known of an object that cannot be decoded.

use serde_json::Value;

/// An object that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The field, and what is wrong with it.
    pub reason: String,
    /// Its specification, as the API server sent it; null if that is not known.
    pub spec: Value,
}

impl From<String> for Refused {
    fn from(reason: String) -> Self {
        let spec = Value::Null;
        Self { reason, spec }
    }
}
