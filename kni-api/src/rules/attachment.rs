//! Rules of `PodNetworkAttachment`: names that are taken, and what cannot change.

use kube::core::Rule;

use super::{immutable, rule};

const ANOTHER: &str = "make another PodNetworkAttachment and delete this one";

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    ["podNetworkName", "interfaceName", "mac", "addresses"]
        .map(|field| immutable(field, ANOTHER))
        .into()
}

/// The name of the additional interface.
pub(crate) fn interface_name() -> Vec<Rule> {
    vec![rule(
        "self != 'eth0'",
        "is the pod's primary interface: choose another name, such as net1",
    )]
}
