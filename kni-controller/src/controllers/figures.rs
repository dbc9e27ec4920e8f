//! Limits how often figures in the status of objects are written that every agent watches.

use std::{collections::BTreeMap, time::Duration};

use kni_cluster::{Key, Table};
use tokio::time::Instant;

/// A status in which only figures differ is written if they have not changed for so long.
const PAUSE: Duration = Duration::from_secs(30);

/// The pause in a cluster of many objects, for each of them. All figures of one kind together are then written at most
/// twice a second: each write is sent to every agent.
const PAUSE_PER_OBJECT: Duration = Duration::from_millis(500);

/// The figures `F` of each object, and since when it has them.
#[derive(Debug)]
pub(super) struct Paced<F> {
    seen: BTreeMap<Key, (F, Instant)>,
    pause: Duration,
}

impl<F> Default for Paced<F> {
    fn default() -> Self {
        Self {
            seen: BTreeMap::new(),
            pause: PAUSE,
        }
    }
}

impl<F: PartialEq> Paced<F> {
    /// Drops what it knows of objects that are gone, and adapts the pause to the number of objects.
    pub(super) fn retain<V: PartialEq>(&mut self, table: &Table<V>) {
        self.seen.retain(|key, _| table.rows().contains_key(key));
        self.pause = pause_of(table.rows().len());
    }

    /// Whether new figures have to wait, as the present ones of the object are not old enough.
    pub(super) fn must_wait(&mut self, key: &Key, present: F, now: Instant) -> bool {
        match self.seen.get(key) {
            Some((figures, since)) if *figures == present => now.saturating_duration_since(*since) < self.pause,
            Some(_) => {
                self.seen.insert(key.clone(), (present, now));
                true
            }
            None => {
                // Figures that this replica has not seen change may be old.
                let since = now.checked_sub(self.pause).unwrap_or(now);
                self.seen.insert(key.clone(), (present, since));
                since == now
            }
        }
    }
}

fn pause_of(objects: usize) -> Duration {
    let all = PAUSE_PER_OBJECT.saturating_mul(u32::try_from(objects).unwrap_or(u32::MAX));
    PAUSE.max(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_many_objects_are_written_twice_a_second() {
        assert_eq!([0, 1, 60].map(pause_of), [PAUSE; 3]);
        assert_eq!(pause_of(1000), Duration::from_secs(500));
        assert!(pause_of(usize::MAX) > pause_of(1000));
    }

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
