//! Shows numbered steps with their time, `[1/4] packages ... ok (3.2 s)`.

use std::{
    io::{self, Write},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

/// A quiet step shows one dot per interval, so that a long download does not look like a hang.
const DOT_INTERVAL: Duration = Duration::from_secs(2);

/// Counts the steps of one command.
pub(crate) struct Progress {
    next: usize,
    total: usize,
}

impl Progress {
    /// Starts to count; `total` steps will follow.
    pub(crate) fn new(total: usize) -> Self {
        Self { next: 1, total }
    }

    /// Runs a step that prints nothing itself: one line, with a dot every two seconds.
    pub(crate) fn quiet<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        print!("{} ... ", self.label(name));
        flush();
        let start = Instant::now();
        let result = with_dots(work);
        println!("{} ({})", word(&result), seconds(start.elapsed()));
        result
    }

    /// Runs a step that prints: a line before, a line after.
    pub(crate) fn loud<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let label = self.label(name);
        println!("{label} ...");
        flush();
        let start = Instant::now();
        let result = work();
        println!("{label} ... {} ({})", word(&result), seconds(start.elapsed()));
        result
    }

    fn label(&mut self, name: &str) -> String {
        let label = format!("[{}/{}] {name}", self.next, self.total);
        self.next += 1;
        label
    }
}

fn with_dots<T>(work: impl FnOnce() -> T) -> T {
    let (done, finished) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            while finished.recv_timeout(DOT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                print!(".");
                flush();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

fn word<T>(result: &Result<T>) -> &'static str {
    if result.is_ok() { "ok" } else { "FAILED" }
}

fn seconds(elapsed: Duration) -> String {
    format!("{:.1} s", elapsed.as_secs_f64())
}

fn flush() {
    // A closed standard output is noticed by the next print.
    io::stdout().flush().unwrap_or_default();
}
