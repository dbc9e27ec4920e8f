//! Rules of `EgressPolicy`: ranges inside others, ports, lists that are left out rather than empty.

use kube::core::Rule;

use super::{rule, rule_at};

/// The networks that it is about.
pub(crate) fn network_names() -> Vec<Rule> {
    vec![rule(
        "self.size() > 0",
        "is empty: name a network, or leave the list out for all networks",
    )]
}

/// A destination.
pub(crate) fn destination() -> Vec<Rule> {
    vec![rule_at(
        ".except",
        "!isCIDR(self.cidr) || self.except.all(e, !isCIDR(e) || (e != self.cidr && cidr(self.cidr).containsCIDR(e)))",
        "has a range that is not a part of cidr: remove it, or write a smaller range inside cidr",
    )]
}

/// Ports of a protocol.
pub(crate) fn port() -> Vec<Rule> {
    vec![
        rule_at(
            ".endPort",
            "!has(self.endPort) || has(self.port)",
            "needs a port, the first of the range: add port, or remove endPort",
        ),
        rule_at(
            ".endPort",
            "!has(self.endPort) || !has(self.port) || self.endPort >= self.port",
            "is smaller than port: write the smaller number as port and the larger one as endPort",
        ),
    ]
}
