//! The order in which tests that wait for slots look for them: the longest first.
//!
//! `cargo xtask test` names the file of recorded times in `KNI_TEST_TIMES`. A test that it does not contain counts as
//! one of average length; without the file the tests look in the order in which they come. In a process one test looks
//! at a time: the longest. Beside other processes, which write the length of their longest test into locked files, a
//! process whose test is shorter looks less often. It is never kept from looking: a slot that the longest test cannot
//! use stays in use.

use std::{
    cmp::Ordering,
    collections::HashMap,
    env,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

const VARIABLE: &str = "KNI_TEST_TIMES";
/// How long the first test of a process waits for the others of its process, which begin at the same time.
const GATHER: Duration = Duration::from_millis(200);
/// How much longer a test pauses that is not the longest of the machine.
const DEFER: Duration = Duration::from_millis(200);
/// How many processes can take part in the common order. One more has an order of its own.
const PROCESSES: usize = 8;
/// Characters of a length in a file.
const WIDTH: usize = 10;

/// The tests of this process that wait.
#[derive(Debug)]
pub(super) struct Queue {
    folder: PathBuf,
    lengths: Option<Lengths>,
    /// The file of this process, locked as long as it lives.
    own: Option<File>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Waiting>,
    next: u64,
    has_looker: bool,
}

/// A test that waits.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Waiting {
    seconds: f64,
    /// The number of its arrival.
    number: u64,
}

impl Waiting {
    /// By length, and among equal ones by arrival: the greatest looks first.
    fn rank(&self, other: &Self) -> Ordering {
        self.seconds
            .total_cmp(&other.seconds)
            .then(other.number.cmp(&self.number))
    }
}

/// The recorded seconds of tests.
#[derive(Debug, Default, PartialEq)]
struct Lengths {
    tests: HashMap<String, f64>,
    average: f64,
}

impl Lengths {
    fn read(path: &Path) -> Option<Self> {
        let lengths = Self::parse(&fs::read_to_string(path).ok()?);
        (!lengths.tests.is_empty()).then_some(lengths)
    }

    /// Reads the lines `"a::b" = 12.5`; all others mean nothing here.
    fn parse(text: &str) -> Self {
        let parse = |line: &str| {
            let (name, seconds) = line.strip_prefix('"')?.split_once("\" = ")?;
            let seconds: f64 = seconds.parse().ok()?;
            seconds.is_finite().then(|| (name.to_owned(), seconds))
        };
        let tests: HashMap<String, f64> = text.lines().filter_map(parse).collect();
        let count = u32::try_from(tests.len()).unwrap_or(u32::MAX);
        let average = tests.values().sum::<f64>() / f64::from(count.max(1));
        Self { tests, average }
    }

    fn of(&self, test: &str) -> f64 {
        self.tests.get(test).copied().unwrap_or(self.average)
    }
}

impl Queue {
    /// The queue of this process, with the files of all in `folder`.
    pub(super) fn new(folder: &Path) -> Self {
        let lengths = env::var_os(VARIABLE).and_then(|path| Lengths::read(Path::new(&path)));
        if lengths.is_some() {
            thread::sleep(GATHER);
        }
        Self::with(folder, lengths)
    }

