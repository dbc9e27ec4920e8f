//! Caches the objects of one kind as the API server last reported them, with a version that counts changes.

mod index;
mod key;
mod refused;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use index::Index;
pub use index::OfNetwork;
pub use key::Key;
use kni_model::NetworkName;
pub use refused::Refused;

/// How many changes of a kind are remembered by name. A reader that is behind by more compares everything.
const REMEMBERED: usize = 4096;

/// How long the objects of a kind that the API server no longer serves stay.
pub const ABSENCE_GRACE: Duration = Duration::from_mins(5);

/// What a write's resource version shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is the newest of its kind.
    Newest,
    /// The watch has reported a newer one: the API server's storage was restored from a backup.
    AfterRestore,
}

/// The objects of one kind.
///
/// # Guarantees
/// - While a list is being read, earlier objects stay; objects that the list does not contain are removed when it is
///   complete. So an API server that is unavailable, or restarts, removes nothing.
/// - An event or a list that is older than the agent's own write of the object does not undo the write. Resource
///   versions of one kind are compared as numbers, and only until a list that was requested after the write: after a
///   restore of etcd they may be lower.
/// - An object that cannot be decoded keeps its last understood version, and is listed in [`Self::refused`].
/// - A kind that the API server no longer serves keeps its objects for [`ABSENCE_GRACE`].
#[derive(Debug)]
pub struct Table<V> {
    rows: BTreeMap<Key, V>,
    synced: bool,
    listing: Option<Listing>,
    version: u64,
    /// The latest changes: each version, and the object that it changed.
    changes: VecDeque<(u64, Key)>,
    /// The agent's own writes that the watch has not reported yet.
    written: BTreeMap<Key, OwnWrite>,
    /// Number of the agent's own writes so far.
    writes: u64,
    /// Objects that cannot be decoded, and why.
    refused: BTreeMap<Key, Refused>,
    /// Why the kind cannot be watched.
    problem: Option<String>,
    /// When the API server was first seen not to serve the kind.
    absent: Option<Instant>,
    /// The highest resource version that the API server has reported.
    newest: u64,
    /// The networks whose objects it has, where only those of some networks are followed.
    covered: BTreeSet<NetworkName>,
    index: Option<Index<V>>,
}

/// The latest write of an object by the agent itself.
#[derive(Debug, Clone, Copy)]
struct OwnWrite {
    /// The resource version that the API server returned.
    version: u64,
    /// Its position among the agent's own writes of the kind.
    position: u64,
}

/// A list that is being read.
#[derive(Debug, Default)]
struct Listing {
    keys: BTreeSet<Key>,
    newest: u64,
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            synced: false,
            listing: None,
            version: 0,
            changes: VecDeque::new(),
            written: BTreeMap::new(),
            writes: 0,
            refused: BTreeMap::new(),
            problem: None,
            absent: None,
            newest: 0,
            covered: BTreeSet::new(),
            index: None,
        }
    }
}

impl<V: PartialEq> Table<V> {
    fn insert_row(&mut self, key: Key, value: V) {
        if let Some(index) = &mut self.index {
            if let Some(former) = self.rows.get(&key) {
                index.remove(&key, former);
            }
            index.insert(&key, &value);
        }
        self.rows.insert(key, value);
    }

    /// Whether there was one.
    fn remove_row(&mut self, key: &Key) -> bool {
        let Some(former) = self.rows.remove(key) else {
            return false;
        };
        if let Some(index) = &mut self.index {
            index.remove(key, &former);
        }
        true
    }

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

    /// The objects that changed after `version`, oldest change first, possibly more than once; `None` if that is not
    /// known any more, and everything may have changed.
    pub fn changed_since(&self, version: u64) -> Option<impl Iterator<Item = &Key>> {
        let oldest = self
            .changes
            .front()
            .map_or(self.version, |(first, _)| first.saturating_sub(1));
        let since = self.changes.partition_point(|(at, _)| *at <= version);
        (version >= oldest && version <= self.version).then(|| self.changes.range(since..).map(|(_, key)| key))
    }

    /// Counts a change of an object.
    fn changed(&mut self, key: Key) {
        self.version += 1;
        if self.changes.len() == REMEMBERED {
            self.changes.pop_front();
        }
        self.changes.push_back((self.version, key));
    }

    /// Objects that the agent cannot decode, and why. An object that is also a row has its last understood version
    /// there.
    pub fn refused(&self) -> &BTreeMap<Key, Refused> {
        &self.refused
    }

    /// Why the kind cannot be watched at present; the rows are those of earlier.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Notes why the kind cannot be watched, or that it can.
    pub fn set_problem(&mut self, problem: Option<String>) {
        self.problem = problem;
    }

