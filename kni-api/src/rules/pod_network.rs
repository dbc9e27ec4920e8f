//! Rules of `PodNetwork`: fields that mean nothing beside others, ranges that have to lie inside or beside others, and
//! what cannot change.

use kube::core::Rule;

use super::{immutable, rule, rule_at};

/// The kind of provider, also where it is left out.
const PROVIDER: &str = "(has(self.provider) ? self.provider.type : 'Ebpf')";
/// Every range of the network can be read; otherwise the ranges have been refused one by one already.
const READABLE: &str = "self.subnets.all(s, isCIDR(s)) && self.excludeSubnets.all(s, isCIDR(s)) && \
                        self.serviceSubnets.all(s, isCIDR(s))";
const ANOTHER: &str = "make another network and move the pods there";

/// The name of a network.
pub(crate) fn name() -> Rule {
    super::network_name("self.metadata.name")
}

/// Rules of the whole spec.
pub(crate) fn spec() -> Vec<Rule> {
    [ranges(), egress(), meaningless(), blocks(), access(), changes()].concat()
}

/// The subnets, as a list.
pub(crate) fn subnets() -> Vec<Rule> {
    vec![
        super::no_overlap(),
        rule(
            "oldSelf.all(s, s in self)",
            "subnets can be added, but not removed or changed: keep those that were there, or make another network and \
             move the pods there",
        ),
    ]
}

/// An immutable field with a default.
pub(crate) fn constant(field: &str) -> Vec<Rule> {
    vec![rule(
        "self == oldSelf",
        &format!("{field} cannot be changed: {ANOTHER}"),
    )]
}

/// The addresses of the egress.
pub(crate) fn egress_addresses() -> Vec<Rule> {
    vec![rule_at(
        ".addresses",
        "self.addresses.size() == 0 || (has(self.mode) && self.mode == 'Masquerade')",
        "addresses have a meaning with mode Masquerade only: remove them, or set mode to Masquerade",
    )]
}

fn ranges() -> Vec<Rule> {
    vec![
        rule_at(
            ".subnets",
            &format!("self.subnets.size() > 0 || {PROVIDER} != 'Ebpf'"),
            "is empty: add a range that pods get their addresses from, such as 10.10.0.0/16",
        ),
        rule_at(
            ".excludeSubnets",
            &format!("!({READABLE}) || self.excludeSubnets.all(e, self.subnets.exists(s, cidr(s).containsCIDR(e)))"),
            "has a range that is not inside any of the subnets: remove it, or write a part of a subnet",
        ),
        rule_at(
            ".serviceSubnets",
            &format!(
                "!({READABLE}) || self.serviceSubnets.all(v, self.subnets.all(s, !cidr(s).containsCIDR(v) && \
                 !cidr(v).containsCIDR(s)))"
            ),
            "has a range that overlaps a subnet: choose ranges outside the subnets",
        ),
        rule_at(
            ".provider.gateways",
            "!has(self.provider) || !has(self.provider.gateways) || self.provider.gateways.all(g, !isIP(g) || \
             self.subnets.exists(s, isCIDR(s) && cidr(s).containsIP(g)))",
            "has an address that is not inside any of the subnets: remove it, or add the subnet",
        ),
    ]
}

fn egress() -> Vec<Rule> {
    vec![
        rule_at(
            ".egress.mode",
            "self.default || !has(self.egress) || !has(self.egress.mode) || self.egress.mode != 'Route'",
            "Route is for the default network, as others may use the same addresses and no answer would come back: \
             write Masquerade or None",
        ),
        rule_at(
            ".egress.addresses",
            "!has(self.egress) || self.egress.addresses.all(a, !isIP(a) || (self.subnets.all(s, !isCIDR(s) || \
             !cidr(s).containsIP(a)) && self.serviceSubnets.all(s, !isCIDR(s) || !cidr(s).containsIP(a))))",
            "has an address inside the network's own ranges, so that no answer would come back: choose one outside \
             subnets and serviceSubnets",
        ),
    ]
}

