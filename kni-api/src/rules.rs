//! Builds the validation rules for the API server, in CEL. Each message describes what to change.

pub(crate) mod access;
pub(crate) mod attachment;
pub(crate) mod block;
pub(crate) mod egress_policy;
pub(crate) mod egress_pool;
pub(crate) mod endpoint;
pub(crate) mod interface;
pub(crate) mod members;
pub(crate) mod number;
pub(crate) mod pod_network;
pub(crate) mod provider;
pub(crate) mod text;

use kube::core::Rule;

/// A rule and what to do about it where it is broken.
pub(crate) fn rule(rule: &str, message: &str) -> Rule {
    Rule::new(rule).message(message)
}

/// A rule of an object about one of its fields.
pub(crate) fn rule_at(field: &str, rule: &str, message: &str) -> Rule {
    self::rule(rule, message).field_path(field)
}

/// The name of a `PodNetwork`, at `name`.
pub(crate) fn network_name(name: &str) -> Rule {
    rule(
        &format!(r"{name}.matches('^[a-z0-9]([-a-z0-9]{{0,48}}[a-z0-9])?$') && {name} != 'none'"),
        "is no name of a PodNetwork: write 1 to 50 of a-z, 0-9 and '-', beginning and ending with a letter or digit, \
         and not none, which in annotations means no network",
    )
}

/// An immutable optional field: it is neither changed, nor added, nor removed.
pub(crate) fn immutable(field: &str, instead: &str) -> Rule {
    rule_at(
        &format!(".{field}"),
        &format!(
            "has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        ),
        &format!("{field} cannot be changed: {instead}"),
    )
}

/// Addresses of which at most one is of each family.
pub(crate) fn one_per_family() -> Rule {
    rule(
        "[4, 6].all(family, self.filter(a, isIP(a) && ip(a).family() == family).size() <= 1)",
        "has two addresses of one family: keep at most one IPv4 and one IPv6 address",
    )
}

/// Ranges none of which overlaps another.
pub(crate) fn no_overlap() -> Rule {
    rule(
        "!self.all(a, isCIDR(a)) || self.all(a, self.all(b, a == b || !cidr(a).containsCIDR(b)))",
        "has ranges that overlap each other: remove one of them, or make them smaller",
    )
}
