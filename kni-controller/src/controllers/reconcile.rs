//! Runs one controller: plans writes whenever its tables change, and retries each object by itself.

mod work;

use std::{sync::Arc, time::Duration};

use kni_cluster::{ClusterCache, Key, Networks, Tables};
use kube::Client;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use self::work::Work;
use crate::{election::Leadership, events::Events, health::Health, metrics::Metrics};

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(3);
/// [`Reconciler::GATHER`] of most controllers.
const GATHER: Duration = Duration::from_millis(300);
/// Maximum number of concurrent writes of one controller.
const AT_ONCE: usize = 16;

/// What every controller works with, for one term.
#[derive(Clone)]
pub(crate) struct Context {
    /// Refuses writes once the term has ended, and while the Lease is not renewed in time.
    pub(crate) client: Client,
    /// Whether the Lease is renewed in time.
    pub(crate) leadership: Leadership,
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
pub(crate) async fn reconcile<R: Reconciler>(context: Context, reconciler: R) {
    context.synced().await;
    rounds(context, reconciler).await;
}

/// Writes run on tasks of their own and each comparison on a thread of its own: neither waits for the other.
async fn rounds<R: Reconciler>(context: Context, reconciler: R) {
    let heartbeat = context.health.expect(R::NAME);
    let mut changes = context.cache.changes();
    let mut ticks = interval(ROUND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut work = Work::default();
    let (mut writes, mut plans) = (JoinSet::new(), JoinSet::new());
    // `None` while it compares.
    let mut planner = Some(Planner::new(reconciler));
    let (mut next, mut pause) = (NextPlan::default(), R::GATHER);
    loop {
        let write_due = begin_writes::<R>(&context, &mut work, &mut writes);
        if next.is_due()
            && let Some(mut planner) = planner.take()
        {
            changes.mark_unchanged();
            work.plan_begins();
            let (context, must) = (context.clone(), std::mem::take(&mut next).must);
            plans.spawn_blocking(move || {
                let desired = planner.plan(&context, must);
                (planner, desired)
            });
        }
        if planner.is_some() {
            heartbeat.beat();
        }
        let plan_due = next.due.filter(|_| planner.is_some());
        let due = plan_due.into_iter().chain(write_due).min();
        tokio::select! {
            _ = ticks.tick() => next.within(Duration::ZERO, true),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            sent = changes.changed(), if next.due.is_none() => {
                if sent.is_err() { return }
                next.within(pause, false);
            }
            Some(ended) = writes.join_next() => {
                // What panics ends the controller.
                let Ok((key, done)) = ended else { return };
                if done.is_err() {
                    context.metrics.failed(R::NAME);
                }
                if work.ended((R::NAME, R::REST), &key, done, Instant::now()) {
                    next.within(pause, true);
                }
            }
            Some(ended) = plans.join_next() => {
                let Ok((back, desired)) = ended else { return };
                pause = R::GATHER.max(back.took);
                planner = Some(back);
                next.not_within(pause);
                if desired.is_some_and(|desired| work.replace(desired, R::share, Instant::now())) {
                    next.within(pause, true);
                }
            }
        }
    }
}

/// Begins the planned writes that may run; when the next one may.
fn begin_writes<R: Reconciler>(
    context: &Context,
    work: &mut Work<R::Write>,
    writes: &mut JoinSet<(Key, kube::Result<()>)>,
) -> Option<Instant> {
    context.leadership.until()?;
    while writes.len() < AT_ONCE
        && let Some((key, write)) = work.begin(Instant::now())
    {
        let context = context.clone();
        writes.spawn(async move { (key.clone(), R::write(context, key, write).await) });
    }
    work.next_due().filter(|_| writes.len() < AT_ONCE)
}

/// When the next comparison begins.
#[derive(Default)]
struct NextPlan {
    due: Option<Instant>,
    /// Whether it is made although no version has changed.
    must: bool,
}

impl NextPlan {
    fn within(&mut self, pause: Duration, must: bool) {
        let due = Instant::now() + pause;
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
        self.must |= must;
    }

    fn not_within(&mut self, pause: Duration) {
        let earliest = Instant::now() + pause;
        self.due = self.due.map(|due| due.max(earliest));
    }

    fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= Instant::now())
    }
}

/// A controller, and what it remembers of its last comparison.
struct Planner<R> {
    reconciler: R,
    /// The version that was compared.
    seen: Option<u64>,
    /// How long it took: as much time passes before the next one, in which watches fill the tables.
    took: Duration,
}

impl<R: Reconciler> Planner<R> {
    const fn new(reconciler: R) -> Self {
        Self {
            reconciler,
            seen: None,
            took: Duration::ZERO,
        }
    }

    /// The necessary writes, unless nothing has changed. May take long in a large cluster.
    fn plan(&mut self, context: &Context, must: bool) -> Option<Vec<(Key, R::Write)>> {
        let tables = context.cache.tables();
        let version = R::version(&tables);
        if !must && self.seen == Some(version) {
            return None;
        }
        self.seen = Some(version);
        let started = Instant::now();
        let networks = if R::NEEDS_NETWORKS {
            context.cache.networks(&tables)
        } else {
            Arc::default()
        };
        let writes = self.reconciler.plan(&tables, &networks);
        self.took = started.elapsed();
        context.metrics.reconciled(R::NAME, self.took);
        Some(writes)
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
impl Context {
    /// That of a term which does not end, without watches.
    fn for_tests(client: Client, cache: ClusterCache) -> Self {
        Self {
            events: Events::new(client.clone()),
            client,
            leadership: Leadership::held_for_tests(),
            cache,
            health: Health::default(),
            metrics: Metrics::for_tests(),
        }
    }
}

#[cfg(test)]
mod tests;
