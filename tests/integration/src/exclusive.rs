//! Schedules the privileged tests of the machine: so many at once as it has CPUs for, and some of them alone.
//!
//! Every such test begins in a thread of its own and waits for its permit. A test that waits for silence, or measures
//! time or loss, names `exclusive` in [`require!`](crate::require): it runs while no other one does, and after all that
//! may run beside others. Of the others, each takes two slots: three if it names `steady`, as it fails on a slow
//! machine, and one if it names `waiting`, as it mostly waits for a whole cluster. Tests also wait for each other's
//! timers and for the kernel: while the CPUs are idle for much of a second, one more may begin, in slots that are
//! taken only then.
//!
//! Of the tests that wait, the one with the longest recorded time begins first (module `queue`), so that no long test
//! is left for the end.
//!
//! Permits are locked files, so that all test programs of the machine share them, and the end of a process frees its
//! own.

use std::{
    env,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use self::queue::Queue;
use crate::cpu_times::CpuTimes;

mod queue;

/// How often a test that waits looks for free slots.
const POLL: Duration = Duration::from_millis(50);
/// Slots for each CPU.
const PER_CPU: usize = 3;
/// Slots for each CPU with those that are taken only while the CPUs are idle.
const PER_IDLE_CPU: usize = 6;
/// How long the CPUs are observed, and the share of this time in which they must be idle, in percent.
const OBSERVED: Duration = Duration::from_secs(1);
const IDLE_PERCENT: u64 = 45;

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
    /// With those that are taken only while the CPUs are idle.
    most: usize,
    /// The tests of this process that wait: one of them looks for slots.
    queue: Queue,
}

impl Slots {
    fn new(folder: &Path, count: usize, most: usize) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            count,
            most,
            queue: Queue::new(folder),
        })
    }

    /// Waits until a test may run; it may until the files are closed.
    fn acquire(&self, share: Share, test: &str) -> io::Result<Vec<File>> {
        if share == Share::Exclusive {
            // A test with a slot has this lock too, shared.
            let alone = self.open("alone")?;
            alone.lock()?;
            return Ok(vec![alone]);
        }
        let mut place = self.queue.enter(test);
        // One of the machine: those that begin are busy at first, and the next one observes that.
        let one_of_machine = self.open("observer")?;
        let mut cpus = None;
        loop {
            place.wait();
            if cpus.is_none() && one_of_machine.try_lock().is_ok() {
                cpus = Some(Observed::begin());
            }
            let idle = cpus.as_mut().is_some_and(Observed::is_idle);
            let count = if idle { self.most } else { self.count };
            let together = self.open("alone")?;
            together.lock_shared()?;
            let mut held = vec![together];
            for number in 0..count {
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

/// The times of all CPUs, from a moment on.
#[derive(Debug)]
struct Observed {
    since: Instant,
    times: Option<CpuTimes>,
}

impl Observed {
    fn begin() -> Self {
        Self {
            since: Instant::now(),
            times: CpuTimes::read().ok(),
        }
    }

    /// Whether the CPUs were idle enough for the last [`OBSERVED`]. Then observes anew.
    fn is_idle(&mut self) -> bool {
        if self.since.elapsed() < OBSERVED {
            return false;
        }
        let before = std::mem::replace(self, Self::begin()).times;
        before
            .zip(self.times)
            .is_some_and(|(before, now)| now.idle_percent_since(before) >= IDLE_PERCENT)
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
            let folder = env::temp_dir().join("kni-test-permits");
            Slots::new(&folder, PER_CPU * cpus, PER_IDLE_CPU * cpus).expect("a folder for permits")
        });
        let held = slots.acquire(share, test).expect("the files of permits can be locked");
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
        let slots = Slots::new(&folder, COUNT, COUNT).unwrap();
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
                        let _held = slots.acquire(Share::Waiting, "some").unwrap();
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
        let other = Slots::new(&folder, COUNT, COUNT).unwrap();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..24 {
                let (inside, slots) = (&inside, if number % 2 == 0 { &one } else { &other });
                scope.spawn(move || {
                    let share = [Share::Exclusive, Share::Steady, Share::Busy, Share::Waiting][number % 4];
                    let _held = slots.acquire(share, "some").unwrap();
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
