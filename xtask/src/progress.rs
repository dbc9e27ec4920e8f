//! Shows numbered steps with their elapsed time, such as `[1/4] packages ... 0:20`.

use std::{
    io::{self, IsTerminal as _, Write as _},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

/// Interval at which the line of the running step is redrawn on a terminal.
const REDRAW: Duration = Duration::from_secs(1);
/// Maximum time without a line in a log while a step runs.
const SILENCE: Duration = Duration::from_secs(10);
/// Moves to the start of the terminal's line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// The step that is running.
static RUNNING: Mutex<Option<Running>> = Mutex::new(None);

struct Running {
    label: String,
    start: Instant,
    last_line: Instant,
    detail: String,
    /// Whether the cursor is at the end of a line that has to be redrawn.
    is_drawn: bool,
}

/// Counts the steps of one command.
pub(crate) struct Progress {
    next: usize,
    total: usize,
}

impl Progress {
    /// Starts the count for `total` steps.
    pub(crate) fn new(total: usize) -> Self {
        Self { next: 1, total }
    }

    /// Runs a step: a line before, the elapsed time while it runs, a line after.
    ///
    /// On a terminal the elapsed time is updated in place; elsewhere a line is printed after each ten seconds of
    /// silence.
    pub(crate) fn step<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let label = format!("[{}/{}] {name}", self.next, self.total);
        self.next += 1;
        let start = Instant::now();
        *running() = Some(Running {
            label: label.clone(),
            start,
            last_line: start,
            detail: String::new(),
            is_drawn: false,
        });
        say(&format!("{label} ..."));
        let result = with_ticks(work);
        let outcome = if result.is_ok() { "ok" } else { "FAILED" };
        say(&format!(
            "{label} ... {outcome} ({:.1} s)",
            start.elapsed().as_secs_f64()
        ));
        *running() = None;
        result
    }
}

/// Prints a line; clears the line of the running step first, if it is drawn.
pub(crate) fn say(line: &str) {
    let mut current = running();
    let mut clear = "";
    if let Some(step) = current.as_mut() {
        step.last_line = Instant::now();
        if std::mem::take(&mut step.is_drawn) {
            clear = CLEAR;
        }
    }
    println!("{clear}{line}");
    flush();
}

/// Sets the text after the elapsed time of the running step.
pub(crate) fn detail(text: &str) {
    if let Some(step) = running().as_mut() {
        text.clone_into(&mut step.detail);
    }
}

fn running() -> MutexGuard<'static, Option<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` while another thread shows the elapsed time.
fn with_ticks<T>(work: impl FnOnce() -> T) -> T {
    let (done, finished) = mpsc::channel::<()>();
    let is_terminal = io::stdout().is_terminal();
    thread::scope(|scope| {
        scope.spawn(move || {
            while finished.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
                tick(is_terminal);
            }
        });
        let result = work();
        drop(done);
        result
    })
}

fn tick(is_terminal: bool) {
    let mut current = running();
    let Some(step) = current.as_mut() else { return };
    if is_terminal {
        print!("{CLEAR}{}", state(&step.label, step.start.elapsed(), &step.detail));
        step.is_drawn = true;
    } else if step.last_line.elapsed() >= SILENCE {
        println!("{}", state(&step.label, step.start.elapsed(), &step.detail));
        step.last_line = Instant::now();
    }
    flush();
}

fn state(label: &str, elapsed: Duration, detail: &str) -> String {
    let seconds = elapsed.as_secs();
    let text = format!("{label} ... {}:{:02} {detail}", seconds / 60, seconds % 60);
    text.trim_end().to_owned()
}

fn flush() {
    // The next print detects a closed standard output.
    io::stdout().flush().unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_step_shows_minutes_and_what_is_done() {
        let label = "[2/4] agent";
        assert_eq!(state(label, Duration::from_secs(9), ""), "[2/4] agent ... 0:09");
        assert_eq!(
            state(label, Duration::from_secs(125), "17/380 crates"),
            "[2/4] agent ... 2:05 17/380 crates"
        );
    }

    #[test]
    fn a_step_returns_what_its_work_returns() {
        let mut progress = Progress::new(2);
        assert_eq!(progress.step("one", || Ok(7)).unwrap(), 7);
        assert!(progress.step("two", || -> Result<()> { anyhow::bail!("no") }).is_err());
        assert!(running().is_none());
    }
}
