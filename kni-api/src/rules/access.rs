//! Rules of `access`: which fields belong together.

use kube::core::Rule;

use super::rule_at;

/// Rules of the whole.
pub(crate) fn spec() -> Vec<Rule> {
    vec![rule_at(
        ".addressRanges",
        "!has(self.addressRanges) || self.addressRanges.size() == 0 || self.allowAddresses",
        "addressRanges limit the addresses that pods may choose: set allowAddresses to true, or remove them",
    )]
}

/// Rules of the namespaces.
pub(crate) fn namespaces() -> Vec<Rule> {
    vec![
        rule_at(
            ".selector",
            "self.from != 'Selected' || has(self.selector)",
            "from Selected needs a selector: add one, or write All or None",
        ),
        rule_at(
            ".selector",
            "self.from == 'Selected' || !has(self.selector)",
            "selector has a meaning with from Selected only: remove it, or write Selected",
        ),
    ]
}