    /// The highest resource version among the reported events, deletions included; 0 if there were none since the
    /// start, or since the API server's storage was restored. Every change up to this version is in the rows.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Replaces an object; `None` for an existing object without relevant contents.
    pub fn put(&mut self, key: Key, value: Option<V>) {
        let changed = match value {
            Some(value) if self.rows.get(&key) == Some(&value) => false,
            Some(value) => {
                self.insert_row(key.clone(), value);
                true
            }
            None => self.remove_row(&key),
        };
        let understood = self.refused.remove(&key).is_some();
        if let Some(listing) = &mut self.listing {
            listing.keys.insert(key.clone());
        }
        if changed || understood {
            self.changed(key);
        }
    }

    /// [`Self::put`] of an object that the agent has written, as the API server returned it with resource version
    /// `version`. Earlier events of the watch are ignored from now on. `since` is [`Self::newest`] before the write was
    /// sent.
    pub fn put_written(&mut self, key: Key, since: u64, version: u64, value: Option<V>) -> Written {
        let restored = version != 0 && version < since && self.newest != 0;
        if restored {
            // Until the next list, which is under way.
            self.newest = 0;
        } else {
            self.writes += 1;
            let position = self.writes;
            self.written.insert(key.clone(), OwnWrite { version, position });
        }
        self.put(key, value);
        if restored {
            Written::AfterRestore
        } else {
            Written::Newest
        }
    }

    /// [`Self::put`] of an object that the watch reports with resource version `version`, 0 if it is no number.
    pub fn put_reported(&mut self, key: Key, version: u64, value: Option<V>) {
        if self.is_current(&key, version) {
            self.put(key, value);
        }
    }

    /// Removes an object that the watch reports as deleted.
    pub fn remove_reported(&mut self, key: &Key, version: u64) {
        if self.is_current(key, version) {
            self.remove(key);
        }
    }

    /// Notes that an object which the watch reports cannot be decoded. The row that `substitute` makes of the present
    /// one takes its place; without one, the last understood version stays.
    pub fn refuse(
        &mut self,
        key: Key,
        version: u64,
        refused: impl Into<Refused>,
        substitute: impl FnOnce(Option<&V>) -> Option<V>,
    ) {
        if !self.is_current(&key, version) {
            return;
        }
        if let Some(listing) = &mut self.listing {
            listing.keys.insert(key.clone());
        }
        let former = self.rows.get(&key);
        let row = substitute(former).filter(|row| former != Some(row));
        let is_new = row.is_some();
        if let Some(row) = row {
            self.insert_row(key.clone(), row);
        }
        let refused = refused.into();
        if is_new || self.refused.get(&key) != Some(&refused) {
            self.refused.insert(key.clone(), refused);
            self.changed(key);
        }
    }

    /// Notes the event's version; whether the event is not older than the agent's own write of the object.
    fn is_current(&mut self, key: &Key, version: u64) -> bool {
        let newest = match &mut self.listing {
            Some(listing) => &mut listing.newest,
            None => &mut self.newest,
        };
        *newest = version.max(*newest);
        match self.written.get(key) {
            Some(written) if version != 0 && version < written.version => {
                if let Some(listing) = &mut self.listing {
                    listing.keys.insert(key.clone());
                }
                false
            }
            Some(_) => {
                self.written.remove(key);
                true
            }
            None => true,
        }
    }

    /// Removes a deleted object.
    pub fn remove(&mut self, key: &Key) {
        if let Some(listing) = &mut self.listing {
            listing.keys.remove(key);
        }
        self.written.remove(key);
        let refused = self.refused.remove(key).is_some();
        if self.remove_row(key) || refused {
            self.changed(key.clone());
        }
    }

    /// The complete list has all objects of these networks, and of no others.
    pub fn cover(&mut self, networks: &BTreeSet<NetworkName>) {
        if self.covered != *networks {
            self.covered.clone_from(networks);
            self.version += 1;
            self.changes.clear();
        }
    }

    /// Whether a list is being read.
    pub const fn is_listing(&self) -> bool {
        self.listing.is_some()
    }

    /// Whether it has all objects of a network, where only those of some networks are followed.
    pub fn covers(&self, network: &NetworkName) -> bool {
        self.covered.contains(network)
    }

    /// Begins a list, which is read after all writes until now.
    pub fn begin(&mut self) {
        self.begin_after(self.writes);
    }

    /// Number of the agent's own writes so far: the value for [`Self::begin_after`] of a list that is requested now.
    pub const fn writes(&self) -> u64 {
        self.writes
    }

    /// Begins a list that was requested after the first `writes` writes of the agent. It may be older than any later
    /// one, whose object stays as it was written until the watch has reported it.
    pub fn begin_after(&mut self, writes: u64) {
        self.written.retain(|_, own| own.position > writes);
        let written = self.written.keys().filter(|key| self.rows.contains_key(*key));
        self.listing = Some(Listing {
            keys: written.cloned().collect(),
            newest: 0,
        });
    }

