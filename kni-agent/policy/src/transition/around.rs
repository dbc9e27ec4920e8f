//! Finds the row that applies to a prefix: its own, or the longest one that contains it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kni_common::policy::IdentityKey;

use crate::prefix::{parts, shortened};

/// Finds the rows that contain a prefix, by length.
pub(super) struct Around<'a> {
    rows: &'a BTreeMap<IdentityKey, u32>,
    /// Lengths in use by network, longest first.
    lengths: HashMap<u32, Vec<u32>>,
}

impl<'a> Around<'a> {
    /// An index of these rows.
    pub(super) fn new(rows: &'a BTreeMap<IdentityKey, u32>) -> Self {
        let mut lengths: HashMap<u32, BTreeSet<u32>> = HashMap::new();
        // Rows are sorted by length, so most have the same length as the previous one.
        let mut last = None;
        for place in rows.keys().map(parts) {
            if last != Some(place) {
                lengths.entry(place.0).or_default().insert(place.1);
                last = Some(place);
            }
        }
        let longest_first = lengths
            .into_iter()
            .map(|(network, set)| (network, set.into_iter().rev().collect()));
        Self {
            rows,
            lengths: longest_first.collect(),
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
