//! Runs the steps of interfaces at the same time, one for each interface, and delays those that failed.

use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    sync::Arc,
    time::Duration,
};

use kni_model::SandboxId;
use tokio::{
    sync::Semaphore,
    task::{Id, JoinSet},
    time::Instant,
};

use super::Step;

/// Maximum number of steps that run at the same time. Several times the number that the kernel carries out at once, so
/// that slow ones, such as those of plugins, leave room for others.
const AT_ONCE: usize = 64;
/// Pause after the first failure of a step; each additional one doubles it, up to [`LONGEST_PAUSE`].
const SHORTEST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// The steps that run or have failed.
pub(super) struct Work {
    running: JoinSet<Result<(), String>>,
    steps: HashMap<Id, Step>,
    failed: BTreeMap<SandboxId, Failed>,
    room: Arc<Semaphore>,
}

/// A step that failed.
#[derive(Debug)]
struct Failed {
    step: Step,
    reason: String,
    pause: Duration,
    retry_at: Instant,
}

impl Default for Work {
    fn default() -> Self {
        Self {
            running: JoinSet::new(),
            steps: HashMap::new(),
            failed: BTreeMap::new(),
            room: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }
}

impl Work {
    /// Begins a step, unless one runs for the same interface, or the same step failed recently.
    pub(super) fn begin<F>(&mut self, step: Step, run: impl FnOnce(Step) -> F)
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        if self.steps.values().any(|running| running.sandbox() == step.sandbox()) {
            return;
        }
        let failed = self.failed.get(step.sandbox());
        if failed.is_some_and(|failed| failed.step == step && failed.retry_at > Instant::now()) {
            return;
        }
        let (room, work) = (Arc::clone(&self.room), run(step.clone()));
        let task = self.running.spawn(async move {
            let _permit = room.acquire_owned().await.map_err(|closed| closed.to_string())?;
            work.await
        });
        self.steps.insert(task.id(), step);
    }

    /// Drops the failures of steps that are no longer desired.
    pub(super) fn retain(&mut self, desired: &[Step]) {
        self.failed.retain(|_, failed| desired.contains(&failed.step));
    }

    /// Resolves when a step has ended; never while none runs.
    pub(super) async fn ended(&mut self) {
        let Some(ended) = self.running.join_next_with_id().await else {
            return std::future::pending().await;
        };
        let (id, failure) = match ended {
            Ok((id, done)) => (id, done.err()),
            // A panic is a bug; the step is tried again.
            Err(error) => (error.id(), Some(error.to_string())),
        };
        let Some(step) = self.steps.remove(&id) else { return };
        match failure {
            None => drop(self.failed.remove(step.sandbox())),
            Some(reason) => self.failed(step, reason),
        }
    }

    /// Logs a failure as a warning where it is new: a step may fail as long as an attachment is as it is.
    fn failed(&mut self, step: Step, reason: String) {
        let before = self.failed.remove(step.sandbox()).filter(|before| before.step == step);
        let is_known = before.as_ref().is_some_and(|before| before.reason == reason);
        let pause = before.map_or(SHORTEST_PAUSE, |before| {
            before.pause.saturating_mul(2).min(LONGEST_PAUSE)
        });
        let what = match &step {
            Step::Make(_) => "add",
            Step::Take(_) => "remove",
        };
        if is_known {
            tracing::debug!(reason, retry = ?pause, "cannot {what} an additional interface");
        } else {
            tracing::warn!(reason, retry = ?pause, "cannot {what} an additional interface");
        }
        let failed = Failed {
            reason,
            pause,
            retry_at: Instant::now() + pause,
            step,
        };
        self.failed.insert(failed.step.sandbox().clone(), failed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::mpsc, time::timeout};

    use super::*;

    fn step(id: &str) -> Step {
        Step::Take(id.parse().unwrap())
    }

    /// Begins a step that fails at once; returns whether it began.
    async fn fails(work: &mut Work, id: &str) -> bool {
        let begun = work.steps.len();
        work.begin(step(id), |_| async { Err("address taken".to_owned()) });
        if work.steps.len() == begun {
            return false;
        }
        work.ended().await;
        true
    }

    #[tokio::test]
    async fn a_slow_step_holds_up_no_other() {
        let mut work = Work::default();
        let (sent, mut received) = mpsc::unbounded_channel();
        work.begin(step("slow"), |_| std::future::pending());
        for _ in 0..2 {
            let sent = sent.clone();
            work.begin(step("quick"), move |_| async move {
                sent.send(()).map_err(|error| error.to_string())
            });
        }
        timeout(Duration::from_secs(1), work.ended()).await.unwrap();
        received.recv().await.unwrap();
        assert!(received.is_empty(), "one step for each interface at a time");
        assert_eq!(work.steps.len(), 1, "the slow one still runs");
    }

    #[tokio::test]
    async fn pauses_after_failures_grow_until_the_step_changes() {
        let mut work = Work::default();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(fails(&mut work, "a").await, "the pause is over");
            assert!(!fails(&mut work, "a").await, "it waits");
            let failed = work.failed.get_mut(step("a").sandbox()).unwrap();
            pauses.push(failed.pause.as_secs());
            failed.retry_at = Instant::now();
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60, 60]);
        fails(&mut work, "a").await;
        assert!(!fails(&mut work, "a").await && fails(&mut work, "b").await);
        // The attachment was changed or removed.
        work.retain(&[step("b")]);
        assert!(fails(&mut work, "a").await);
    }

    #[tokio::test]
    async fn a_step_that_panics_counts_as_failed() {
        let mut work = Work::default();
        work.begin(step("a"), |_| async { panic!("in this test") });
        work.ended().await;
        assert!(work.steps.is_empty() && work.failed.contains_key(step("a").sandbox()));
    }
}
