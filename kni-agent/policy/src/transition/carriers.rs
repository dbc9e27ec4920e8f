//! Collects the endpoints and the external prefixes whose set or identity changes.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::policy::IdentityKey;
use kni_model::{EndpointId, Enforcement, PolicyTables};

use super::{Difference, Unconfirmed, around::Around};
use crate::prefix::parts;

/// An endpoint whose row changes.
#[derive(Debug)]
pub(super) struct MovedEndpoint {
    pub(super) id: EndpointId,
    pub(super) network: u32,
    /// `None`: the endpoint is new.
    pub(super) old: Option<Enforcement>,
    pub(super) new: Enforcement,
    pub(super) is_unconfirmed: bool,
}

/// A prefix whose row changes. Its addresses have the identity `old` and get `new`, by this row or by a surrounding
/// one.
#[derive(Debug)]
pub(super) struct MovedPrefix {
    pub(super) key: IdentityKey,
    pub(super) network: u32,
    pub(super) old: u32,
    pub(super) new: u32,
    /// The current value of its row.
    there: Option<u32>,
    stays: bool,
    is_unconfirmed: bool,
}

impl MovedPrefix {
    /// Whether the row must be written for the prefix to have this identity.
    pub(super) fn must_put(&self, identity: u32) -> bool {
        match self.there {
            _ if self.is_unconfirmed => self.stays,
            None => self.stays,
            Some(there) => there != identity,
        }
    }
}

/// Everything that changes.
#[derive(Debug)]
pub(super) struct Carriers {
    pub(super) endpoints: Vec<MovedEndpoint>,
    /// Longest first, so that a row never covers addresses whose longer row is not written yet.
    pub(super) prefixes: Vec<MovedPrefix>,
    /// By network, the old and the new policy set of existing endpoints.
    pub(super) sets: BTreeMap<u32, BTreeSet<(u32, u32)>>,
}

impl Carriers {
    pub(super) fn new(
        from: &PolicyTables,
        to: &PolicyTables,
        changed: &[Difference<IdentityKey, u32>],
        networks: &BTreeMap<EndpointId, u32>,
        unconfirmed: &Unconfirmed,
    ) -> Self {
        let mut found = Self {
            endpoints: Vec::new(),
            prefixes: prefixes(from, to, changed, unconfirmed),
            sets: BTreeMap::new(),
        };
        for (id, new) in &to.endpoints {
            let old = from.endpoints.get(id).copied();
            let network = networks.get(id).copied().unwrap_or(0);
            if let Some(old) = old {
                found.sets.entry(network).or_default().insert((old.policy, new.policy));
            }
            let is_unconfirmed = unconfirmed.endpoints.contains(id);
            if old != Some(*new) || is_unconfirmed {
                found.endpoints.push(MovedEndpoint {
                    id: *id,
                    network,
                    old,
                    new: *new,
                    is_unconfirmed,
                });
            }
        }
        found
    }

    /// Whether only a single endpoint changes: then one step is enough.
    pub(super) fn is_single(&self) -> bool {
        self.endpoints.len() <= 1 && self.prefixes.is_empty()
    }

    /// Identities that change, by network: old and new.
    pub(super) fn moves(&self) -> BTreeMap<u32, BTreeSet<(u32, u32)>> {
        let mut moves: BTreeMap<u32, BTreeSet<(u32, u32)>> = BTreeMap::new();
        for moved in &self.endpoints {
            let Some(old) = moved.old else { continue };
            let of_network = moves.entry(moved.network).or_default();
            of_network.insert((old.identity4, moved.new.identity4));
            of_network.insert((old.identity6, moved.new.identity6));
        }
        for moved in &self.prefixes {
            moves.entry(moved.network).or_default().insert((moved.old, moved.new));
        }
        for of_network in moves.values_mut() {
            of_network.retain(|(old, new)| old != new);
        }
        moves
    }
}

/// Identities that are in use in a network before the first step.
pub(super) fn carried(from: &PolicyTables, networks: &BTreeMap<EndpointId, u32>, network: u32) -> BTreeSet<u32> {
    let there = |id: &EndpointId| networks.get(id) == Some(&network);
    let endpoints = from.endpoints.iter().filter(|(id, _)| there(id));
    let prefixes = from.identities.iter().filter(|(key, _)| parts(key).0 == network);
    let carried = endpoints.flat_map(|(_, endpoint)| [endpoint.identity4, endpoint.identity6]);
    carried.chain(prefixes.map(|(_, identity)| *identity)).collect()
}

fn prefixes(
    from: &PolicyTables,
    to: &PolicyTables,
    changed: &[Difference<IdentityKey, u32>],
    unconfirmed: &Unconfirmed,
) -> Vec<MovedPrefix> {
    let keys: BTreeSet<IdentityKey> = changed
        .iter()
        .map(|(key, ..)| *key)
        .chain(unconfirmed.identities.iter().copied())
        .collect();
    if keys.is_empty() {
        return Vec::new();
    }
    let networks: BTreeSet<u32> = keys.iter().map(|key| parts(key).0).collect();
    let before = Around::new(&from.identities, &networks);
    let after = Around::new(&to.identities, &networks);
    let moved = keys.into_iter().map(|key| MovedPrefix {
        network: parts(&key).0,
        old: before.identity(&key),
        new: after.identity(&key),
        there: from.identities.get(&key).copied(),
        stays: to.identities.contains_key(&key),
        is_unconfirmed: unconfirmed.identities.contains(&key),
        key,
    });
    let mut moved: Vec<MovedPrefix> = moved.collect();
    moved.sort_by_key(|moved| std::cmp::Reverse(moved.key.prefix_length));
    moved
}
