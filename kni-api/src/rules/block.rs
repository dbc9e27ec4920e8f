//! Rules of `AddressBlock`: its name is its range, and it belongs to one node of one network for good. Only the UID of
//! the node may change: that of a node that was registered again under its name.

use kube::core::Rule;

use super::{rule, rule_at};

/// The name of a block. Blocks of one network with the same range have the same name, so the API server creates only
/// one of them.
pub(crate) fn name() -> Rule {
    rule(
        "!has(self.spec.cidr) || !isCIDR(self.spec.cidr) || self.metadata.name == self.spec.network + \
         (cidr(self.spec.cidr).ip().family() == 4 ? '.v4-' : '.v6-') + self.spec.cidr.replace('.', \
         '-').replace(':', '-').replace('/', '-')",
        "metadata.name is not that of the range: write NETWORK.v4-RANGE or NETWORK.v6-RANGE, the range with '-' in \
         place of '.', ':' and '/', such as blue.v4-10-10-0-64-26",
    )
}

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    vec![
        rule(
            "self.network == oldSelf.network && self.networkUID == oldSelf.networkUID && self.cidr == oldSelf.cidr && \
             self.nodeName == oldSelf.nodeName",
            "an address block cannot be changed, except for nodeUID: its node releases it, and another node claims it \
             anew",
        ),
        rule_at(
            ".cidr",
            "!isCIDR(self.cidr) || string(cidr(self.cidr)) == self.cidr",
            "is not written as the API server prints it: write lower case and the shortest form, such as fd10::40/122",
        ),
    ]
}
