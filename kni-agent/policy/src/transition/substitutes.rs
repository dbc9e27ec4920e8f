//! Computes the rows for the intermediate states: decisions of removed sets about new identities, and substitutes where
//! these decisions conflict.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::policy::{IDENTITY_ANY, PolicyKey, PolicyValue};
use kni_model::{EndpointId, PolicyTables};

use super::carriers::{Carriers, MovedEndpoint, carried};
use crate::{
    row::{NOTHING, UNRESTRICTED},
    set::DIRECTIONS,
    stable,
};

/// The decision of a set about an identity in each direction.
type Decisions = [PolicyValue; 3];

/// The substitutes of a plan and the rows for the intermediate states.
#[derive(Debug, Default)]
pub(super) struct Substitutes {
    pub(super) rows: BTreeMap<PolicyKey, PolicyValue>,
    /// By network, old and new identity.
    identities: BTreeMap<(u32, u32, u32), u32>,
    /// By network, old and new set.
    sets: BTreeMap<(u32, u32, u32), u32>,
    /// Substitute sets, each with the set that it replaces.
    pub(super) named: Vec<(u32, u32)>,
}

/// A set that endpoints leave: its number during the transition, and the set that provides its rows.
type Leaving = (u32, u32);

struct Between<'a> {
    from: &'a PolicyTables,
    to: &'a PolicyTables,
    network: u32,
    moves: &'a BTreeSet<(u32, u32)>,
    taken: BTreeSet<u32>,
    found: &'a mut Substitutes,
}

impl Substitutes {
    pub(super) fn new(
        from: &PolicyTables,
        to: &PolicyTables,
        networks: &BTreeMap<EndpointId, u32>,
        carriers: &Carriers,
    ) -> Self {
        let mut found = Self::default();
        if carriers.is_single() {
            return found;
        }
        for (network, moves) in &carriers.moves() {
            let none = BTreeSet::new();
            let sets = carriers.sets.get(network).unwrap_or(&none);
            if moves.is_empty() || sets.iter().all(|(old, new)| old == new || *old == 0) {
                continue;
            }
            let mut between = Between {
                from,
                to,
                network: *network,
                moves,
                taken: taken(from, to),
                found: &mut found,
            };
            let staying: BTreeSet<u32> = sets.iter().map(|(_, new)| *new).filter(|set| *set != 0).collect();
            let mut leaving: Vec<Leaving> = between.leavers(sets, &staying);
            let old: BTreeSet<u32> = sets.iter().map(|(old, _)| *old).filter(|set| *set != 0).collect();
            leaving.extend(old.difference(&staying).map(|set| (*set, *set)));
            if !leaving.is_empty() {
                between.identities(&leaving, &staying, &carried(from, networks, *network));
            }
        }
        found
    }

    /// The identity to use while sets change.
    pub(super) fn identity(&self, network: u32, old: u32, new: u32) -> u32 {
        self.identities.get(&(network, old, new)).copied().unwrap_or(new)
    }

    /// The substitute set to switch to before identities change, if any.
    pub(super) fn leaving(&self, moved: &MovedEndpoint) -> Option<u32> {
        let old = moved.old?.policy;
        self.sets.get(&(moved.network, old, moved.new.policy)).copied()
    }
}

