//! Finds the row that applies to a prefix: its own, or the longest one that contains it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kni_common::policy::IdentityKey;

use crate::prefix::{least, parts, shortened};

/// Finds the rows that contain a prefix, by length.
pub(super) struct Around<'a> {
    rows: &'a BTreeMap<IdentityKey, u32>,
    /// Lengths in use by network, longest first.
    lengths: HashMap<u32, Vec<u32>>,
}

impl<'a> Around<'a> {
    /// An index of the rows of these networks.
    pub(super) fn new(rows: &'a BTreeMap<IdentityKey, u32>, networks: &BTreeSet<u32>) -> Self {
        let lengths = networks.iter().map(|network| (*network, lengths(rows, *network)));
        Self {
            rows,
            lengths: lengths.collect(),
        }
    }

    /// The identity of the longest row that contains the whole prefix; 0 without one.
    pub(super) fn identity(&self, key: &IdentityKey) -> u32 {
        let (network, length) = parts(key);
        let lengths = self.lengths.get(&network).into_iter().flatten();
        let mut shorter = lengths.filter(|known| **known <= length);
        shorter
            .find_map(|known| self.rows.get(&shortened(key, *known)))
            .copied()
            .unwrap_or(0)
    }
}

/// The lengths of the rows of a network, longest first. Rows are sorted by length, and those of a length by network, so
/// only one row of each length is read.
fn lengths(rows: &BTreeMap<IdentityKey, u32>, network: u32) -> Vec<u32> {
    let mut lengths = Vec::new();
    let mut next = Some(0);
    while let Some(length) = next {
        let found = rows.range(least(network, length)..).next().map(|(key, _)| parts(key));
        next = match found {
            Some((_, longer)) if longer > length => Some(longer),
            Some((other, _)) => {
                if other == network {
                    lengths.push(length);
                }
                length.checked_add(1)
            }
            None => None,
        };
    }
    lengths.reverse();
    lengths
}
