//! Defines why a claim or a release did not come to an end.

/// Why a claim or a release did not come to an end.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The API server refuses the request as it is, by a rule or a missing permission. Nothing was changed.
    #[error("{step}: the API server refuses it: {reason}")]
    Refused {
        /// The step.
        step: &'static str,
        /// The API server's message.
        reason: String,
    },
    /// The API server does not serve the kind: its definition is not installed yet. Nothing was changed.
    #[error("the API server does not serve AddressBlocks: the definitions of this release are not installed")]
    NotServed,
    /// Whether the request had an effect is not known.
    #[error("{step}: {source}")]
    Unknown {
        /// The step.
        step: &'static str,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The result lacks the block, without an error.
    #[error("network {network}: the claim of a block was not settled")]
    Unsettled {
        /// The network.
        network: String,
    },
}

impl ClaimError {
    /// Whether the same request is refused until a permission, a rule or a definition changes.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::NotServed)
    }

    pub(crate) fn of(step: &'static str, error: kube::Error) -> Self {
        if let kube::Error::Api(status) = &error
            && matches!(status.code, 400 | 403 | 422)
        {
            return Self::Refused {
                step,
                reason: status.message.clone(),
            };
        }
        Self::Unknown {
            step,
            source: Box::new(error),
        }
    }
}
