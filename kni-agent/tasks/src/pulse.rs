//! Records when a task last made progress.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, MissedTickBehavior, interval};

tokio::task_local! {
    static PULSE: Arc<Pulse>;
}

/// What becomes of a task after a fault.
pub(super) enum Fate {
    End,
    Hang,
}

/// When a task last made progress.
#[derive(Debug)]
pub(super) struct Pulse {
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// When the work last made progress.
    worked: Instant,
    /// When the runtime last ran the task.
    polled: Instant,
    waiting: bool,
}

impl Pulse {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            state: Mutex::new(State {
                worked: now,
                polled: now,
                waiting: false,
            }),
        }
    }

    pub(super) fn last_run(&self) -> Duration {
        let state = *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.waiting { state.polled } else { state.worked }.elapsed()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn work(&self, waiting: bool) {
        self.change(|state| {
            state.worked = Instant::now();
            state.polled = state.worked;
            state.waiting = waiting;
        });
    }
}

/// Runs a task until it ends, and notes every `tick` that the runtime still runs it. After a fault it ends too, or is
/// never polled again.
pub(super) async fn run(
    (pulse, tick): (Arc<Pulse>, Duration),
    work: impl Future<Output = ()>,
    fault: impl Future<Output = Fate>,
) {
    let mut work = pin!(PULSE.scope(Arc::clone(&pulse), work));
    let mut fault = pin!(fault);
    let mut ticks = interval(tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = &mut work => return,
            fate = &mut fault => match fate {
                Fate::End => return,
                Fate::Hang => std::future::pending().await,
            },
            _ = ticks.tick() => pulse.change(|state| state.polled = Instant::now()),
        }
    }
}

/// Waits for something to do. The wait may take any time without making the task stale.
pub async fn waiting<F: Future>(something: F) -> F::Output {
    let pulse = PULSE.try_with(Arc::clone).ok();
    if let Some(pulse) = &pulse {
        pulse.work(true);
    }
    let done = something.await;
    if let Some(pulse) = &pulse {
        pulse.work(false);
    }
    done
}

/// Notes that the task made progress: one of several steps is complete.
pub fn progress() {
    PULSE.try_with(|pulse| pulse.work(false)).ok();
}
