//! Holds the writes of one controller: which are planned, run, failed and rest.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    time::Duration,
};

use kni_cluster::Key;
use tokio::time::Instant;

/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// The writes of a controller that are planned, run and failed.
pub(super) struct Work<W> {
    /// By share.
    planned: BTreeMap<String, BTreeMap<Key, W>>,
    /// The share that had its turn last.
    last: String,
    running: BTreeSet<Key>,
    /// Objects whose write has ended since the tables of the next [`Self::replace`] were read: they may not show it.
    unseen: BTreeSet<Key>,
    /// Objects that changed while a write of them ran.
    changed: BTreeSet<Key>,
    failed: BTreeMap<Key, Failure>,
    /// Until when objects that were just written are not written again.
    resting: BTreeMap<Key, Instant>,
}

struct Failure {
    times: u32,
    next: Instant,
    /// The last error: each is logged once.
    error: String,
}

impl<W> Default for Work<W> {
    fn default() -> Self {
        Self {
            planned: BTreeMap::new(),
            last: String::new(),
            running: BTreeSet::new(),
            unseen: BTreeSet::new(),
            changed: BTreeSet::new(),
            failed: BTreeMap::new(),
            resting: BTreeMap::new(),
        }
    }
}

impl<W> Work<W> {
    /// The tables are read now from which the next writes are planned.
    pub(super) fn plan_begins(&mut self) {
        self.unseen.clear();
    }

    /// Replaces the planned writes; whether an object must be compared again because its write has ended meanwhile.
    pub(super) fn replace(&mut self, writes: Vec<(Key, W)>, share: impl Fn(&W) -> &str, now: Instant) -> bool {
        let unseen = std::mem::take(&mut self.unseen);
        let mut again = false;
        let mut desired = BTreeSet::new();
        self.planned.clear();
        for (key, write) in writes {
            desired.insert(key.clone());
            if self.running.contains(&key) {
                self.changed.insert(key);
            } else if unseen.contains(&key) {
                again = true;
            } else if self.failed.get(&key).is_none_or(|failure| failure.next <= now) {
                let share = share(&write).to_owned();
                self.planned.entry(share).or_default().insert(key, write);
            }
        }
        // Objects that need no write any more.
        let running = &self.running;
        self.failed
            .retain(|key, _| desired.contains(key) || running.contains(key));
        again
    }

    pub(super) fn begin(&mut self, now: Instant) -> Option<(Key, W)> {
        self.resting.retain(|_, until| *until > now);
        let after = (Bound::Excluded(&self.last), Bound::Unbounded);
        let turns = self.planned.range::<String, _>(after);
        let mut turns = turns.chain(self.planned.range::<String, _>(..=&self.last));
        let awake = |writes: &BTreeMap<Key, W>| writes.keys().find(|key| !self.resting.contains_key(*key)).cloned();
        let (share, key) = turns.find_map(|(share, writes)| Some((share.clone(), awake(writes)?)))?;
        let writes = self.planned.get_mut(&share)?;
        let write = writes.remove(&key)?;
        if writes.is_empty() {
            self.planned.remove(&share);
        }
        self.last = share;
        self.running.insert(key.clone());
        Some((key, write))
    }

