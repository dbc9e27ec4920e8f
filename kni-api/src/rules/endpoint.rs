//! Rules of `NodeEndpoint`: it is about the node of its name, and its addresses can be reached from other nodes.

use kube::core::Rule;

use super::{immutable, one_per_family, rule};

/// The name is that of the node, so a node has one object.
pub(crate) fn name() -> Rule {
    rule(
        "!has(self.spec.nodeName) || self.metadata.name == self.spec.nodeName",
        "metadata.name is not spec.nodeName: the object of a node has the name of the node",
    )
}

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    ["nodeName", "nodeUID"]
        .map(|field| immutable(field, "the object is about another node: delete it and make another"))
        .into()
}

/// Rules of a list of addresses.
pub(crate) fn addresses() -> Vec<Rule> {
    vec![one_per_family()]
}

/// Rules of one address: other nodes compare it as text.
pub(crate) fn address() -> Vec<Rule> {
    vec![rule(
        "!isIP(self) || ip.isCanonical(self)",
        "is not written as the API server prints it: write lower case and the shortest form, such as fd00::1",
    )]
}
