//! Holds the desired tables, and notes which of their rows may differ from the current ones.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::policy::{IdentityKey, PolicyKey, PortKey, PortValue};
use kni_model::{EndpointId, PolicyTables};

use super::{prefix::Prefix, row::Rows, set::DIRECTIONS};

/// The rows in which two states of the tables may differ, without endpoints.
#[derive(Debug, Default)]
pub(super) struct Differing {
    /// Any row.
    pub(super) all: bool,
    pub(super) policy: BTreeSet<PolicyKey>,
    pub(super) ports: BTreeSet<PortKey>,
    pub(super) identities: BTreeSet<IdentityKey>,
}

impl Differing {
    /// Any row may differ.
    pub(super) fn all() -> Self {
        Self {
            all: true,
            ..Self::default()
        }
    }
}

/// The desired tables, with data that the tables do not contain.
#[derive(Debug)]
pub(super) struct Desired {
    pub(super) tables: PolicyTables,
    /// Network of each endpoint.
    pub(super) networks: BTreeMap<EndpointId, u32>,
    /// The rows in which they may differ from the current tables.
    pub(super) differing: Differing,
}

impl Default for Desired {
    fn default() -> Self {
        Self {
            tables: PolicyTables::default(),
            networks: BTreeMap::new(),
            differing: Differing::all(),
        }
    }
}

impl Desired {
    /// Writes the rows of a set for an identity.
    pub(super) fn append(&mut self, set: u32, identity: u32, rows: &Rows) {
        for (direction, row) in DIRECTIONS.iter().zip(rows) {
            let Some(row) = *row else { continue };
            let key = row_key(set, identity, direction.code());
            put(&mut self.tables.policy, &mut self.differing.policy, key, row);
        }
    }

    /// Removes the rows of a set for an identity.
    pub(super) fn remove(&mut self, set: u32, identity: u32) {
        for direction in DIRECTIONS {
            self.remove_policy(&row_key(set, identity, direction.code()));
        }
    }

    pub(super) fn remove_policy(&mut self, key: &PolicyKey) {
        take(&mut self.tables.policy, &mut self.differing.policy, key);
    }

    /// The rows of a set for the identities of which `is_one` is true.
    pub(super) fn rows_of(&self, set: u32, is_one: impl Fn(u32) -> bool) -> Vec<PolicyKey> {
        let (first, last) = (row_key(set, 1, 0), row_key(set, u32::MAX, u32::MAX));
        let rows = self.tables.policy.range(first..=last).map(|(key, _)| *key);
        rows.filter(|key| is_one(key.identity)).collect()
    }

    /// Writes the identity of a prefix.
    pub(super) fn put_identity(&mut self, key: IdentityKey, identity: u32) {
        put(
            &mut self.tables.identities,
            &mut self.differing.identities,
            key,
            identity,
        );
    }

    pub(super) fn remove_identity(&mut self, key: &IdentityKey) {
        take(&mut self.tables.identities, &mut self.differing.identities, key);
    }

    /// Writes and removes rows for the differences between the old and the new prefixes of a network; both are sorted.
    pub(super) fn set_prefixes(&mut self, network: u32, before: &[(Prefix, u32)], after: &[(Prefix, u32)]) {
        let mut after = after.iter().peekable();
        for (known, former) in before {
            while let Some((prefix, identity)) = after.next_if(|new| new.0 < *known) {
                self.put_identity(prefix.key(network), *identity);
            }
            match after.next_if(|new| new.0 == *known) {
                None => self.remove_identity(&known.key(network)),
                Some((_, identity)) if identity == former => {}
                Some((prefix, identity)) => self.put_identity(prefix.key(network), *identity),
            }
        }
        for (prefix, identity) in after {
            self.put_identity(prefix.key(network), *identity);
        }
    }

    /// Replaces the rows of the port sets.
    pub(super) fn set_ports(&mut self, rows: BTreeMap<PortKey, PortValue>) {
        let before = std::mem::replace(&mut self.tables.ports, rows);
        self.differing.ports.extend(before.into_keys());
        self.differing.ports.extend(self.tables.ports.keys());
    }

    /// Makes the current tables the same.
    pub(super) fn confirm(&mut self, tables: &mut PolicyTables) {
        let differing = std::mem::take(&mut self.differing);
        if differing.all {
            tables.clone_from(&self.tables);
            return;
        }
        copy(&differing.policy, &self.tables.policy, &mut tables.policy);
        copy(&differing.ports, &self.tables.ports, &mut tables.ports);
        copy(&differing.identities, &self.tables.identities, &mut tables.identities);
        tables.endpoints.clone_from(&self.tables.endpoints);
    }
}

fn put<K: Ord + Copy, V: PartialEq + Copy>(rows: &mut BTreeMap<K, V>, differing: &mut BTreeSet<K>, key: K, value: V) {
    if rows.insert(key, value) != Some(value) {
        differing.insert(key);
    }
}

fn take<K: Ord + Copy, V>(rows: &mut BTreeMap<K, V>, differing: &mut BTreeSet<K>, key: &K) {
    if rows.remove(key).is_some() {
        differing.insert(*key);
    }
}

fn copy<K: Ord + Copy, V: Copy>(keys: &BTreeSet<K>, from: &BTreeMap<K, V>, to: &mut BTreeMap<K, V>) {
    for key in keys {
        match from.get(key) {
            Some(value) => to.insert(*key, *value),
            None => to.remove(key),
        };
    }
}

fn row_key(set: u32, identity: u32, direction: u32) -> PolicyKey {
    PolicyKey {
        set,
        identity,
        direction,
    }
}
