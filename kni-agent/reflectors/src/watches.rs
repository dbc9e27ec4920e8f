//! Counts events and restarts of the watches, by kind, and sets their pauses.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kube::runtime::utils::Backoff;

/// Pause after the first failure; each additional one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause in operation: as long as that of Kubernetes' own clients.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What the watches of a process share. Clones share it.
#[derive(Debug, Clone)]
pub struct WatchState {
    counts: Arc<Mutex<BTreeMap<&'static str, Count>>>,
    longest_pause: Duration,
    /// Whether the API server has refused to send a list as the beginning of a watch.
    not_streamed: Arc<AtomicBool>,
}

impl Default for WatchState {
    fn default() -> Self {
        Self::new(LONGEST_PAUSE)
    }
}

/// The pauses of one watch between failures, with jitter: agents that lost the API server together do not return
/// together. An event ends them.
pub(super) struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.next.min(self.longest);
        self.next = (pause * 2).min(self.longest);
        Some(pause.mul_f64(fastrand::f64().mul_add(0.5, 0.5)))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.next = SHORTEST_PAUSE;
    }
}

#[derive(Debug, Default)]
struct Count {
    last_event: Option<Instant>,
    restarts: u64,
}

/// The state of one watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchView {
    /// The kind.
    pub kind: &'static str,
    /// Time since the last event; `None` before the first.
    pub last_event: Option<Duration>,
    /// How often the watch failed and was started again.
    pub restarts: u64,
}

impl WatchState {
    /// Watches that wait at most this long after a failure.
    pub fn new(longest_pause: Duration) -> Self {
        Self {
            counts: Arc::default(),
            longest_pause,
            not_streamed: Arc::default(),
        }
    }

    pub(super) fn pauses(&self) -> Pauses {
        Pauses {
            next: SHORTEST_PAUSE,
            longest: self.longest_pause,
        }
    }

    /// Whether lists arrive as the beginning of a watch, object by object. So neither side holds a whole list in
    /// memory.
    pub(super) fn streams_lists(&self) -> bool {
        !self.not_streamed.load(Ordering::Relaxed)
    }

    /// Notes that the API server does not send lists that way. It is not asked again before the next start.
    pub(super) fn set_not_streamed(&self) {
        if !self.not_streamed.swap(true, Ordering::Relaxed) {
            tracing::info!("the API server does not send lists as the beginning of a watch; they are read in pages");
        }
    }

    pub(super) fn event(&self, kind: &'static str) {
        self.lock().entry(kind).or_default().last_event = Some(Instant::now());
    }

    pub(super) fn restart(&self, kind: &'static str) {
        self.lock().entry(kind).or_default().restarts += 1;
    }

    /// The state of every watch.
    pub fn view(&self) -> Vec<WatchView> {
        let counts = self.lock();
        let views = counts.iter().map(|(kind, count)| WatchView {
            kind,
            last_event: count.last_event.map(|at| at.elapsed()),
            restarts: count.restarts,
        });
        views.collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Count>> {
        // Each entry is complete.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
