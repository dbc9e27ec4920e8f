//! Schedules the tests of a binary: shared tests run concurrently, an exclusive test runs alone.
//!
//! Tests run in threads of one process. A test that waits for silence, measures time or starts a whole cluster names
//! `exclusive` in [`require!`](crate::require) and runs while no other privileged test of its binary is running.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

static RUNNING: Mutex<Running> = Mutex::new(Running {
    shared: 0,
    exclusive: false,
    waiting: 0,
});
static CHANGED: Condvar = Condvar::new();

#[derive(Debug)]
struct Running {
    /// Running shared tests.
    shared: usize,
    /// Whether a test runs alone.
    exclusive: bool,
    /// Waiting exclusive tests; they take precedence, because shared tests would otherwise never leave a gap.
    waiting: usize,
}

/// A test's permission to run, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    exclusive: bool,
}

impl Permit {
    /// Waits until the calling test may run. A test takes one permit: a second one could deadlock.
    pub fn acquire(exclusive: bool) -> Self {
        let mut running = lock();
        if exclusive {
            running.waiting += 1;
            running = wait_while(running, |running| running.exclusive || running.shared > 0);
            running.waiting -= 1;
            running.exclusive = true;
        } else {
            running = wait_while(running, |running| running.exclusive || running.waiting > 0);
            running.shared += 1;
        }
        drop(running);
        Self { exclusive }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut running = lock();
        if self.exclusive {
            running.exclusive = false;
        } else {
            running.shared -= 1;
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
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        thread,
        time::Duration,
    };

    use super::Permit;

    /// The only test of this binary that takes more than one permit at a time, each in a separate thread.
    #[test]
    fn an_exclusive_test_runs_alone_and_all_come_to_run() {
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for number in 0..24 {
                let (inside, most) = (&inside, &most);
                scope.spawn(move || {
                    let exclusive = number % 3 == 0;
                    let _permit = Permit::acquire(exclusive);
                    let others = inside.fetch_add(1, SeqCst);
                    if exclusive {
                        assert_eq!(others, 0, "another test runs");
                    } else {
                        most.fetch_max(others + 1, SeqCst);
                    }
                    thread::sleep(Duration::from_millis(5));
                    if exclusive {
                        assert_eq!(inside.load(SeqCst), 1, "another test began");
                    }
                    inside.fetch_sub(1, SeqCst);
                });
            }
        });
        assert!(most.load(SeqCst) > 1, "the others never ran at the same time");
    }
}
