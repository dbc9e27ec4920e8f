//! Combines the egress policies of an interface into one decision for each port.

use std::sync::Arc;

use kni_model::policy::RuleRef;

use super::{
    body::{Body, External, Ports},
    peer::Peer,
    ports::{Ordinals, PortEntry, PortSet, prefixes},
};

/// A decision and the rule that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision<'a> {
    Allow(&'a Arc<RuleRef>),
    /// Denied by a rule.
    Deny(&'a Arc<RuleRef>),
    /// Denied by default: a policy that denies by default has no matching rule.
    Default(&'a Arc<RuleRef>),
}

/// Decisions for the ports of a protocol: each applies from its port up to the port of the next one.
type Pieces<'a> = Vec<(u32, Decision<'a>)>;

/// One past the last port.
const END: u32 = 65_536;

/// The combined decision of the policies about a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Everything is allowed, by this rule.
    All(Arc<RuleRef>),
    /// The port set decides; its entries name these rules.
    Ports(PortSet, Vec<Arc<RuleRef>>),
    /// Nothing is allowed, by default.
    Nothing,
}

/// The decision of the egress policies among `bodies`, at least one, about an address that these peers match.
pub(super) fn answer(bodies: &[Arc<Body>], peers: &[Arc<Peer>]) -> Answer {
    let policies: Vec<Applied<'_>> = bodies
        .iter()
        .filter_map(|body| body.content.external.as_ref())
        .map(|external| Applied::new(external, peers))
        .collect();
    let mut protocols: Vec<u8> = policies.iter().flat_map(Applied::protocols).collect();
    protocols.sort_unstable();
    protocols.dedup();
    let Some(others) = combined(&policies, None).first().map(|(_, decision)| *decision) else {
        return Answer::Nothing;
    };
    let by_protocol: Vec<(u8, Pieces<'_>)> = protocols
        .into_iter()
        .map(|protocol| (protocol, combined(&policies, Some(protocol))))
        .filter(|(_, pieces)| pieces.iter().any(|(_, decision)| *decision != others))
        .collect();
    if let (Decision::Allow(rule), true) = (others, by_protocol.is_empty()) {
        return Answer::All(Arc::clone(rule));
    }
    let (set, rules) = entries(others, &by_protocol);
    if set.0.is_empty() {
        Answer::Nothing
    } else {
        Answer::Ports(set, rules)
    }
}

fn entries(others: Decision<'_>, by_protocol: &[(u8, Pieces<'_>)]) -> (PortSet, Vec<Arc<RuleRef>>) {
    let mut ordinals = Ordinals::default();
    let mut entries = Vec::new();
    let mut push = |what, decision| {
        let (allow, rule) = match decision {
            Decision::Allow(rule) => (true, rule),
            Decision::Deny(rule) | Decision::Default(rule) => (false, rule),
        };
        entries.push(PortEntry {
            what,
            ordinal: ordinals.of(rule),
            allow,
        });
    };
    let is_silent = matches!(others, Decision::Default(_));
    if !is_silent {
        push(None, others);
    }
    for (protocol, pieces) in by_protocol {
        let ends = pieces.iter().skip(1).map(|(start, _)| *start).chain([END]);
        for ((start, decision), end) in pieces.iter().zip(ends) {
            let is_implied = *decision == others || (is_silent && matches!(decision, Decision::Default(_)));
            if is_implied {
                continue;
            }
            let port = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
            for prefix in prefixes(port(*start), port(end - 1)) {
                push(Some((*protocol, prefix)), *decision);
            }
        }
    }
    (PortSet(entries), ordinals.into_rules())
}

/// The rules of a policy that apply to a peer, in order.
struct Applied<'a> {
    rules: Vec<(&'a Ports, Decision<'a>)>,
    otherwise: Decision<'a>,
}

