//! Supervises background tasks: reports the first one that ends, and those that make no progress.
//! Layer: service.
//!
//! A program whose task has ended must exit: a new process takes over without an interruption, while a program that
//! runs on without one of its tasks stays incomplete for as long as it runs.

mod completion;
mod fault;
mod pulse;

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub use completion::{Panicked, ToCompletion, in_place, in_place_until_done, to_completion};
pub use fault::{Fault, InvalidFault};
pub use pulse::{progress, waiting};
use tokio::sync::{oneshot, watch};

use self::pulse::Pulse;

/// How long a task may work without progress, unless its caller allows more.
pub const LIMIT: Duration = Duration::from_mins(1);

/// Longest interval at which a waiting task shows that the runtime still runs it.
const LONGEST_TICK: Duration = Duration::from_secs(5);

/// A task that has ended although it must run as long as the program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("task {task} {how}")]
pub struct Ended {
    /// The task.
    pub task: &'static str,
    /// How it ended.
    pub how: End,
}

/// How a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It panicked. The panic hook has logged the message and the location.
    Panicked,
    /// It returned.
    Returned,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panicked => "panicked",
            Self::Returned => "ended",
        })
    }
}

/// The state of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskView {
    /// The task.
    pub task: &'static str,
    /// Time since it last made progress. A task that waits for work makes progress while the runtime runs it.
    pub last_run: Duration,
    /// Whether that is longer than allowed.
    pub stale: bool,
}

/// The tasks of a program. Clones share them.
#[derive(Debug, Clone)]
pub struct Tasks {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    limit: Duration,
    tasks: Mutex<BTreeMap<&'static str, Task>>,
    ended: watch::Sender<Option<Ended>>,
}

#[derive(Debug)]
struct Task {
    pulse: Arc<Pulse>,
    limit: Duration,
    fault: Option<oneshot::Sender<Fault>>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self::new(LIMIT)
    }
}

impl Tasks {
    /// No tasks yet. `limit` is how long each may work without progress.
    pub fn new(limit: Duration) -> Self {
        Self {
            shared: Arc::new(Shared {
                limit,
                tasks: Mutex::default(),
                ended: watch::Sender::new(None),
            }),
        }
    }

