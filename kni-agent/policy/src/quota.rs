//! Decides which namespaces need more rows of the policy tables than their quota, so that their policies are enforced
//! without rules.

mod charges;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use kni_model::{PolicyStep, PolicyTables, policy::PolicyRef};

use self::charges::Charges;
use super::{blocks, desired::Compiler, pods::Pods, prefix::Prefix, row, set::PolicySet};

/// The sizes of the policy tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Rows of each table.
    pub capacity: usize,
    /// Rows of each table that the policies of one namespace may need.
    pub share: usize,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            capacity: usize::MAX,
            share: usize::MAX,
        }
    }
}

impl Quota {
    /// Rows that may be in use while nothing changes. A change needs room for its new rows beside the old ones.
    fn usable(self) -> usize {
        self.capacity - self.capacity / 8
    }
}

/// A table of the dataplane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyTable {
    /// Rows of policy sets.
    Policy,
    /// Rows of port sets.
    Ports,
    /// Prefixes of peers.
    Identities,
}

impl PolicyTable {
    pub(super) const ALL: [Self; 3] = [Self::Policy, Self::Ports, Self::Identities];

    /// Its number of rows, of those by [`Self::ALL`].
    fn of(self, rows: [usize; 3]) -> usize {
        let [policy, ports, identities] = rows;
        match self {
            Self::Policy => policy,
            Self::Ports => ports,
            Self::Identities => identities,
        }
    }
}

impl fmt::Display for PolicyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Policy => "POLICY",
            Self::Ports => "PORTS",
            Self::Identities => "IDENTITIES",
        })
    }
}

/// A namespace whose policies need too many rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overrun {
    /// The namespace.
    pub namespace: String,
    /// The table.
    pub table: PolicyTable,
    /// Rows that its policies need.
    pub rows: usize,
    /// Rows that they may need; `None`: within its quota, but the tables have no room for all namespaces, and it needs
    /// the most.
    pub share: Option<usize>,
    /// Its policy with the most peers.
    pub largest: PolicyRef,
    /// How many that one has.
    pub peers: usize,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            table,
            rows,
            share,
            largest,
            peers,
        } = self;
        write!(
            f,
            "namespace {namespace}: its policies need {rows} rows of table {table}, "
        )?;
        match share {
            Some(share) => write!(f, "and a namespace may have {share} (--max-policy-rows-per-namespace)")?,
            None => f.write_str("and the table has no room for them (--max-policy-rows)")?,
        }
        write!(
            f,
            "; the largest is {largest} with {peers} peers; until they have fewer, they allow nothing to the pods that \
             they select"
        )
    }
}

/// The policy sets of a namespace in use, by network and number.
type Used = BTreeMap<(u32, u32), Arc<PolicySet>>;

/// Decides which namespaces are closed.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    quota: Quota,
    used: BTreeMap<String, Used>,
    ranges: BTreeMap<String, Ranges>,
    closed: BTreeMap<String, Closed>,
    /// Namespaces that were opened since the last change of an input, because others need fewer rows.
    opened: BTreeSet<String>,
}

/// The ranges of a namespace's policies.
#[derive(Debug)]
struct Ranges {
    /// The sets that name them.
    sets: BTreeSet<(u32, u32)>,
    /// Rows that they need, by [`PolicyTable::ALL`].
    needed: [usize; 3],
}

#[derive(Debug)]
struct Closed {
    /// The sets that it had: with others, it may fit.
    sets: BTreeSet<(u32, u32)>,
    overrun: Overrun,
}

impl Limiter {
    pub(super) fn new(quota: Quota) -> Self {
        Self {
            quota,
            ..Self::default()
        }
    }

    /// Whether the policies of a namespace are enforced without rules.
    pub(super) fn is_closed(&self, namespace: &str) -> bool {
        self.closed.contains_key(namespace)
    }

    pub(super) fn overruns(&self) -> impl Iterator<Item = &Overrun> {
        self.closed.values().map(|closed| &closed.overrun)
    }

    /// Whether the tables have no room for the new rows of these steps beside the current ones.
    pub(super) fn overflows(&self, current: &PolicyTables, steps: &[PolicyStep]) -> bool {
        charges::peak(current, steps)
            .into_iter()
            .any(|rows| rows > self.quota.capacity)
    }

    /// Closes the namespaces whose ranges alone exceed the quota, before they are compiled, and opens those that may
    /// fit again. `are_other`: the pods of this node, or their policies, have changed.
    pub(super) fn begin(&mut self, pods: &Pods, are_other: bool) {
        if self.quota == Quota::default() {
            return;
        }
        self.opened.clear();
        if !are_other {
            return;
        }
        self.used = used(pods);
        let used = &self.used;
        self.ranges.retain(|namespace, _| used.contains_key(namespace));
        self.closed
            .retain(|namespace, closed| used.get(namespace).is_some_and(|sets| sets.keys().eq(&closed.sets)));
        let mut exceeding = Vec::new();
        for (namespace, sets) in used {
            let known = self.ranges.get(namespace);
            let needed = match known.filter(|known| sets.keys().eq(&known.sets)) {
                Some(known) => known.needed,
                None => of_ranges(sets),
            };
            let ranges = Ranges {
                sets: sets.keys().copied().collect(),
                needed,
            };
            self.ranges.insert(namespace.clone(), ranges);
            let mut over = PolicyTable::ALL
                .into_iter()
                .zip(needed)
                .filter(|(_, rows)| *rows > self.quota.share);
            exceeding.extend(over.next_back().map(|(table, rows)| (namespace.clone(), table, rows)));
        }
        for (namespace, table, rows) in exceeding {
            self.close(&namespace, table, rows, Some(self.quota.share));
        }
    }

