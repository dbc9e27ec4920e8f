//! Rules of `PodInterface`: an object is about one interface of one pod for good.

use kube::core::Rule;

use super::immutable;

/// Rules of the whole spec. A pod whose sandbox is made anew keeps its interfaces.
pub(crate) fn spec() -> Vec<Rule> {
    ["podName", "podUid", "nodeName", "podNetworkName", "interfaceName"]
        .map(|field| immutable(field, "delete the object and make another"))
        .into()
}
