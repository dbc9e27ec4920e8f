//! Runs one controller: plans writes whenever its tables change, and retries each object by itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use kni_cluster::{ClusterCache, Key, Networks, Tables};
use kube::Client;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::{events::Events, health::Health, metrics::Metrics};

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(3);
/// [`Reconciler::GATHER`] of most controllers.
const GATHER: Duration = Duration::from_millis(300);
/// Maximum number of concurrent writes of one controller.
const AT_ONCE: usize = 16;
/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// What every controller works with, for one term.
#[derive(Clone)]
pub(crate) struct Context {
    /// Refuses writes once the term has ended.
    pub(crate) client: Client,
    /// Filled in this term: a replica that acts again begins with empty tables.
    pub(crate) cache: ClusterCache,
    /// Events of this term.
    pub(crate) events: Events,
    /// Where every loop reports that it goes round.
    pub(crate) health: Health,
    /// Counts what the controllers do.
    pub(crate) metrics: Metrics,
}

/// One duty: the comparison of tables with objects, and the writes that make them agree.
pub(crate) trait Reconciler: Send + 'static {
    /// Name for messages.
    const NAME: &'static str;
    /// Changes that arrive within this time are processed together.
    const GATHER: Duration = GATHER;
    /// Minimum time between the end of a write and the next one of the same object: what changes all the time costs a
    /// limited number of writes, and of notifications of everything that watches the object.
    const REST: Duration = Duration::ZERO;
    /// Whether [`Self::plan`] reads the networks, which are derived from all objects anew at each change.
    const NEEDS_NETWORKS: bool = true;
    /// The change of one object.
    type Write: Send + 'static;

    /// On whose behalf a write is made. Writes of different shares take turns, so that one with many delays only its
    /// own.
    #[expect(
        clippy::unnecessary_literal_bound,
        reason = "other implementations borrow it from the write"
    )]
    fn share(_write: &Self::Write) -> &str {
        ""
    }

    /// Changes with every row that [`Self::plan`] reads.
    fn version(tables: &Tables) -> u64;

    /// The necessary writes by object; empty if all is as desired. Pure but for the reconciler's own memory. Called
    /// after changes, and every three seconds.
    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Self::Write)>;

    /// Carries out one write. An error affects only this object; it is planned again after a pause.
    fn write(context: Context, key: Key, write: Self::Write) -> impl Future<Output = kube::Result<()>> + Send;
}

/// Runs a controller for as long as its task.
pub(crate) async fn reconcile<R: Reconciler>(context: Context, mut reconciler: R) {
    context.synced().await;
    let heartbeat = context.health.expect(R::NAME);
    let mut changes = context.cache.changes();
    let mut ticks = interval(ROUND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut work = Work::default();
    let mut running = FuturesUnordered::new();
    let mut seen = None;
    loop {
        heartbeat.beat();
        while running.len() < AT_ONCE
            && let Some((key, write)) = work.begin(Instant::now())
        {
            let context = context.clone();
            running.push(async move { (key.clone(), R::write(context, key, write).await) });
        }
        let due = work.next_due().filter(|_| running.len() < AT_ONCE);
        let must = tokio::select! {
            _ = ticks.tick() => true,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => continue,
            sent = changes.changed() => {
                if sent.is_err() { return }
                tokio::time::sleep(R::GATHER).await;
                false
            }
            Some((key, done)) = running.next() => {
                if done.is_err() {
                    context.metrics.failed(R::NAME);
                }
                work.ended((R::NAME, R::REST), &key, done, Instant::now())
            }
        };
        changes.mark_unchanged();
        // The comparison may take long in a large cluster.
        tokio::task::block_in_place(|| {
            let tables = context.cache.tables();
            let version = R::version(&tables);
            if must || seen != Some(version) {
                seen = Some(version);
                let started = Instant::now();
                let networks = if R::NEEDS_NETWORKS {
                    context.cache.networks(&tables)
                } else {
                    std::sync::Arc::default()
                };
                let writes = reconciler.plan(&tables, &networks);
                work.replace(writes, R::share, Instant::now());
                context.metrics.reconciled(R::NAME, started.elapsed());
            }
        });
    }
}

/// The writes of a controller that are planned, run and failed.
struct Work<W> {
    /// By share.
    planned: BTreeMap<String, BTreeMap<Key, W>>,
    /// The share that had its turn last.
    last: String,
    running: BTreeSet<Key>,
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
            changed: BTreeSet::new(),
            failed: BTreeMap::new(),
            resting: BTreeMap::new(),
        }
    }
}

