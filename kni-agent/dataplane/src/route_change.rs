//! Compares the rows of a network with the desired ones, and finds destinations that move to another node.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::route::{ACTION_REMOTE, ROUTE_OWNED, RouteData, RouteKey, RouteValue};

/// Rows of `ROUTES`.
pub(super) type Rows = BTreeMap<RouteKey, RouteValue>;

/// The difference between the rows of a network and the desired ones.
#[derive(Debug)]
pub(super) struct RouteChange {
    /// Rows that replace others.
    pub(super) replaced: Vec<(RouteKey, RouteValue)>,
    /// Rows of other destinations.
    pub(super) added: Vec<(RouteKey, RouteValue)>,
    /// Keys of rows to remove.
    pub(super) gone: Vec<RouteKey>,
}

impl RouteChange {
    pub(super) fn between(before: &Rows, desired: &Rows) -> Self {
        let changed = desired.iter().filter(|(key, value)| before.get(*key) != Some(*value));
        let (replaced, added) = changed
            .map(|(key, value)| (*key, *value))
            .partition(|(key, _)| before.contains_key(key));
        let gone = before.keys().filter(|key| !desired.contains_key(*key));
        Self {
            replaced,
            added,
            gone: gone.copied().collect(),
        }
    }

    /// Whether a destination that another node had gets another node, or none, or one that any host could have can only
    /// be a pod's from now on.
    pub(super) fn moves(&self, before: &Rows) -> bool {
        let mut written = self.replaced.iter().chain(&self.added);
        if written.any(|(_, value)| value.flags & ROUTE_OWNED != 0) {
            return true;
        }
        let was_remote = |key: &RouteKey| before.get(key).is_some_and(|value| value.action == ACTION_REMOTE);
        // A range within another one changes the node of addresses that had that one's.
        let remote = before.iter().filter(|(_, value)| value.action == ACTION_REMOTE);
        let lengths: BTreeSet<u32> = remote.map(|(key, _)| key.prefix_length).collect();
        let narrows = |key: &RouteKey| {
            lengths
                .range(..key.prefix_length)
                .any(|length| was_remote(&widened(key, *length)))
        };
        let mut changed = self.replaced.iter().chain(&self.added).map(|(key, _)| key);
        self.gone.iter().any(was_remote) || changed.any(|key| was_remote(key) || narrows(key))
    }
}

/// The range of that prefix length that contains a row's range. `length` includes the 32 bits of the network.
fn widened(key: &RouteKey, length: u32) -> RouteKey {
    let bits = length.saturating_sub(32);
    let mask = u128::MAX.checked_shl(128_u32.saturating_sub(bits)).unwrap_or(0);
    RouteKey {
        prefix_length: length,
        data: RouteData {
            address: (u128::from_be_bytes(key.data.address) & mask).to_be_bytes(),
            ..key.data
        },
    }
}