    /// When the next object that has to be written may be; `None` if none has to.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let planned = self.planned.values().flat_map(BTreeMap::keys);
        planned.filter_map(|key| self.resting.get(key)).min().copied()
    }

    /// Notes the end of a write; whether the object must be compared again.
    pub(super) fn ended(
        &mut self,
        (controller, rest): (&str, Duration),
        key: &Key,
        done: kube::Result<()>,
        now: Instant,
    ) -> bool {
        self.running.remove(key);
        self.unseen.insert(key.clone());
        let changed = self.changed.remove(key);
        let Err(error) = done else {
            self.failed.remove(key);
            if !rest.is_zero() {
                self.resting.insert(key.clone(), now + rest);
            }
            return changed;
        };
        let error = error.to_string();
        let before = self.failed.remove(key);
        if before.as_ref().is_none_or(|before| before.error != error) {
            tracing::warn!(controller, object = %key, error, "cannot write an object; trying again");
        }
        let times = before.map_or(0, |before| before.times.saturating_add(1));
        let pause = FIRST_PAUSE.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX));
        self.failed.insert(
            key.clone(),
            Failure {
                times,
                next: now + pause.min(LONGEST_PAUSE),
                error,
            },
        );
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("", name)
    }

    fn refused() -> kube::Result<()> {
        Err(kube::Error::Service("refused".into()))
    }

    /// Plans from tables of now.
    fn replan<W>(work: &mut Work<W>, writes: Vec<(Key, W)>, now: Instant) {
        work.plan_begins();
        assert!(!work.replace(writes, |_write| "", now));
    }

    #[test]
    fn an_object_that_fails_pauses_alone() {
        let mut work = Work::default();
        let mut now = Instant::now();
        let plan = || vec![(key("a"), ()), (key("b"), ())];
        replan(&mut work, plan(), now);
        assert_eq!(work.begin(now).unwrap().0, key("a"));
        assert_eq!(work.begin(now).unwrap().0, key("b"));
        assert!(!work.ended(("test", Duration::ZERO), &key("a"), refused(), now));
        work.ended(("test", Duration::ZERO), &key("b"), Ok(()), now);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            replan(&mut work, plan(), now);
            assert_eq!(work.begin(now).unwrap().0, key("b"), "a still pauses");
            work.ended(("test", Duration::ZERO), &key("b"), Ok(()), now);
            now += Duration::from_secs(pause);
            replan(&mut work, plan(), now);
            assert_eq!(work.begin(now).unwrap().0, key("a"), "after {pause} s");
            work.ended(("test", Duration::ZERO), &key("a"), refused(), now);
        }
        replan(&mut work, Vec::new(), now);
        replan(&mut work, plan(), now);
        assert_eq!(work.begin(now).unwrap().0, key("a"), "it needed no write in between");
    }

    #[test]
    fn an_object_that_changes_all_the_time_rests_between_writes_and_no_other_does() {
        let mut work = Work::default();
        let mut now = Instant::now();
        let rest = Duration::from_millis(200);
        replan(&mut work, vec![(key("a"), 1), (key("b"), 1)], now);
        assert_eq!((work.begin(now), work.next_due()), (Some((key("a"), 1)), None));
        work.ended(("test", rest), &key("a"), Ok(()), now);
        replan(&mut work, vec![(key("a"), 2), (key("b"), 1)], now);
        assert_eq!(work.begin(now), Some((key("b"), 1)));
        assert_eq!((work.begin(now), work.next_due()), (None, Some(now + rest)));
        now += rest;
        assert_eq!(work.begin(now), Some((key("a"), 2)), "the newest change");
        assert_eq!(work.next_due(), None);
    }

    #[test]
    fn a_write_that_ends_during_a_comparison_is_not_repeated_by_it() {
        let mut work = Work::default();
        let now = Instant::now();
        let plan = || vec![(key("a"), 1), (key("b"), 1)];
        work.plan_begins();
        assert!(!work.replace(plan(), |_write| "", now));
        assert_eq!(work.begin(now), Some((key("a"), 1)));
        work.plan_begins();
        work.ended(("test", Duration::ZERO), &key("a"), Ok(()), now);
        assert!(work.replace(plan(), |_write| "", now), "it is compared again");
        assert_eq!((work.begin(now), work.begin(now)), (Some((key("b"), 1)), None));
        work.plan_begins();
        assert!(!work.replace(plan(), |_write| "", now));
        assert_eq!(
            work.begin(now),
            Some((key("a"), 1)),
            "the tables are newer than the write"
        );
    }

    #[test]
    fn an_object_has_one_write_at_a_time() {
        let mut work = Work::default();
        let now = Instant::now();
        work.replace(vec![(key("a"), 1)], |_write| "", now);
        assert_eq!(work.begin(now), Some((key("a"), 1)));
        work.replace(vec![(key("a"), 2)], |_write| "", now);
        assert_eq!(work.begin(now), None);
        assert!(
            work.ended(("test", Duration::ZERO), &key("a"), Ok(()), now),
            "it must be compared again"
        );
    }

    #[test]
    fn many_objects_of_one_share_delay_no_other_share() {
        let mut work = Work::default();
        let now = Instant::now();
        let flood = (0..1000).map(|number| (key(&format!("a{number:04}")), "hostile"));
        let others = [(key("y1"), "n1"), (key("y2"), "n1"), (key("z"), "n2")];
        work.replace(flood.chain(others).collect(), |share| share, now);
        let begun: Vec<_> = std::iter::from_fn(|| work.begin(now))
            .map(|(key, _)| key.name)
            .collect();
        assert_eq!(begun[..6], ["a0000", "y1", "z", "a0001", "y2", "a0002"]);
        assert_eq!(begun.len(), 1003, "each one");
    }
}