impl<W> Work<W> {
    fn replace(&mut self, writes: Vec<(Key, W)>, share: impl Fn(&W) -> &str, now: Instant) {
        let mut desired = BTreeSet::new();
        self.planned.clear();
        for (key, write) in writes {
            desired.insert(key.clone());
            if self.running.contains(&key) {
                self.changed.insert(key);
            } else if self.failed.get(&key).is_none_or(|failure| failure.next <= now) {
                let share = share(&write).to_owned();
                self.planned.entry(share).or_default().insert(key, write);
            }
        }
        // Objects that need no write any more.
        let running = &self.running;
        self.failed
            .retain(|key, _| desired.contains(key) || running.contains(key));
    }

    fn begin(&mut self, now: Instant) -> Option<(Key, W)> {
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
    fn next_due(&self) -> Option<Instant> {
        let planned = self.planned.values().flat_map(BTreeMap::keys);
        planned.filter_map(|key| self.resting.get(key)).min().copied()
    }

    /// Notes the end of a write; whether the object must be compared again.
    fn ended(&mut self, (controller, rest): (&str, Duration), key: &Key, done: kube::Result<()>, now: Instant) -> bool {
        self.running.remove(key);
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

impl Context {
    /// Waits until every kind was read once in this term.
    async fn synced(&self) {
        let mut changes = self.cache.changes();
        loop {
            let missing = self.cache.tables().missing_of_cluster();
            if missing.is_empty() {
                return;
            }
            tracing::debug!(?missing, "waiting for the API server");
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Success where the object is gone meanwhile.
pub(crate) fn ignore_gone<T>(done: kube::Result<T>) -> kube::Result<()> {
    match done {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

/// `None` where the object has changed meanwhile, or is gone: the next plan is made of its new state.
pub(crate) fn unless_changed<T>(done: kube::Result<T>) -> kube::Result<Option<T>> {
    match done {
        Ok(written) => Ok(Some(written)),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
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

    #[test]
    fn an_object_that_fails_pauses_alone() {
        let mut work = Work::default();
        let mut now = Instant::now();
        let plan = || vec![(key("a"), ()), (key("b"), ())];
        work.replace(plan(), |_write| "", now);
        assert_eq!(work.begin(now).unwrap().0, key("a"));
        assert_eq!(work.begin(now).unwrap().0, key("b"));
        assert!(!work.ended(("test", Duration::ZERO), &key("a"), refused(), now));
        work.ended(("test", Duration::ZERO), &key("b"), Ok(()), now);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            work.replace(plan(), |_write| "", now);
            assert_eq!(work.begin(now).unwrap().0, key("b"), "a still pauses");
            work.ended(("test", Duration::ZERO), &key("b"), Ok(()), now);
            now += Duration::from_secs(pause);
            work.replace(plan(), |_write| "", now);
            assert_eq!(work.begin(now).unwrap().0, key("a"), "after {pause} s");
            work.ended(("test", Duration::ZERO), &key("a"), refused(), now);
        }
        work.replace(Vec::new(), |_write| "", now);
        work.replace(plan(), |_write| "", now);
        assert_eq!(work.begin(now).unwrap().0, key("a"), "it needed no write in between");
    }

    #[test]
    fn an_object_that_changes_all_the_time_rests_between_writes_and_no_other_does() {
        let mut work = Work::default();
        let mut now = Instant::now();
        let rest = Duration::from_millis(200);
        work.replace(vec![(key("a"), 1), (key("b"), 1)], |_write| "", now);
        assert_eq!((work.begin(now), work.next_due()), (Some((key("a"), 1)), None));
        work.ended(("test", rest), &key("a"), Ok(()), now);
        work.replace(vec![(key("a"), 2), (key("b"), 1)], |_write| "", now);
        assert_eq!(work.begin(now), Some((key("b"), 1)));
        assert_eq!((work.begin(now), work.next_due()), (None, Some(now + rest)));
        now += rest;
        assert_eq!(work.begin(now), Some((key("a"), 2)), "the newest change");
        assert_eq!(work.next_due(), None);
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
