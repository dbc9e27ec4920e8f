//! Computes the rows of a policy set for an identity.

use std::{collections::BTreeSet, sync::Arc};

use kni_common::policy::{PORTS_ALL, PORTS_NONE, PolicyValue};
use kni_model::policy::{PolicyDirection, RuleRef};

use super::{
    blocks,
    body::Rule,
    external::{self, Answer},
    identity::Identity,
    peer::Peer,
    ports::{PortRange, PortSet, allowing},
    prefix::Prefix,
    set::{ALLOWING, DIRECTIONS, PolicySet},
    stable::Interner,
};

/// First number of a port set: the others have a meaning of their own.
const FIRST_PORTS: u32 = 2;

/// Rows by direction.
pub(super) type Rows = [Option<PolicyValue>; 3];

/// The rules and port sets that rows refer to.
#[derive(Debug)]
pub(super) struct References {
    pub(super) ports: Interner<PortSet>,
    pub(super) rules: Interner<Vec<Arc<RuleRef>>>,
}

impl Default for References {
    fn default() -> Self {
        Self {
            ports: Interner::new(FIRST_PORTS),
            rules: Interner::new(1),
        }
    }
}

impl References {
    fn all(&mut self, rule: Arc<RuleRef>) -> PolicyValue {
        PolicyValue {
            ports: PORTS_ALL,
            rule: self.rules.intern(vec![rule]),
        }
    }

    fn some(&mut self, ports: PortSet, rules: Vec<Arc<RuleRef>>) -> PolicyValue {
        PolicyValue {
            ports: self.ports.intern(ports),
            rule: self.rules.intern(rules),
        }
    }
}

/// The wildcard rows: for peers that have none of their own.
pub(super) fn for_wildcard(set: &PolicySet, references: &mut References) -> Rows {
    DIRECTIONS.map(|direction| match direction {
        PolicyDirection::Egress | PolicyDirection::Ingress if !set.isolates(direction) => Some(UNRESTRICTED),
        PolicyDirection::Egress | PolicyDirection::Ingress => {
            let rules = set
                .wildcard(direction)
                .map(|rule| (rule, resolved(set, None, direction, rule)));
            union(rules.collect(), references)
        }
        PolicyDirection::External => external_row(set, None, references),
    })
}

/// The rows for an identity, where they differ from the wildcard rows.
pub(super) fn for_identity(set: &PolicySet, identity: &Identity, all: &Rows, references: &mut References) -> Rows {
    let mut rows = DIRECTIONS.map(|direction| match direction {
        PolicyDirection::Egress | PolicyDirection::Ingress => allow_row(set, identity, direction, references),
        PolicyDirection::External if set.is_external(&identity.peers) => {
            let row = external_row(set, Some(identity), references);
            Some(row.unwrap_or(NOTHING))
        }
        PolicyDirection::External => None,
    });
    for (row, all) in rows.iter_mut().zip(all) {
        if row == all || (*row == Some(NOTHING) && all.is_none()) {
            *row = None;
        }
    }
    rows
}

/// The number of rows that the ranges of a set have at least, whatever other sets name: one for each range whose rules
/// cannot give the wildcard row.
pub(super) fn of_ranges(set: &PolicySet) -> usize {
    let allowing = ALLOWING.map(|direction| {
        let ports = |rule: &Rule| resolved(set, None, direction, rule);
        let allows_all = set.wildcard(direction).any(|rule| ports(rule).is_none());
        let differs = |rule: &Rule| ports(rule).is_none_or(|ports| !allows_all && !ports.is_empty());
        let of_peer = |peer: &Arc<Peer>| set.specific(direction, std::slice::from_ref(peer));
        wholes(
            set.named(direction)
                .filter(|peer| of_peer(peer).into_iter().any(differs)),
        )
    });
    let mut policies = set
        .content
        .bodies()
        .iter()
        .filter_map(|body| body.content.external.as_ref());
    // Several egress policies can deny what the rules of one allow.
    let only = policies.next().filter(|_| policies.next().is_none());
    let rules = only.into_iter().flat_map(|external| &external.rules);
    // A rule about everything can decide all that later rules would.
    let first = rules.take_while(|rule| !rule.peers.is_empty()).filter(|rule| {
        let ports = resolved(set, None, PolicyDirection::External, rule);
        ports.is_none_or(|ports| !ports.is_empty())
    });
    allowing.into_iter().sum::<usize>() + wholes(first.flat_map(|rule| &rule.peers))
}

