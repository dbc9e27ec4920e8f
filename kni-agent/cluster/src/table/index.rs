//! Indexes the objects of a table by network.

use std::collections::{BTreeMap, BTreeSet};

use super::{Key, Table};

/// The objects of each network.
#[derive(Debug)]
pub(super) struct Index<V> {
    network: fn(&V) -> &str,
    pub(super) keys: BTreeMap<String, BTreeSet<Key>>,
}

impl<V> Index<V> {
    pub(super) fn insert(&mut self, key: &Key, value: &V) {
        let network = (self.network)(value);
        if let Some(keys) = self.keys.get_mut(network) {
            keys.insert(key.clone());
        } else {
            self.keys.insert(network.to_owned(), [key.clone()].into());
        }
    }

    pub(super) fn remove(&mut self, key: &Key, value: &V) {
        let network = (self.network)(value);
        let Some(keys) = self.keys.get_mut(network) else { return };
        keys.remove(key);
        if keys.is_empty() {
            self.keys.remove(network);
        }
    }
}

/// An object of a kind that is found by its network.
pub trait OfNetwork: PartialEq {
    /// The name of the network, as the object states it.
    fn network(&self) -> &str;
}

impl<V: OfNetwork> Table<V> {
    /// An empty table with an index by network: a lookup reads no object of another network.
    pub fn by_network() -> Self {
        let index = Index {
            network: V::network,
            keys: BTreeMap::new(),
        };
        Self {
            index: Some(index),
            ..Self::default()
        }
    }

    /// The objects of a network, of a table made by [`Self::by_network`].
    pub fn of_network(&self, network: &str) -> impl Iterator<Item = (&Key, &V)> {
        debug_assert!(self.index.is_some(), "the table has no index");
        let index = self.index.as_ref().and_then(|index| index.keys.get(network));
        index
            .into_iter()
            .flatten()
            .filter_map(|key| self.rows.get_key_value(key))
    }
}

impl<V: PartialEq> Table<V> {
    /// Removes the objects of a network, of a table made by [`Self::by_network`].
    pub fn remove_network(&mut self, network: &str) {
        let keys = self.index.as_ref().and_then(|index| index.keys.get(network)).cloned();
        for key in keys.unwrap_or_default() {
            self.remove(&key);
        }
    }
}
