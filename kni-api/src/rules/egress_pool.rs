//! Rules of `EgressAddressPool` and `EgressAddressClaim`: ranges of usable addresses, one kind of user.

use kube::core::Rule;

use super::{no_overlap, rule, rule_at};

/// The ranges of a pool.
pub(crate) fn ranges() -> Vec<Rule> {
    vec![
        no_overlap(),
        rule(
            "self.all(r, !isCIDR(r) || cidr(r).prefixLength() >= (cidr(r).ip().family() == 4 ? 16 : 64))",
            "has a range larger than /16 or, for IPv6, /64: list the addresses that are routed to the nodes only",
        ),
        rule(
            "self.all(r, !isCIDR(r) || cidr(r).ip().isGlobalUnicast())",
            "has a range of loopback, link-local, multicast or unspecified addresses: remove it",
        ),
    ]
}

/// Who uses a claimed address.
pub(crate) fn user() -> Vec<Rule> {
    vec![rule(
        "has(self.egressPolicy) != has(self.podNetworkName)",
        "names no user, or two: write either egressPolicy or podNetworkName",
    )]
}

/// An address that stays what it is.
pub(crate) fn address() -> Vec<Rule> {
    vec![rule_at(
        ".address",
        "self.address == oldSelf.address",
        "address cannot be changed: the name of the claim is made of it",
    )]
}