impl Between<'_> {
    /// Endpoints that leave a set that other endpoints keep must not see the set's rows for new identities, unless
    /// these decisions are the same as before or after.
    fn leavers(&mut self, sets: &BTreeSet<(u32, u32)>, staying: &BTreeSet<u32>) -> Vec<Leaving> {
        let mut leaving = Vec::new();
        let mut copies: BTreeMap<u32, u32> = BTreeMap::new();
        for (old, new) in sets.iter().filter(|(old, new)| old != new && staying.contains(old)) {
            let has_third_decision = self.moves.iter().any(|(before, after)| {
                let between = decisions(self.to, *old, *after);
                let then = decisions(self.from, *old, *before)
                    .into_iter()
                    .zip(decisions(self.to, *new, *after));
                between
                    .into_iter()
                    .zip(then)
                    .any(|(between, (before, after))| between != before && between != after)
            });
            if !has_third_decision {
                continue;
            }
            let copy = *copies.entry(*old).or_insert_with(|| {
                let copy = stable::number(&("leaving", old), 1, |number| self.taken.contains(&number));
                self.taken.insert(copy);
                let (first, last) = (row_key(*old, 0, 0), row_key(*old, u32::MAX, u32::MAX));
                for (key, value) in self.from.policy.range(first..=last) {
                    self.found.rows.insert(PolicyKey { set: copy, ..*key }, *value);
                }
                self.found.named.push((copy, *old));
                leaving.push((copy, *old));
                copy
            });
            self.found.sets.insert((self.network, *old, *new), copy);
        }
        leaving
    }

    /// Gives the removed sets the rows of the old identity for the new identity.
    fn identities(&mut self, leaving: &[Leaving], staying: &BTreeSet<u32>, carried: &BTreeSet<u32>) {
        let mut answers: BTreeMap<u32, Vec<Decisions>> = BTreeMap::new();
        for (old, new) in self.moves {
            let previous = self.previous(leaving, *old);
            let is_known = *new == IDENTITY_ANY
                || carried.contains(new)
                || leaving.iter().any(|(set, _)| has_rows(self.from, *set, *new));
            let known = answers
                .entry(*new)
                .or_insert_with(|| if is_known { Vec::new() } else { previous.clone() });
            if known.is_empty() {
                *known = leaving
                    .iter()
                    .map(|(_, source)| decisions(self.from, *source, *new))
                    .collect();
            }
            if *known == previous {
                self.alias(leaving, *new, &previous);
            } else {
                self.substitute(leaving, staying, (*old, *new), &previous);
            }
        }
    }

    fn previous(&self, leaving: &[Leaving], identity: u32) -> Vec<Decisions> {
        leaving
            .iter()
            .map(|(_, source)| decisions(self.from, *source, identity))
            .collect()
    }

    fn substitute(
        &mut self,
        leaving: &[Leaving],
        staying: &BTreeSet<u32>,
        (old, new): (u32, u32),
        previous: &[Decisions],
    ) {
        let content = ("moving", self.network, old, new);
        let number = stable::number(&content, 1, |number| self.taken.contains(&number));
        self.taken.insert(number);
        self.found.identities.insert((self.network, old, new), number);
        self.alias(leaving, number, previous);
        for set in staying {
            for direction in DIRECTIONS {
                let row = self.to.policy.get(&row_key(*set, new, direction.code()));
                if let Some(row) = row.filter(|_| new != IDENTITY_ANY) {
                    self.found.rows.insert(row_key(*set, number, direction.code()), *row);
                }
            }
        }
    }

    /// Writes rows that give the removed sets the decisions about another identity for this one.
    fn alias(&mut self, leaving: &[Leaving], identity: u32, previous: &[Decisions]) {
        if identity == IDENTITY_ANY {
            return;
        }
        for ((set, source), previous) in leaving.iter().zip(previous) {
            let now = decisions(self.from, *source, identity);
            for (direction, (previous, now)) in DIRECTIONS.into_iter().zip(previous.iter().zip(now)) {
                let key = row_key(*set, identity, direction.code());
                if *previous != now {
                    self.found.rows.insert(key, *previous);
                }
            }
        }
    }
}

fn row_key(set: u32, identity: u32, direction: u32) -> PolicyKey {
    PolicyKey {
        set,
        identity,
        direction,
    }
}

fn has_rows(tables: &PolicyTables, set: u32, identity: u32) -> bool {
    let mut directions = DIRECTIONS.into_iter();
    directions.any(|direction| tables.policy.contains_key(&row_key(set, identity, direction.code())))
}

fn decisions(tables: &PolicyTables, set: u32, identity: u32) -> Decisions {
    DIRECTIONS.map(|direction| {
        if set == 0 {
            return UNRESTRICTED;
        }
        let row = |identity| tables.policy.get(&row_key(set, identity, direction.code())).copied();
        row(identity).or_else(|| row(IDENTITY_ANY)).unwrap_or(NOTHING)
    })
}

/// Numbers of sets and identities that are in use before or after.
fn taken(from: &PolicyTables, to: &PolicyTables) -> BTreeSet<u32> {
    let mut taken = BTreeSet::new();
    for tables in [from, to] {
        taken.extend(tables.policy.keys().flat_map(|key| [key.set, key.identity]));
        taken.extend(tables.identities.values());
        taken.extend(
            tables
                .endpoints
                .values()
                .flat_map(|e| [e.policy, e.identity4, e.identity6]),
        );
    }
    taken
}
