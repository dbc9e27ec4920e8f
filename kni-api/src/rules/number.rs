//! Rules of `NetworkNumber`: its name is a number of 24 bits, and it belongs to one network for good.

use kube::core::Rule;

use super::rule;

/// The name: two networks with the same number would have the same name, so the API server creates only one of them.
pub(crate) fn name() -> Rule {
    rule(
        "self.metadata.name.matches('^[1-9][0-9]{0,7}$') && int(self.metadata.name) <= 16777215",
        "metadata.name is not a number of a network: write a decimal number from 1 to 16777215 without leading zeros",
    )
}

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    vec![rule(
        "self == oldSelf",
        "the number of a network cannot be changed: kni-controller releases it, and gives another one",
    )]
}
