//! Holds who may join a network, and what the pods that join may choose.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::policy::{Labels, Selector};

/// Who may join a network, and what pods that join may choose, with its defaults filled in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a right of its own")]
pub struct Access {
    /// The namespaces whose pods may join, beside [`Self::primary_of`].
    pub namespaces: Admitted,
    /// The addresses that pods may choose.
    pub addresses: Choice,
    /// Whether pods may choose MAC addresses.
    pub mac: bool,
    /// Whether an interface beside the primary one may take the default routes.
    pub default_route: bool,
    /// Whether pods of [`Self::primary_of`] may have no other primary network.
    pub lock_namespaces: bool,
    /// Whether the pod's service account needs the verb `join`.
    pub require_join: bool,
    /// Whether running pods that lose the right are detached.
    pub revoke: bool,
    /// The namespaces whose primary network it is (`spec.namespaceSelector`).
    pub primary_of: Option<Selector>,
}

/// Namespaces whose pods may join.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admitted {
    /// Every namespace.
    All,
    /// Those that the selector selects.
    Selected(Selector),
    /// None.
    #[default]
    None,
}

/// Addresses that pods may choose.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Choice {
    /// None.
    #[default]
    Nothing,
    /// Any address of the subnets.
    Any,
    /// Addresses inside these ranges.
    Within(Vec<IpNet>),
}

impl Admitted {
    /// Whether pods of a namespace with these labels may join.
    pub fn admits(&self, labels: &Labels) -> bool {
        match self {
            Self::All => true,
            Self::Selected(selector) => selector.matches(labels),
            Self::None => false,
        }
    }
}
