//! Schedules the tests of a binary: shared tests run concurrently, an exclusive test runs alone.
//!
//! Tests run in threads of one process, of which there are two for each CPU. A test that waits for silence, or measures
//! time or loss, names `exclusive` in [`require!`](crate::require) and runs while no other privileged test of its binary
//! is running. Of the others, one runs on each CPU; of those that name `waiting`, as they mostly wait for a whole cluster,
//! two.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

static RUNNING: Mutex<Running> = Mutex::new(Running {
    halves: 0,
    exclusive: false,
    waiting: 0,
});
static CHANGED: Condvar = Condvar::new();

/// How a test runs beside others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Alone.
    Exclusive,
    /// With a CPU of its own.
    Cpu,
    /// With half a CPU.
    HalfCpu,
}

impl Share {
    const fn halves(self) -> usize {
        match self {
            Self::Exclusive => 0,
            Self::HalfCpu => 1,
            Self::Cpu => 2,
        }
    }
}

#[derive(Debug)]
struct Running {
    /// The shares of the running shared tests, in halves of a CPU.
    halves: usize,
    /// Whether a test runs alone.
    exclusive: bool,
    /// Waiting exclusive tests; they take precedence, because shared tests would otherwise never leave a gap.
    waiting: usize,
}

/// A test's permission to run, until it is dropped. Then it prints a line `TIME`, which `cargo xtask test` collects.
#[derive(Debug)]
pub struct Permit {
    share: Share,
    test: &'static str,
    waited: Duration,
    started: Instant,
}

impl Permit {
    /// Waits until the calling test may run. A test takes one permit: a second one could deadlock.
    pub fn acquire(share: Share, test: &'static str) -> Self {
        let asked = Instant::now();
        let mut running = lock();
        if share == Share::Exclusive {
            running.waiting += 1;
            running = wait_while(running, |running| running.exclusive || running.halves > 0);
            running.waiting -= 1;
            running.exclusive = true;
        } else {
            let all = 2 * thread::available_parallelism().map_or(1, usize::from);
            running = wait_while(running, |running| {
                running.exclusive || running.waiting > 0 || running.halves + share.halves() > all
            });
            running.halves += share.halves();
        }
        drop(running);
        let started = Instant::now();
        Self {
            share,
            test,
            waited: started - asked,
            started,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let (took, waited) = (self.started.elapsed().as_secs_f64(), self.waited.as_secs_f64());
        println!("TIME {took:.1} {} ({:?}, waited {waited:.1} s)", self.test, self.share);
        let mut running = lock();
        if self.share == Share::Exclusive {
            running.exclusive = false;
        } else {
            running.halves -= self.share.halves();
        }
        drop(running);
        CHANGED.notify_all();
    }
}

/// A failed test leaves the counts consistent.
fn lock() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_while(
    running: MutexGuard<'static, Running>,
    condition: impl FnMut(&mut Running) -> bool,
) -> MutexGuard<'static, Running> {
    CHANGED
        .wait_while(running, condition)
        .unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Barrier,
            atomic::{AtomicUsize, Ordering::SeqCst},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use super::{Permit, Share};

    /// The only test of this binary that takes more than one permit at a time, each in a separate thread.
    #[test]
    fn an_exclusive_test_runs_alone_and_others_as_far_as_there_are_cpus() {
        let all = 2 * thread::available_parallelism().map_or(1, usize::from);
        as_many_halves_as_there_are_run_at_once(all);
        none_runs_beside_more_than_that(all);
    }

    /// Each waits for the others with its permit, so that this does not depend on the speed of the machine.
    fn as_many_halves_as_there_are_run_at_once(all: usize) {
        let (done, finished) = mpsc::channel();
        thread::spawn(move || {
            let together = Barrier::new(all);
            thread::scope(|scope| {
                for _ in 0..all {
                    scope.spawn(|| {
                        let _permit = Permit::acquire(Share::HalfCpu, "half");
                        together.wait();
                    });
                }
            });
            done.send(())
        });
        finished
            .recv_timeout(Duration::from_mins(1))
            .expect("all halves are taken at the same time");
    }

    fn none_runs_beside_more_than_that(all: usize) {
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..24 {
                let inside = &inside;
                scope.spawn(move || {
                    let share = [Share::Exclusive, Share::Cpu, Share::HalfCpu][number % 3];
                    let _permit = Permit::acquire(share, "any");
                    let halves = if share == Share::Exclusive { all } else { share.halves() };
                    inside.fetch_add(halves, SeqCst);
                    thread::sleep(Duration::from_millis(5));
                    let with_others = inside.fetch_sub(halves, SeqCst);
                    assert!(with_others <= all, "{share:?}: {with_others} of {all}");
                });
            }
        });
    }
}