    /// Notes that the API server's storage was restored to an earlier state: what it has reported so far shows nothing
    /// about the versions of the next list.
    pub(crate) const fn set_restored(&mut self) {
        self.newest = 0;
    }

    /// Completes the list.
    pub fn complete(&mut self) {
        if let Some(Listing { keys, newest }) = self.listing.take() {
            let known = self.rows.keys().chain(self.refused.keys());
            let gone: BTreeSet<Key> = known.filter(|key| !keys.contains(*key)).cloned().collect();
            for key in gone {
                self.remove_row(&key);
                self.refused.remove(&key);
                self.changed(key);
            }
            self.newest = newest;
        }
        if !self.synced {
            self.synced = true;
            // Not a change of an object, so that nothing before it is known to be all.
            self.version += 1;
            self.changes.clear();
        }
        self.absent = None;
        self.problem = None;
    }

    /// Notes that the API server answered at `now` that it does not serve the kind. An empty table is complete then;
    /// the objects of any other stay for [`ABSENCE_GRACE`]. Returns how many stay.
    pub fn absent(&mut self, now: Instant) -> usize {
        let since = *self.absent.get_or_insert(now);
        if self.rows.is_empty() || now.saturating_duration_since(since) >= ABSENCE_GRACE {
            self.begin();
            self.complete();
            // A kind that stays away has no further grace.
            self.absent = Some(since);
        }
        self.rows.len()
    }

    /// Whether the API server answered last that it does not serve the kind.
    pub const fn is_absent(&self) -> bool {
        self.absent.is_some()
    }

    /// Notes that the API server serves the kind.
    pub fn served(&mut self) {
        self.absent = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("ns", name)
    }