    fn with(folder: &Path, lengths: Option<Lengths>) -> Self {
        let own = lengths.as_ref().and_then(|_| {
            let mut files = (0..PROCESSES).filter_map(|number| open(folder, number));
            files.find(|file| file.try_lock().is_ok())
        });
        Self {
            folder: folder.to_owned(),
            lengths,
            own,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Takes a place for `test`, until it is dropped.
    pub(super) fn enter(&self, test: &str) -> Place<'_> {
        let seconds = self.lengths.as_ref().map_or(0.0, |lengths| lengths.of(test));
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        let waiting = Waiting { seconds, number };
        state.waiting.push(waiting);
        self.announce(&state);
        Place {
            queue: self,
            waiting,
            looks: false,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the length of the longest test into the file of this process.
    fn announce(&self, state: &State) {
        let Some(own) = &self.own else { return };
        let longest = state
            .waiting
            .iter()
            .map(|waiting| waiting.seconds)
            .max_by(f64::total_cmp);
        let text = format!("{:>WIDTH$.1}", longest.unwrap_or(-1.0));
        // Without it the order is only less good.
        own.write_all_at(text.as_bytes(), 0).unwrap_or_default();
    }

    /// Whether a living process other than this one has a longer test than `seconds`.
    fn is_deferred(&self, seconds: f64) -> bool {
        self.own.is_some()
            && (0..PROCESSES).any(|number| self.longest_of(number).is_some_and(|longest| longest > seconds))
    }

    /// The length of the longest waiting test of a living process, by the number of its file.
    fn longest_of(&self, number: usize) -> Option<f64> {
        let file = File::open(self.folder.join(name(number))).ok()?;
        let mut bytes = [0; WIDTH];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let seconds = std::str::from_utf8(&bytes).ok()?.trim().parse().ok()?;
        // A file that can be locked belongs to no process. The lock ends with `file`.
        file.try_lock_shared().is_err().then_some(seconds)
    }
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct Place<'a> {
    queue: &'a Queue,
    waiting: Waiting,
    /// Whether this test is the one that looks.
    looks: bool,
}

impl Place<'_> {
    /// Waits until it is this test's turn to look. If it looked before, a longer one may look first.
    pub(super) fn wait(&mut self) {
        let mut state = self.queue.state();
        let is_longest = |state: &State| state.waiting.iter().max_by(|a, b| a.rank(b)) == Some(&self.waiting);
        if self.looks && !is_longest(&state) {
            state.has_looker = false;
            self.looks = false;
            self.queue.changed.notify_all();
        }
        while !self.looks && (state.has_looker || !is_longest(&state)) {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.has_looker = true;
        self.looks = true;
        drop(state);
        if self.queue.is_deferred(self.waiting.seconds) {
            thread::sleep(DEFER);
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        let own = self.waiting.number;
        state.waiting.retain(|waiting| waiting.number != own);
        state.has_looker &= !self.looks;
        self.queue.announce(&state);
        self.queue.changed.notify_all();
    }
}

fn name(number: usize) -> String {
    format!("longest-{number}")
}

fn open(folder: &Path, number: usize) -> Option<File> {
    let path = folder.join(name(number));
    let mut options = File::options();
    options
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
        .ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn lengths() -> Lengths {
        Lengths::parse("# seconds\n\n[node]\n\"a::short\" = 1.0\n\"b\" = 3.0\n[cri]\n\"long\" = 20.0\nnonsense = 7\n")
    }

    fn folder(test: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("kni-test-queue-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn unknown_tests_have_the_average_length() {
        let lengths = lengths();
        let is = |test: &str, seconds: f64| assert!((lengths.of(test) - seconds).abs() < 1e-9, "{test}");
        is("a::short", 1.0);
        is("long", 20.0);
        is("unknown", 8.0);
    }

    /// All three wait behind a first one, so that the order of their arrival means nothing.
    #[test]
    fn the_longest_looks_first() {
        let folder = folder("order");
        let queue = Queue::with(&folder, Some(lengths()));
        let (done, order) = mpsc::channel();
        thread::scope(|scope| {
            let mut first = queue.enter("b");
            first.wait();
            for test in ["a::short", "long", "unknown"] {
                let (done, queue) = (done.clone(), &queue);
                scope.spawn(move || {
                    let mut place = queue.enter(test);
                    place.wait();
                    done.send(test).unwrap();
                });
            }
            while queue.state().waiting.len() < 4 {
                thread::yield_now();
            }
            drop(first);
        });
        drop(done);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["long", "unknown", "a::short"]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn one_that_looked_in_vain_lets_a_longer_one_look() {
        let folder = folder("again");
        let queue = Queue::with(&folder, Some(lengths()));
        let mut short = queue.enter("a::short");
        short.wait();
        let (done, looked) = mpsc::channel();
        thread::scope(|scope| {
            let mut long = queue.enter("long");
            scope.spawn(move || {
                long.wait();
                done.send("long").unwrap();
            });
            short.wait();
            assert_eq!(looked.try_recv(), Ok("long"));
        });
        fs::remove_dir_all(folder).unwrap();
    }

    /// As two processes would do it.
    #[test]
    fn only_a_longer_test_of_a_living_process_defers() {
        let folder = folder("processes");
        let one = Queue::with(&folder, Some(lengths()));
        let other = Queue::with(&folder, Some(lengths()));
        let place = other.enter("b");
        assert!(one.is_deferred(1.0));
        assert!(!one.is_deferred(3.0));
        drop(place);
        assert!(!one.is_deferred(1.0), "it waits no longer");
        let place = other.enter("long");
        assert!(one.is_deferred(1.0));
        drop(place);
        drop(other);
        fs::write(folder.join("longest-1"), format!("{:>WIDTH$.1}", 50.0)).unwrap();
        assert!(!one.is_deferred(1.0), "a dead process waits for nothing");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn without_times_the_first_to_come_looks_first() {
        let folder = folder("none");
        let queue = Queue::with(&folder, None);
        let mut places = ["long", "b"].map(|test| queue.enter(test));
        for place in &mut places {
            assert!(!queue.is_deferred(0.0));
            place.wait();
            place.queue.state().waiting.retain(|waiting| *waiting != place.waiting);
            place.queue.state().has_looker = false;
            place.looks = false;
        }
        assert!(!folder.join("longest-0").exists());
        drop(places);
        fs::remove_dir_all(folder).unwrap();
    }
}
