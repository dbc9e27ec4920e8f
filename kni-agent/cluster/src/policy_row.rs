//! Decides what is enforced of a policy whose object is refused.

use std::sync::Arc;

use kni_api::{EgressPolicy, EgressPolicySummary};
use kni_model::policy::Policy;

/// A policy as last reported. There is always something to enforce: no refusal opens the selected pods.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyRow {
    /// The enforced rules.
    pub policy: Arc<Policy>,
    /// Where they are from.
    pub source: PolicySource,
    /// The object's UID.
    pub uid: String,
    /// The object's resource version, as a number; 0 where it is none.
    pub version: u64,
    /// The object's generation.
    pub generation: i64,
    /// The summary of an egress policy; empty for other kinds.
    pub summary: EgressPolicySummary,
}

/// Where the enforced rules of a policy are from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicySource {
    /// From the object as last reported.
    Object,
    /// From the last valid version of the object, which is refused now for this reason.
    LastValid(String),
    /// No valid version of the object is known, which is refused for this reason: the selected pods are isolated, and
    /// nothing is allowed.
    Closed(String),
}

/// An egress policy with its object, for the status writer.
#[derive(Debug, Clone, PartialEq)]
pub struct EgressPolicyRow {
    /// The object.
    pub object: Arc<EgressPolicy>,
    /// Its rules.
    pub row: PolicyRow,
}

impl PolicyRow {
    /// Why the object as last reported is refused, with the field.
    pub fn refusal(&self) -> Option<&str> {
        match &self.source {
            PolicySource::Object => None,
            PolicySource::LastValid(reason) | PolicySource::Closed(reason) => Some(reason),
        }
    }

    /// The row that follows `former`, which has the same name: the last valid version of the same object stays active
    /// where this one is refused. Another object of the name has no part in it.
    #[must_use]
    pub fn after(mut self, former: &Self) -> Self {
        let is_valid = !matches!(former.source, PolicySource::Closed(_)) && former.uid == self.uid;
        if let PolicySource::Closed(reason) = &self.source
            && is_valid
        {
            self.source = PolicySource::LastValid(reason.clone());
            self.policy = Arc::clone(&former.policy);
        }
        self
    }
}

impl EgressPolicyRow {
    /// [`PolicyRow::after`].
    #[must_use]
    pub fn after(self, former: &Self) -> Self {
        Self {
            row: self.row.after(&former.row),
            ..self
        }
    }
}
