//! Caches the objects of one kind as the API server last reported them, with a version that counts changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// Names an object: its namespace, empty where the kind has none, and its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl Key {
    /// The key of an object.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// The objects of one kind.
///
/// While a list is being read, earlier objects stay; objects that the list does not contain are removed when it is
/// complete. So an API server that is unavailable, or restarts, removes nothing.
#[derive(Debug)]
pub struct Table<V> {
    rows: BTreeMap<Key, V>,
    synced: bool,
    listing: Option<BTreeSet<Key>>,
    version: u64,
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            synced: false,
            listing: None,
            version: 0,
        }
    }
}

impl<V: PartialEq> Table<V> {
    /// All objects.
    pub fn rows(&self) -> &BTreeMap<Key, V> {
        &self.rows
    }

    /// One object.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&V> {
        self.rows.get(&Key::new(namespace, name))
    }

    /// Whether a list was ever read to its end.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Changes with every change of the rows, and when the first list is complete.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Replaces an object; `None` for an existing object without relevant contents.
    pub fn put(&mut self, key: Key, value: Option<V>) {
        if let Some(listing) = &mut self.listing {
            listing.insert(key.clone());
        }
        let changed = match value {
            Some(value) if self.rows.get(&key) == Some(&value) => false,
            Some(value) => {
                self.rows.insert(key, value);
                true
            }
            None => self.rows.remove(&key).is_some(),
        };
        self.version += u64::from(changed);
    }

    /// Removes a deleted object.
    pub fn remove(&mut self, key: &Key) {
        if let Some(listing) = &mut self.listing {
            listing.remove(key);
        }
        self.version += u64::from(self.rows.remove(key).is_some());
    }

    /// Begins a list.
    pub fn begin(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// Completes the list.
    pub fn complete(&mut self) {
        if let Some(listed) = self.listing.take() {
            let before = self.rows.len();
            self.rows.retain(|key, _| listed.contains(key));
            self.version += u64::from(self.rows.len() != before);
        }
        self.version += u64::from(!self.synced);
        self.synced = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("ns", name)
    }

    #[test]
    fn a_list_replaces_when_it_is_complete_and_not_before() {
        let mut table = Table::default();
        table.begin();
        table.put(key("a"), Some(1));
        table.put(key("b"), Some(2));
        assert!(!table.is_synced());
        table.complete();
        assert!(table.is_synced());
        let version = table.version();
        table.begin();
        table.put(key("b"), Some(2));
        assert_eq!(
            (table.version(), table.rows().len()),
            (version, 2),
            "nothing is lost while a list is read"
        );
        table.complete();
        assert_eq!(
            table.rows().keys().map(|key| key.name.as_str()).collect::<Vec<_>>(),
            ["b"]
        );
        assert!(table.version() > version);
    }

    #[test]
    fn only_changes_count() {
        let mut table = Table::default();
        table.put(key("a"), Some(1));
        let version = table.version();
        table.put(key("a"), Some(1));
        table.put(key("b"), None);
        table.remove(&key("c"));
        assert_eq!(table.version(), version);
        table.put(key("a"), None);
        assert!(table.version() > version && table.get("ns", "a").is_none());
    }

    #[test]
    fn what_goes_while_a_list_is_read_stays_gone() {
        let mut table = Table::default();
        table.begin();
        table.put(key("a"), Some(1));
        table.remove(&key("a"));
        table.complete();
        assert!(table.rows().is_empty());
    }
}