    /// Runs `work`, which must not end before the program does. `name` identifies it in logs, metrics and probes; a
    /// second task of one name takes the place of the first one there. The work calls [`waiting`] where it waits for
    /// something to do. Call it inside a tokio runtime.
    pub fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.start(name, self.shared.limit, false, work);
    }

    /// [`Self::spawn`] of work whose steps take up to `limit`. Where the tasks have another limit than [`LIMIT`], in
    /// tests, this one changes in proportion.
    pub fn spawn_slow(&self, name: &'static str, limit: Duration, work: impl Future<Output = ()> + Send + 'static) {
        self.start(name, self.scaled(limit), false, work);
    }

    /// [`Self::spawn_slow`] of work that may return when it is done, but not panic.
    pub fn spawn_finite_slow(
        &self,
        name: &'static str,
        limit: Duration,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.start(name, self.scaled(limit), true, work);
    }

    fn scaled(&self, limit: Duration) -> Duration {
        let scale = self.shared.limit.as_secs_f64() / LIMIT.as_secs_f64();
        limit.mul_f64(scale).max(self.shared.limit)
    }

    /// [`Self::spawn`] of work that may return when it is done, but not panic.
    pub fn spawn_finite(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.start(name, self.shared.limit, true, work);
    }

    fn start(
        &self,
        name: &'static str,
        limit: Duration,
        finite: bool,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let pulse = Arc::new(Pulse::new());
        let (fault, faults) = oneshot::channel();
        let task = Task {
            pulse: Arc::clone(&pulse),
            limit,
            fault: Some(fault),
        };
        self.tasks().insert(name, task);
        let tick = (self.shared.limit / 8).min(LONGEST_TICK);
        let running = tokio::spawn(pulse::run((Arc::clone(&pulse), tick), work, fault::after(faults)));
        let tasks = self.clone();
        tokio::spawn(async move {
            let how = match running.await {
                Ok(()) if finite => return tasks.remove(name, &pulse),
                Ok(()) => End::Returned,
                Err(error) if error.is_panic() => End::Panicked,
                // The runtime stops.
                Err(_cancelled) => return,
            };
            tasks.end(Ended { task: name, how });
        });
    }

    fn remove(&self, name: &'static str, pulse: &Arc<Pulse>) {
        let mut tasks = self.tasks();
        if tasks.get(name).is_some_and(|task| Arc::ptr_eq(&task.pulse, pulse)) {
            tasks.remove(name);
        }
    }

    fn end(&self, ended: Ended) {
        self.shared.ended.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert(ended);
            is_first
        });
    }

    /// Waits until a task ends; returns the first one.
    pub async fn ended(&self) -> Ended {
        let mut ended = self.shared.ended.subscribe();
        loop {
            if let Some(ended) = ended.borrow_and_update().clone() {
                return ended;
            }
            if ended.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// All tasks, by name.
    pub fn view(&self) -> Vec<TaskView> {
        let tasks = self.tasks();
        let views = tasks.iter().map(|(name, task)| {
            let last_run = task.pulse.last_run();
            TaskView {
                task: name,
                last_run,
                stale: last_run > task.limit,
            }
        });
        views.collect()
    }

    /// The names of the tasks that make no progress.
    pub fn stale(&self) -> Vec<&'static str> {
        let stale = self.view().into_iter().filter(|view| view.stale);
        stale.map(|view| view.task).collect()
    }

    /// Makes a task fail, for tests. Returns whether there is such a task, and it had no fault yet.
    pub fn inject(&self, task: &str, fault: Fault) -> bool {
        let sender = self.tasks().get_mut(task).and_then(|task| task.fault.take());
        sender.is_some_and(|sender| sender.send(fault).is_ok())
    }

    fn tasks(&self) -> MutexGuard<'_, BTreeMap<&'static str, Task>> {
        // Each entry is complete.
        self.shared.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn the_first_task_that_ends_is_named() {
        let tasks = Tasks::default();
        tasks.spawn("steady", waiting(pending::<()>()));
        tasks.spawn_finite("finite", async {});
        tasks.spawn("short", async {});
        let ended = tasks.ended().await;
        assert_eq!(ended.to_string(), "task short ended");
        assert!(tasks.inject("steady", Fault::Panic));
        assert_eq!(tasks.ended().await, ended, "the first one stays");
    }

    #[tokio::test]
    async fn a_panic_is_told_from_an_end() {
        let tasks = Tasks::default();
        tasks.spawn("bad", waiting(pending::<()>()));
        assert!(!tasks.inject("unknown", Fault::Panic));
        assert!(tasks.inject("bad", Fault::Panic));
        assert!(!tasks.inject("bad", Fault::End), "once");
        assert_eq!(tasks.ended().await.to_string(), "task bad panicked");
    }

    #[tokio::test]
    async fn work_without_progress_is_stale_and_waiting_is_not() {
        let tasks = Tasks::new(Duration::from_millis(400));
        tasks.spawn("idle", waiting(pending::<()>()));
        tasks.spawn("stuck", pending::<()>());
        tasks.spawn_slow("slow", LIMIT * 60, pending::<()>());
        tasks.spawn("busy", async {
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                progress();
            }
        });
        tasks.spawn("hung", waiting(pending::<()>()));
        assert!(tasks.stale().is_empty());
        assert!(tasks.inject("hung", Fault::Hang));
        let found = async {
            while tasks.stale() != ["hung", "stuck"] {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(20), found).await;
        assert!(found.is_ok(), "{:?}", tasks.view());
    }
}