impl<'a> Applied<'a> {
    fn new(external: &'a External, peers: &[Arc<Peer>]) -> Self {
        let about = |rule: &&'a super::body::Rule| {
            let mut listed = rule.peers.iter();
            rule.peers.is_empty() || listed.any(|peer| peers.binary_search(peer).is_ok())
        };
        let decide = |rule: &'a super::body::Rule| {
            let decision = if rule.allow {
                Decision::Allow(&rule.name)
            } else {
                Decision::Deny(&rule.name)
            };
            (&rule.ports, decision)
        };
        Self {
            rules: external.rules.iter().filter(about).map(decide).collect(),
            otherwise: if external.otherwise_allow {
                Decision::Allow(&external.otherwise)
            } else {
                Decision::Default(&external.otherwise)
            },
        }
    }

    fn protocols(&self) -> impl Iterator<Item = u8> {
        self.rules
            .iter()
            .flat_map(|(ports, _)| match ports {
                Ports::All => [].iter(),
                Ports::Some { ranges, .. } => ranges.iter(),
            })
            .map(|range| range.protocol)
    }

    /// Decisions about a protocol, or with `None` about every protocol that no rule names.
    fn pieces(&self, protocol: Option<u8>) -> Pieces<'a> {
        let mut undecided = vec![(0, END)];
        let mut decided: Vec<(u32, Decision<'a>)> = Vec::new();
        for (ports, decision) in &self.rules {
            let ranges: Vec<(u32, u32)> = match ports {
                Ports::All => vec![(0, END)],
                Ports::Some { ranges, .. } => ranges
                    .iter()
                    .filter(|range| Some(range.protocol) == protocol)
                    .map(|range| (u32::from(range.first), u32::from(range.last) + 1))
                    .filter(|(start, end)| start < end)
                    .collect(),
            };
            for range in ranges {
                take(&mut undecided, range, |start| decided.push((start, *decision)));
            }
            if undecided.is_empty() {
                break;
            }
        }
        decided.extend(undecided.into_iter().map(|(start, _)| (start, self.otherwise)));
        decided.sort_by_key(|(start, _)| *start);
        decided.dedup_by(|later, earlier| later.1 == earlier.1);
        decided
    }
}

/// Removes a range from the sorted `free` ranges and reports the start of each removed piece.
fn take(free: &mut Vec<(u32, u32)>, (start, end): (u32, u32), mut taken: impl FnMut(u32)) {
    let from = free.partition_point(|(_, free_end)| *free_end <= start);
    let count = free
        .iter()
        .skip(from)
        .take_while(|(free_start, _)| *free_start < end)
        .count();
    let mut rest = Vec::new();
    for (free_start, free_end) in free.iter().skip(from).take(count).copied() {
        taken(free_start.max(start));
        if free_start < start {
            rest.push((free_start, start));
        }
        if free_end > end {
            rest.push((end, free_end));
        }
    }
    free.splice(from..from + count, rest);
}

/// Combines the policies: one denial denies, and a denial by a rule takes precedence over a default deny.
fn combined<'a>(policies: &[Applied<'a>], protocol: Option<u8>) -> Pieces<'a> {
    let all = policies.iter().map(|policy| policy.pieces(protocol));
    all.reduce(|one, other| merge(&one, &other)).unwrap_or_default()
}

fn merge<'a>(one: &Pieces<'a>, other: &Pieces<'a>) -> Pieces<'a> {
    let mut starts: Vec<u32> = one.iter().chain(other).map(|(start, _)| *start).collect();
    starts.sort_unstable();
    starts.dedup();
    let (mut one, mut other) = (Cursor::new(one), Cursor::new(other));
    let mut merged: Pieces<'a> = starts
        .into_iter()
        .filter_map(|start| Some((start, stricter(one.at(start)?, other.at(start)?))))
        .collect();
    merged.dedup_by(|later, earlier| later.1 == earlier.1);
    merged
}

fn stricter<'a>(one: Decision<'a>, other: Decision<'a>) -> Decision<'a> {
    let rank = |decision: &Decision<'a>| match decision {
        Decision::Deny(_) => 0,
        Decision::Default(_) => 1,
        Decision::Allow(_) => 2,
    };
    if rank(&other) < rank(&one) { other } else { one }
}

/// Iterates over pieces by ascending port.
struct Cursor<'p, 'a> {
    rest: std::iter::Peekable<std::slice::Iter<'p, (u32, Decision<'a>)>>,
    now: Option<Decision<'a>>,
}

impl<'p, 'a> Cursor<'p, 'a> {
    fn new(pieces: &'p Pieces<'a>) -> Self {
        Self {
            rest: pieces.iter().peekable(),
            now: None,
        }
    }

    fn at(&mut self, port: u32) -> Option<Decision<'a>> {
        while let Some((_, decision)) = self.rest.next_if(|(start, _)| *start <= port) {
            self.now = Some(*decision);
        }
        self.now
    }
}
