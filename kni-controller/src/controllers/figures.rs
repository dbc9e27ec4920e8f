//! Limits how often figures in the status of objects are written that every agent watches.

use std::{collections::BTreeMap, time::Duration};

use kni_cluster::{Key, Table};
use tokio::time::Instant;

/// A status in which only figures differ is written if they have not changed for so long.
const PAUSE: Duration = Duration::from_secs(30);

/// The figures `F` of each object, and since when it has them.
#[derive(Debug)]
pub(super) struct Paced<F> {
    seen: BTreeMap<Key, (F, Instant)>,
}

impl<F> Default for Paced<F> {
    fn default() -> Self {
        Self { seen: BTreeMap::new() }
    }
}

impl<F: PartialEq> Paced<F> {
    /// Drops what it knows of objects that are gone.
    pub(super) fn retain<V: PartialEq>(&mut self, table: &Table<V>) {
        self.seen.retain(|key, _| table.rows().contains_key(key));
    }

    /// Whether new figures have to wait, as the present ones of the object are not old enough.
    pub(super) fn must_wait(&mut self, key: &Key, present: F, now: Instant) -> bool {
        match self.seen.get(key) {
            Some((figures, since)) if *figures == present => now.saturating_duration_since(*since) < PAUSE,
            Some(_) => {
                self.seen.insert(key.clone(), (present, now));
                true
            }
            None => {
                // Figures that this replica has not seen change may be old.
                let since = now.checked_sub(PAUSE).unwrap_or(now);
                self.seen.insert(key.clone(), (present, since));
                since == now
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_wait_from_one_change_to_the_next() {
        let (mut paced, start) = (Paced::default(), Instant::now() + PAUSE);
        let [a, b] = ["a", "b"].map(|name| Key::new("", name));
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!paced.must_wait(&a, 1, at(0)), "they are older than this replica");
        assert!(paced.must_wait(&a, 2, at(1)), "they have just changed");
        assert!(paced.must_wait(&a, 2, at(30)));
        assert!(!paced.must_wait(&b, 2, at(30)), "another object");
        assert!(!paced.must_wait(&a, 2, at(31)));
        assert!(!paced.must_wait(&a, 2, at(32)), "the write has not succeeded");
        assert!(paced.must_wait(&a, 3, at(33)));
    }
}