fn meaningless() -> Vec<Rule> {
    let ebpf_only = |field: &str, absent: &str| {
        rule_at(
            &format!(".{field}"),
            &format!("{PROVIDER} == 'Ebpf' || {absent}"),
            &format!("{field} has a meaning with provider Ebpf only: remove it"),
        )
    };
    let not_cni = |field: &str, absent: &str| {
        rule_at(
            &format!(".{field}"),
            &format!("{PROVIDER} != 'CNI' || {absent}"),
            &format!("{field} has no meaning with provider CNI, as plugins assign the addresses: remove it"),
        )
    };
    vec![
        ebpf_only("egress", "!has(self.egress)"),
        ebpf_only("serviceSubnets", "self.serviceSubnets.size() == 0"),
        ebpf_only("xdp", "!self.xdp"),
        ebpf_only("fabric", "!has(self.fabric)"),
        not_cni("excludeSubnets", "self.excludeSubnets.size() == 0"),
        not_cni("perNodePrefix", "!has(self.perNodePrefix)"),
        not_cni("extendedResource", "!self.extendedResource"),
        rule_at(
            ".default",
            &format!("!self.default || {PROVIDER} in ['Ebpf', 'CNI']"),
            "the node has to reach the pods of the default network: use provider Ebpf or CNI, or set default to false",
        ),
        rule_at(
            ".namespaceSelector",
            "!self.default || !has(self.namespaceSelector)",
            "the default network takes the pods of every namespace that no other network selects: remove \
             namespaceSelector, or set default to false",
        ),
    ]
}

fn blocks() -> Vec<Rule> {
    let fits = |field: &str, family: u8| {
        rule_at(
            &format!(".perNodePrefix.{field}"),
            &format!(
                "!has(self.perNodePrefix) || !has(self.perNodePrefix.{field}) || self.subnets.all(s, !isCIDR(s) || \
                 cidr(s).ip().family() != {family} || cidr(s).prefixLength() <= self.perNodePrefix.{field})"
            ),
            "a block is a part of a subnet: choose a number not smaller than the prefix length of each subnet of the \
             family",
        )
    };
    vec![fits("ipv4", 4), fits("ipv6", 6)]
}

/// Objects that were there before these rules stay valid until their spec changes.
fn access() -> Vec<Rule> {
    vec![
        rule_at(
            ".access",
            &format!("{PROVIDER} == 'Ebpf' || (has(self.access) && has(self.access.namespaces))"),
            "the provider hands out devices of the node: name the namespaces that may join in access.namespaces, such as \
             {from: Selected, selector: {matchLabels: {team: storage}}}",
        ),
        rule_at(
            ".access.addressRanges",
            "!has(self.access) || !has(self.access.addressRanges) || self.access.addressRanges.all(r, !isCIDR(r) || \
             self.subnets.exists(s, isCIDR(s) && cidr(s).containsCIDR(r)))",
            "has a range that is not inside any of the subnets: remove it, or write a part of a subnet",
        ),
        rule_at(
            ".access.lockNamespaces",
            "!has(self.access) || !self.access.lockNamespaces || self.default || has(self.namespaceSelector)",
            "only a network that is the primary one of namespaces can lock them: add namespaceSelector, or remove \
             lockNamespaces",
        ),
    ]
}

fn changes() -> Vec<Rule> {
    vec![
        rule_at(
            ".provider",
            "has(self.provider) && self.provider.type != 'Ebpf' ? has(oldSelf.provider) && self.provider == \
             oldSelf.provider : !has(oldSelf.provider) || oldSelf.provider.type == 'Ebpf'",
            &format!("provider cannot be changed: {ANOTHER}"),
        ),
        immutable("perNodePrefix", ANOTHER),
    ]
}
