//! Schedules the privileged tests of the machine: so many at once as it has CPUs for, and some of them alone.
//!
//! Every such test begins in a thread of its own and waits for its permit. A test that waits for silence, or measures time
//! or loss, names `exclusive` in [`require!`](crate::require): it runs while no other one does, and after all that may run
//! beside others. Of the others, each takes two slots: three if it names `steady`, as it fails on a slow machine, and one if
//! it names `waiting`, as it mostly waits for a whole cluster.
//!
//! Permits are locked files, so that all test programs of the machine share them, and the end of a process frees its own.

use std::{
    env,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How often a test that waits looks for free slots.
const POLL: Duration = Duration::from_millis(50);
/// Slots for each CPU.
const PER_CPU: usize = 3;

/// How a test runs beside others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Alone.
    Exclusive,
    /// With three slots.
    Steady,
    /// With two slots.
    Busy,
    /// With one slot.
    Waiting,
}

impl Share {
    const fn slots(self) -> usize {
        match self {
            Self::Exclusive => 0,
            Self::Waiting => 1,
            Self::Busy => 2,
            Self::Steady => 3,
        }
    }
}

/// The slots of the machine.
#[derive(Debug)]
struct Slots {
    folder: PathBuf,
    count: usize,
    /// Held by the one thread of this process that looks for slots.
    looking: Mutex<()>,
}

impl Slots {
    fn new(folder: &Path, count: usize) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            count,
            looking: Mutex::new(()),
        })
    }

    /// Waits until a test may run; it may until the files are closed.
    fn acquire(&self, share: Share) -> io::Result<Vec<File>> {
        if share == Share::Exclusive {
            // A test with a slot has this lock too, shared.
            let alone = self.open("alone")?;
            alone.lock()?;
            return Ok(vec![alone]);
        }
        let _one_looks = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let together = self.open("alone")?;
            together.lock_shared()?;
            let mut held = vec![together];
            for number in 0..self.count {
                if held.len() > share.slots() {
                    break;
                }
                let slot = self.open(&format!("slot-{number}"))?;
                if slot.try_lock().is_ok() {
                    held.push(slot);
                }
            }
            if held.len() > share.slots() {
                return Ok(held);
            }
            drop(held);
            thread::sleep(POLL);
        }
    }

    fn open(&self, name: &str) -> io::Result<File> {
        let path = self.folder.join(name);
        File::options().create(true).truncate(false).write(true).open(path)
    }
}

/// A test's permission to run, until it is dropped. Then it prints a line `TIME`, which `cargo xtask test` collects.
#[derive(Debug)]
pub struct Permit {
    share: Share,
    test: &'static str,
    waited: Duration,
    started: Instant,
    _held: Vec<File>,
}

impl Permit {
    /// Waits until the calling test may run. A test takes one permit: a second one could deadlock.
    pub fn acquire(share: Share, test: &'static str) -> Self {
        static SLOTS: OnceLock<Slots> = OnceLock::new();
        let asked = Instant::now();
        let slots = SLOTS.get_or_init(|| {
            let cpus = thread::available_parallelism().map_or(1, usize::from);
            Slots::new(&env::temp_dir().join("kni-test-permits"), PER_CPU * cpus).expect("a folder for permits")
        });
        let held = slots.acquire(share).expect("the files of permits can be locked");
        let started = Instant::now();
        Self {
            share,
            test,
            waited: started - asked,
            started,
            _held: held,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let (took, waited) = (self.started.elapsed().as_secs_f64(), self.waited.as_secs_f64());
        println!("TIME {took:.1} {} ({:?}, waited {waited:.1} s)", self.test, self.share);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    };

    use super::*;

    const COUNT: usize = 6;

    fn slots(test: &str) -> (PathBuf, Slots) {
        let folder = env::temp_dir().join(format!("kni-test-permits-{test}-{}", std::process::id()));
        let slots = Slots::new(&folder, COUNT).unwrap();
        (folder, slots)
    }

    /// Each waits for the others with its slot, so that this does not depend on the speed of the machine.
    #[test]
    fn as_many_run_at_once_as_there_are_slots() {
        let (folder, slots) = slots("together");
        let slots = Arc::new(slots);
        let (done, finished) = mpsc::channel();
        thread::spawn(move || {
            let together = Barrier::new(COUNT);
            thread::scope(|scope| {
                for _ in 0..COUNT {
                    scope.spawn(|| {
                        let _held = slots.acquire(Share::Waiting).unwrap();
                        together.wait();
                    });
                }
            });
            done.send(())
        });
        finished
            .recv_timeout(Duration::from_mins(1))
            .expect("all slots are taken at the same time");
        fs::remove_dir_all(folder).unwrap();
    }

    /// As two programs would do it, each with a queue of its own.
    #[test]
    fn no_more_run_at_once_and_an_exclusive_one_runs_alone() {
        let (folder, one) = slots("others");
        let other = Slots::new(&folder, COUNT).unwrap();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..24 {
                let (inside, slots) = (&inside, if number % 2 == 0 { &one } else { &other });
                scope.spawn(move || {
                    let share = [Share::Exclusive, Share::Steady, Share::Busy, Share::Waiting][number % 4];
                    let _held = slots.acquire(share).unwrap();
                    let taken = if share == Share::Exclusive {
                        COUNT
                    } else {
                        share.slots()
                    };
                    inside.fetch_add(taken, SeqCst);
                    thread::sleep(Duration::from_millis(5));
                    let with_others = inside.fetch_sub(taken, SeqCst);
                    assert!(with_others <= COUNT, "{share:?}: {with_others} of {COUNT}");
                });
            }
        });
        fs::remove_dir_all(folder).unwrap();
    }
}