    #[derive(Debug, Clone, PartialEq)]
    struct Object(&'static str, u32);

    impl OfNetwork for Object {
        fn network(&self) -> &str {
            self.0
        }
    }

    #[test]
    fn objects_are_found_by_the_network_that_they_state_now() {
        let mut table = Table::by_network();
        let of = |table: &Table<Object>, network: &str| -> Vec<u32> {
            table.of_network(network).map(|(_, object)| object.1).collect()
        };
        table.begin();
        for (name, object) in [
            ("a", Object("red", 1)),
            ("b", Object("red", 2)),
            ("c", Object("blue", 3)),
        ] {
            table.put(key(name), Some(object));
        }
        table.complete();
        assert_eq!(
            [of(&table, "red"), of(&table, "blue"), of(&table, "green")],
            [vec![1, 2], vec![3], vec![]]
        );
        table.put(key("a"), Some(Object("blue", 1)));
        assert_eq!([of(&table, "red"), of(&table, "blue")], [vec![2], vec![1, 3]]);
        table.put(key("b"), Some(Object("red", 4)));
        table.refuse(key("d"), 1, "unknown field".to_owned(), |_| Some(Object("red", 5)));
        assert_eq!(of(&table, "red"), [4, 5]);
        table.remove(&key("b"));
        table.put(key("d"), None);
        assert_eq!(of(&table, "red"), [0; 0]);
        table.begin();
        table.put(key("c"), Some(Object("blue", 3)));
        table.complete();
        assert_eq!(of(&table, "blue"), [3], "an object that the list does not have");
        assert_eq!(
            table.index.as_ref().unwrap().keys.len(),
            1,
            "no network without objects"
        );
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
    fn a_reader_learns_which_objects_changed_since_it_looked() {
        let mut table = Table::default();
        table.begin();
        table.put(key("a"), Some(1));
        table.put(key("b"), Some(1));
        table.complete();
        let names = |table: &Table<usize>, version| {
            let changed = table.changed_since(version)?;
            Some(changed.map(|key| key.name.clone()).collect::<Vec<_>>())
        };
        let version = table.version();
        assert_eq!(names(&table, version), Some(vec![]));
        assert_eq!(names(&table, 0), None, "before the first list");
        assert_eq!(names(&table, version + 1), None, "a version that was never there");
        table.put(key("b"), Some(2));
        table.put(key("b"), Some(2));
        table.remove(&key("a"));
        assert_eq!(names(&table, version), Some(vec!["b".to_owned(), "a".to_owned()]));
        assert_eq!(names(&table, version + 1), Some(vec!["a".to_owned()]));
        // A list that no longer has an object.
        let before = table.version();
        table.begin();
        table.complete();
        assert_eq!(names(&table, before), Some(vec!["b".to_owned()]));
        for number in 0..=REMEMBERED {
            table.put(key("c"), Some(number));
        }
        assert_eq!(names(&table, before), None, "more changes than are remembered");
        assert_eq!(names(&table, table.version() - 1), Some(vec!["c".to_owned()]));
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

    #[test]
    fn an_older_event_does_not_undo_the_agents_own_write() {
        let mut table = Table::default();
        table.begin();
        table.put_reported(key("a"), 5, Some("five"));
        table.complete();
        assert_eq!(table.put_written(key("a"), 5, 8, Some("ours")), Written::Newest);
        table.put_reported(key("a"), 7, Some("older"));
        table.remove_reported(&key("a"), 6);
        assert_eq!(table.get("ns", "a"), Some(&"ours"));
        table.put_reported(key("a"), 8, Some("ours"));
        table.put_reported(key("a"), 10, Some("newer"));
        assert_eq!(
            table.get("ns", "a"),
            Some(&"newer"),
            "10 is more than 8, also as a number"
        );
    }

    #[test]
    fn a_list_after_a_restore_of_etcd_counts_although_its_versions_are_lower() {
        let mut table = Table::default();
        assert_eq!(table.put_written(key("a"), 0, 100, Some(1)), Written::Newest);
        table.begin();
        table.put_reported(key("a"), 40, Some(2));
        assert_eq!(table.put_written(key("b"), 0, 50, Some(3)), Written::Newest);
        table.put_reported(key("b"), 45, Some(4));
        table.complete();
        assert_eq!((table.get("ns", "a"), table.get("ns", "b")), (Some(&2), Some(&3)));
        assert_eq!(table.newest(), 45);
        assert_eq!(
            table.put_written(key("a"), 44, 44, Some(5)),
            Written::Newest,
            "45 was reported meanwhile"
        );
        assert_eq!(table.put_written(key("a"), 45, 44, Some(5)), Written::AfterRestore);
        assert_eq!(
            table.put_written(key("a"), 45, 44, Some(5)),
            Written::Newest,
            "it is reported once"
        );
    }

    /// A list that arrives as the beginning of a watch begins for the agent when its version is chosen already.
    #[test]
    fn a_list_that_is_older_than_a_write_does_not_undo_it() {
        let mut table = Table::default();
        table.begin();
        table.put_reported(key("a"), 5, Some("five"));
        table.put_reported(key("b"), 4, Some("four"));
        table.complete();
        assert_eq!(table.put_written(key("b"), 5, 6, Some("before")), Written::Newest);
        let requested = table.writes();
        assert_eq!(table.put_written(key("a"), 5, 8, Some("ours")), Written::Newest);
        assert_eq!(table.put_written(key("new"), 5, 9, Some("ours too")), Written::Newest);
        table.begin_after(requested);
        table.put_reported(key("a"), 5, Some("five"));
        table.complete();
        assert_eq!(table.get("ns", "a"), Some(&"ours"));
        assert_eq!(table.get("ns", "new"), Some(&"ours too"), "it is in the next list");
        assert_eq!(
            table.get("ns", "b"),
            None,
            "it was deleted before the list was requested"
        );
        table.put_reported(key("new"), 9, Some("ours too"));
        table.remove_reported(&key("a"), 10);
        table.begin_after(table.writes());
        table.complete();
        assert!(table.rows().is_empty(), "nothing of an earlier write stays");
    }

    #[test]
    fn an_object_that_is_not_understood_keeps_its_last_version() {
        let mut table = Table::default();
        table.put_reported(key("a"), 1, Some("good"));
        let version = table.version();
        let closed = |former: Option<&&str>| former.is_none().then_some("closed");
        table.refuse(key("a"), 2, "spec.zzz: unknown field".to_owned(), closed);
        table.refuse(key("b"), 3, "spec.zzz: unknown field".to_owned(), closed);
        assert_eq!(
            (table.get("ns", "a"), table.get("ns", "b")),
            (Some(&"good"), Some(&"closed"))
        );
        assert!(table.version() > version && table.refused().len() == 2);
        table.begin();
        table.refuse(key("a"), 2, "spec.zzz: unknown field".to_owned(), |_| None);
        table.complete();
        assert_eq!((table.rows().len(), table.refused().len()), (1, 1), "b is gone");
        table.put_reported(key("a"), 4, Some("better"));
        assert!(table.refused().is_empty());
    }

    #[test]
    fn objects_outlive_the_absence_of_their_kind_for_a_while() {
        let mut table = Table::<u8>::default();
        let start = Instant::now();
        assert_eq!(table.absent(start), 0);
        assert!(table.is_synced(), "there are none, and that is known");
        table.served();
        table.put(key("a"), Some(1));
        assert_eq!(table.absent(start), 1);
        assert_eq!(table.absent(start + ABSENCE_GRACE / 2), 1);
        assert_eq!(table.absent(start + ABSENCE_GRACE), 0);
        table.put(key("a"), Some(1));
        table.served();
        assert_eq!(table.absent(start + ABSENCE_GRACE * 2), 1, "the grace begins anew");
    }
}
