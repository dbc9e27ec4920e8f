//! Counts the rows of the compiled tables by the namespaces whose policies cause them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kni_common::policy::PORTS_ALL;
use kni_model::{PolicyStep, PolicyTables};

use super::{PolicyTable, Used};
use crate::desired::Compiler;

/// The compiled tables and the policy sets in use.
pub(super) struct Charges<'a> {
    pub(super) used: &'a BTreeMap<String, Used>,
    pub(super) compiler: &'a Compiler,
    pub(super) desired: &'a PolicyTables,
}

/// Rows by namespace.
type Rows = BTreeMap<String, usize>;

impl<'a> Charges<'a> {
    /// Rows that the policies of each namespace need, without those that exist only because other namespaces divide the
    /// same ranges.
    pub(super) fn own(&self, table: PolicyTable) -> Rows {
        let of_set = self.namespaces();
        match table {
            PolicyTable::Policy => {
                let mut own: BTreeMap<&str, usize> = BTreeMap::new();
                let mut narrowest = HashMap::new();
                for key in self.desired.policy.keys() {
                    let Some(namespace) = of_set.get(&key.set) else {
                        continue;
                    };
                    let owners = narrowest
                        .entry(key.identity)
                        .or_insert_with(|| self.owners(key.identity, &of_set));
                    if owners.is_empty() || owners.contains(namespace) {
                        *own.entry(namespace).or_default() += 1;
                    }
                }
                named(own)
            }
            PolicyTable::Ports => self.ports(&of_set),
            // The ranges of a namespace are known before they are compiled.
            PolicyTable::Identities => Rows::new(),
        }
    }

    /// Rows that exist because of each namespace: a row about a part of a range counts for the namespaces that name
    /// this part. `ranges`: rows that the ranges of a namespace need at least.
    pub(super) fn caused(&self, table: PolicyTable, ranges: &Rows) -> Rows {
        let of_set = self.namespaces();
        match table {
            PolicyTable::Policy => {
                let mut caused: BTreeMap<&str, usize> = BTreeMap::new();
                let mut narrowest = HashMap::new();
                for key in self.desired.policy.keys() {
                    let owners = narrowest
                        .entry(key.identity)
                        .or_insert_with(|| self.owners(key.identity, &of_set));
                    let own = of_set.get(&key.set).filter(|_| owners.is_empty());
                    for namespace in owners.iter().chain(own) {
                        *caused.entry(namespace).or_default() += 1;
                    }
                }
                named(caused)
            }
            PolicyTable::Ports => self.ports(&of_set),
            PolicyTable::Identities => {
                let mut caused: BTreeMap<&str, usize> = BTreeMap::new();
                for identity in self.desired.identities.values() {
                    let sets = self.compiler.referring(*identity);
                    let namespaces = sets.iter().filter_map(|set| of_set.get(set).copied());
                    for namespace in namespaces.collect::<BTreeSet<&str>>() {
                        *caused.entry(namespace).or_default() += 1;
                    }
                }
                let mut caused = named(caused);
                for (namespace, rows) in ranges {
                    let known = caused.entry(namespace.clone()).or_default();
                    *known = (*known).max(*rows);
                }
                caused
            }
        }
    }

    fn namespaces(&self) -> HashMap<u32, &'a str> {
        let all = self.used.iter();
        all.flat_map(|(namespace, sets)| sets.keys().map(move |(_, set)| (*set, namespace.as_str())))
            .collect()
    }

    /// The namespaces that name the narrowest range of an identity.
    fn owners(&self, identity: u32, of_set: &HashMap<u32, &'a str>) -> BTreeSet<&'a str> {
        let sets = self.compiler.narrowest(identity).iter();
        sets.filter_map(|set| of_set.get(set).copied()).collect()
    }

    fn ports(&self, of_set: &HashMap<u32, &'a str>) -> Rows {
        let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
        for key in self.desired.ports.keys() {
            *sizes.entry(u32::from_be_bytes(key.data.ports)).or_default() += 1;
        }
        let rows = self.desired.policy.iter();
        let used: BTreeSet<(&str, u32)> = rows
            .filter(|(_, row)| row.ports > PORTS_ALL)
            .filter_map(|(key, row)| Some((*of_set.get(&key.set)?, row.ports)))
            .collect();
        let mut needed: BTreeMap<&str, usize> = BTreeMap::new();
        for (namespace, ports) in used {
            *needed.entry(namespace).or_default() += sizes.get(&ports).copied().unwrap_or(0);
        }
        named(needed)
    }
}

/// The numbers of rows, by [`PolicyTable::ALL`].
pub(super) fn totals(tables: &PolicyTables) -> [usize; 3] {
    [tables.policy.len(), tables.ports.len(), tables.identities.len()]
}

/// The numbers of rows after all new rows of these steps were written, and before any is removed.
pub(super) fn peak(current: &PolicyTables, steps: &[PolicyStep]) -> [usize; 3] {
    let [mut policy, mut ports, mut identities] = totals(current);
    for step in steps {
        match step {
            PolicyStep::PutPolicy(rows) => policy += missing(rows, |key| current.policy.contains_key(key)),
            PolicyStep::PutPorts(rows) => ports += missing(rows, |key| current.ports.contains_key(key)),
            PolicyStep::PutIdentities(rows) => identities += missing(rows, |key| current.identities.contains_key(key)),
            PolicyStep::Enforce(_)
            | PolicyStep::RemoveIdentities(_)
            | PolicyStep::RemovePolicy(_)
            | PolicyStep::RemovePorts(_) => {}
        }
    }
    [policy, ports, identities]
}

fn missing<K, V>(rows: &[(K, V)], known: impl Fn(&K) -> bool) -> usize {
    rows.iter().filter(|(key, _)| !known(key)).count()
}

fn named(rows: BTreeMap<&str, usize>) -> Rows {
    rows.into_iter().map(|(name, rows)| (name.to_owned(), rows)).collect()
}
