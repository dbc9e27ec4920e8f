//! Holds requests back until their priority level, the budget and the number of unanswered requests allow them.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{AcquireError, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep_until},
};

use super::level::{Entry, Level, Pauses};

/// The average interval of an agent's requests: as many as a kubelet's.
const INTERVAL: Duration = Duration::from_millis(20);
/// So many more may be sent at once after a quiet time.
const BURST: u32 = 100;
/// Requests that wait for an answer at once: so many are refused before the agent knows of it.
pub(super) const UNANSWERED: usize = 6;
/// Those of one priority level: it leaves room for the others.
pub(super) const UNANSWERED_OF_LEVEL: usize = 4;

/// A priority level of the API server: those of `deploy/base/flow-schemas.yaml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    Watches,
    Critical,
    Reports,
}

/// What the requests of an agent share.
#[derive(Debug)]
pub(super) struct Gate {
    watches: Queue,
    critical: Queue,
    reports: Queue,
    room: Arc<Semaphore>,
    budget: Mutex<Budget>,
    /// Interruptions of watches.
    interrupted: Mutex<watch::Receiver<()>>,
    pauses: Pauses,
}

/// The requests of one priority level.
#[derive(Debug)]
struct Queue {
    level: Mutex<Level>,
    /// Held by the request that goes first.
    turn: Arc<tokio::sync::Mutex<()>>,
    room: Arc<Semaphore>,
}

/// The right to send a request. Others may follow when it is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    turn: Option<OwnedMutexGuard<()>>,
    _room: Room,
}

/// The place of a request among the unanswered ones, of its level and of all. Semaphores that are closed give none.
type Room = [Result<OwnedSemaphorePermit, AcquireError>; 2];

impl Pass {
    /// Whether the request goes first: its answer shows whether the others may follow.
    pub(super) const fn goes_first(&self) -> bool {
        self.turn.is_some()
    }
}

impl Queue {
    fn new() -> Self {
        Self {
            level: Mutex::default(),
            turn: Arc::default(),
            room: Arc::new(Semaphore::new(UNANSWERED_OF_LEVEL)),
        }
    }

    fn level(&self) -> MutexGuard<'_, Level> {
        // It is consistent after each statement.
        self.level.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self) -> Entry {
        self.level().enter(Instant::now())
    }
}

impl Gate {
    /// A gate for an agent whose watches notify of interruptions.
    pub(super) fn new(interrupted: watch::Receiver<()>, pauses: Pauses) -> Self {
        Self {
            watches: Queue::new(),
            critical: Queue::new(),
            reports: Queue::new(),
            room: Arc::new(Semaphore::new(UNANSWERED)),
            budget: Mutex::default(),
            interrupted: Mutex::new(interrupted),
            pauses,
        }
    }

    /// Waits until a request may be sent; an error is how long there will be none.
    pub(super) async fn enter(&self, priority: Priority) -> Result<Pass, Duration> {
        let queue = self.queue(priority);
        loop {
            self.note_interruptions();
            let mut turn = None;
            match queue.entry() {
                Entry::Open => {}
                Entry::Probe => {
                    turn = Some(Arc::clone(&queue.turn).lock_owned().await);
                    if queue.entry() != Entry::Probe {
                        continue;
                    }
                }
                Entry::Closed(wait) => return Err(wait),
            }
            let room = self.room(queue).await;
            // Other answers may have arrived meanwhile.
            match queue.entry() {
                Entry::Closed(wait) => return Err(wait),
                Entry::Probe if turn.is_none() => {}
                Entry::Probe => return Ok(Pass { turn, _room: room }),
                Entry::Open => {
                    return Ok(Pass {
                        turn: None,
                        _room: room,
                    });
                }
            }
        }
    }

    async fn room(&self, queue: &Queue) -> Room {
        let at = {
            let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
            budget.next(Instant::now())
        };
        sleep_until(at).await;
        [
            Arc::clone(&queue.room).acquire_owned().await,
            Arc::clone(&self.room).acquire_owned().await,
        ]
    }

    /// Notes that a request that went first was accepted.
    pub(super) fn accepted(&self, priority: Priority) {
        self.queue(priority).level().accepted();
    }

    /// Notes that a request was refused with the demand to wait.
    pub(super) fn refused(&self, priority: Priority, wait: Duration, went_first: bool) {
        // An overloaded API server refuses the other levels, too, as a rule: there one request finds out.
        self.unconfirm();
        let refusal = (went_first, self.pauses);
        self.queue(priority).level().refused(Instant::now(), wait, refusal);
    }

    /// A watch that is interrupted does not come alone, and tries again at once.
    fn note_interruptions(&self) {
        let is_interrupted = {
            let mut interrupted = self.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
            // Without a sender there are no watches.
            let is_interrupted = interrupted.has_changed().unwrap_or_default();
            if is_interrupted {
                interrupted.mark_unchanged();
            }
            is_interrupted
        };
        if is_interrupted {
            self.unconfirm();
        }
    }

    fn unconfirm(&self) {
        for queue in [&self.watches, &self.critical, &self.reports] {
            queue.level().unconfirm();
        }
    }

    const fn queue(&self, priority: Priority) -> &Queue {
        match priority {
            Priority::Watches => &self.watches,
            Priority::Critical => &self.critical,
            Priority::Reports => &self.reports,
        }
    }
}

/// When the next request may be sent.
#[derive(Debug, Default)]
struct Budget(Option<Instant>);

impl Budget {
    /// When a request of now may be sent.
    fn next(&mut self, now: Instant) -> Instant {
        let full = now.checked_sub(INTERVAL * BURST).unwrap_or(now);
        let at = self.0.map_or(full, |next| next.max(full));
        self.0 = Some(at + INTERVAL);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_allows_bursts_and_no_more_on_average() {
        let mut budget = Budget::default();
        let now = Instant::now() + Duration::from_mins(1);
        let waits = |budget: &mut Budget, now: Instant| -> Vec<Duration> {
            let all = (0..200).map(|_request| budget.next(now).saturating_duration_since(now));
            all.collect()
        };
        let first = waits(&mut budget, now);
        assert!(first[..=100].iter().all(Duration::is_zero), "{first:?}");
        assert_eq!(first[199], INTERVAL * 99);
        let later = waits(&mut budget, now + INTERVAL * 100);
        assert_eq!(later[0], Duration::ZERO);
        assert_eq!(later[199], INTERVAL * 199);
    }
}