/// The number of distinct ranges among these peers.
fn wholes<'a>(peers: impl Iterator<Item = &'a Arc<Peer>>) -> usize {
    let distinct: BTreeSet<Prefix> = peers.filter_map(|peer| blocks::whole(peer)).collect();
    distinct.len()
}

/// The row of a direction in which no policy isolates.
pub(super) const UNRESTRICTED: PolicyValue = PolicyValue {
    ports: PORTS_ALL,
    rule: 0,
};

/// A row that denies, which is equivalent to no row.
pub(super) const NOTHING: PolicyValue = PolicyValue {
    ports: PORTS_NONE,
    rule: 0,
};

/// A rule and the ports that it allows; `None`: all.
type Opened<'a> = (&'a Rule, Option<Vec<PortRange>>);

fn allow_row(
    set: &PolicySet,
    identity: &Identity,
    direction: PolicyDirection,
    references: &mut References,
) -> Option<PolicyValue> {
    let resolve = |rule| (rule, resolved(set, Some(identity), direction, rule));
    let opens = |(_, ports): &Opened<'_>| ports.as_ref().is_none_or(|ports| !ports.is_empty());
    let mut rules: Vec<Opened<'_>> = set
        .specific(direction, &identity.peers)
        .into_iter()
        .map(resolve)
        .collect();
    rules.retain(opens);
    let wildcard: Vec<Opened<'_>> = set.wildcard(direction).map(resolve).collect();
    let by_name = direction == PolicyDirection::Egress
        && wildcard
            .iter()
            .any(|rule| !rule.0.ports.named().is_empty() && opens(rule));
    if rules.is_empty() && !by_name {
        return None;
    }
    rules.extend(wildcard);
    union(rules, references)
}

/// The ports of a rule; names are resolved with the ports of the receiver.
fn resolved(
    set: &PolicySet,
    peer: Option<&Identity>,
    direction: PolicyDirection,
    rule: &Rule,
) -> Option<Vec<PortRange>> {
    let names = match direction {
        PolicyDirection::Ingress => set.own_names(),
        PolicyDirection::Egress => peer.map_or(&[][..], |peer| &peer.names),
        PolicyDirection::External => &[],
    };
    rule.ports.resolve(names)
}

fn union(rules: Vec<Opened<'_>>, references: &mut References) -> Option<PolicyValue> {
    if let Some((rule, _)) = rules.iter().find(|(_, ports)| ports.is_none()) {
        return Some(references.all(Arc::clone(&rule.name)));
    }
    let ranges = rules
        .into_iter()
        .map(|(rule, ports)| (&rule.name, ports.unwrap_or_default()));
    let (ports, rules) = allowing(ranges);
    if rules.is_empty() {
        None
    } else {
        Some(references.some(ports, rules))
    }
}

fn external_row(set: &PolicySet, identity: Option<&Identity>, references: &mut References) -> Option<PolicyValue> {
    let bodies = set.content.bodies();
    if bodies.iter().all(|body| body.content.external.is_none()) {
        return Some(UNRESTRICTED);
    }
    let peers = identity.map_or(&[][..], |identity| &identity.peers);
    match external::answer(bodies, peers) {
        Answer::All(rule) => Some(references.all(rule)),
        Answer::Ports(ports, rules) => Some(references.some(ports, rules)),
        Answer::Nothing => None,
    }
}
