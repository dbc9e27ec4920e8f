//! Rules of `NetworkMembers`: an object is about one node and one network for good.

use kube::core::Rule;

use super::{immutable, rule};

/// The name begins with that of the network, so that names of two networks differ.
pub(crate) fn name() -> Rule {
    rule(
        "!has(self.spec.network) || self.metadata.name.startsWith(self.spec.network + '.')",
        "metadata.name does not begin with the network: write NETWORK.HASH.NUMBER, such as blue.0123456789abcdef.0",
    )
}

/// An interface of a pod is reported once.
pub(crate) fn distinct() -> Rule {
    rule(
        "self.all(a, self.exists_one(b, a.podUID == b.podUID && a.interface == b.interface))",
        "has an interface of a pod twice: keep one entry for each podUID and interface",
    )
}

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    ["network", "networkUID", "nodeName", "nodeUID"]
        .map(|field| immutable(field, "delete the object and make another"))
        .into()
}