    /// Whether the compiled tables fit. If not, another namespace is closed; if there is room for one that was closed,
    /// that one is opened. Then they must be compiled again.
    pub(super) fn check(&mut self, compiler: &Compiler, desired: &PolicyTables) -> bool {
        if self.quota == Quota::default() {
            return true;
        }
        let totals = charges::totals(desired);
        let charges = Charges {
            used: &self.used,
            compiler,
            desired,
        };
        let above = |limit: usize| {
            PolicyTable::ALL
                .into_iter()
                .zip(totals)
                .filter(move |(_, n)| *n > limit)
        };
        for (table, _) in above(self.quota.share) {
            let own = charges.own(table);
            let over = own
                .into_iter()
                .find(|(namespace, rows)| *rows > self.quota.share && !self.is_closed(namespace));
            if let Some((namespace, rows)) = over {
                self.close(&namespace, table, rows, Some(self.quota.share));
                return false;
            }
        }
        for (table, _) in above(self.quota.usable()) {
            let caused = charges.caused(table, &self.ranges_of(table));
            if let Some((namespace, rows)) = self.largest(caused) {
                self.close(&namespace, table, rows, None);
                return false;
            }
        }
        // At most once each: what a namespace needs is estimated from the rows at the time of its closing.
        let usable = self.quota.usable();
        let fits = |closed: &Closed| {
            let overrun = &closed.overrun;
            overrun.share.is_none() && overrun.table.of(totals).saturating_add(overrun.rows) <= usable
        };
        let open = self
            .closed
            .iter()
            .find(|(name, closed)| fits(closed) && !self.opened.contains(*name));
        if let Some(name) = open.map(|(name, _)| name.clone()) {
            self.closed.remove(&name);
            self.opened.insert(name);
            return false;
        }
        true
    }

    /// The open namespace that needs the most rows.
    fn largest(&self, caused: BTreeMap<String, usize>) -> Option<(String, usize)> {
        let open = caused
            .into_iter()
            .filter(|(namespace, rows)| *rows > 0 && !self.is_closed(namespace));
        open.max_by(|one, other| (one.1, &other.0).cmp(&(other.1, &one.0)))
    }

    fn ranges_of(&self, table: PolicyTable) -> BTreeMap<String, usize> {
        let all = self.ranges.iter();
        all.map(|(namespace, ranges)| (namespace.clone(), table.of(ranges.needed)))
            .collect()
    }

    fn close(&mut self, namespace: &str, table: PolicyTable, rows: usize, share: Option<usize>) {
        let Some(sets) = self.used.get(namespace) else {
            return;
        };
        let bodies = sets.values().flat_map(|set| set.content.bodies());
        let sizes = bodies.map(|body| (body.rules().map(|rule| rule.peers.len()).sum::<usize>(), body));
        let Some((peers, largest)) = sizes.max_by(|one, other| {
            let name = |body: &super::body::Body| body.content.reference.clone();
            (one.0, name(other.1)).cmp(&(other.0, name(one.1)))
        }) else {
            return;
        };
        let overrun = Overrun {
            namespace: namespace.to_owned(),
            table,
            rows,
            share,
            largest: largest.content.reference.clone(),
            peers,
        };
        let sets = sets.keys().copied().collect();
        self.closed.insert(namespace.to_owned(), Closed { sets, overrun });
    }
}

/// The policy sets in use, by namespace.
fn used(pods: &Pods) -> BTreeMap<String, Used> {
    let mut used: BTreeMap<String, Used> = BTreeMap::new();
    for (_, _, interface, selected) in pods.local() {
        let Some(set) = &selected.set else { continue };
        let namespace = set.content.namespace();
        if !used.contains_key(namespace) {
            used.insert(namespace.to_owned(), Used::new());
        }
        if let Some(sets) = used.get_mut(namespace) {
            let key = (interface.network_id.get(), set.number);
            sets.entry(key).or_insert_with(|| Arc::clone(set));
        }
    }
    used
}

/// Rows that the ranges of these sets need, whatever else is in the tables: never more than the compiled tables have.
fn of_ranges(sets: &Used) -> [usize; 3] {
    let mut prefixes: BTreeMap<u32, Vec<Prefix>> = BTreeMap::new();
    let mut rows = 0;
    for ((network, _), set) in sets {
        let edges = set.peers.iter().flat_map(|peer| blocks::edges(peer));
        prefixes.entry(*network).or_default().extend(edges);
        rows += row::of_ranges(set);
    }
    let identities = prefixes.into_values().map(|mut edges| {
        edges.sort_unstable();
        edges.dedup();
        edges.len()
    });
    [rows, 0, identities.sum()]
}
