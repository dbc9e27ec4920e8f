//! Runs the test programs of the workspace and sums up their output.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, bail};

use super::{
    Plan,
    programs::{self, Built, TestProgram},
    tally::{Failure, Reader, Tally, Time},
};
use crate::{
    cargo_output,
    progress::say,
    workspace::{cargo, cargo_path, root},
};

/// How many of the slowest tests are listed.
const SLOWEST: usize = 25;
/// Threads of a program whose tests wait for their permits: all of them begin at once.
const WAITING_THREADS: &str = "--test-threads=1024";

/// What the runs of test programs lead to, beside the sums.
#[derive(Default)]
pub(super) struct Outcome {
    /// Whether all programs succeeded.
    pub(super) success: bool,
    pub(super) failures: Vec<Failure>,
    pub(super) times: Vec<Time>,
}

impl Outcome {
    /// Lists the slowest tests, so that the time of a run has names.
    pub(super) fn report_times(&mut self) {
        if self.times.is_empty() {
            return;
        }
        self.times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let sum: f64 = self.times.iter().map(|time| time.seconds).sum();
        say(&format!(
            "{} privileged tests took {sum:.0} s in sum; the slowest:",
            self.times.len()
        ));
        for time in self.times.iter().take(SLOWEST) {
            say(&time.to_string());
        }
    }

    fn add(&mut self, other: Self) {
        self.success &= other.success;
        self.failures.extend(other.failures);
        self.times.extend(other.times);
    }
}

/// Runs the tests of the workspace into `tally`: first those that need no privilege, then the programs of the integration
/// tests, all at once: their tests agree among themselves how many run.
///
/// Without programs of the integration tests, only the former.
pub(super) fn tests(plan: &Plan, built: Option<Built>, tally: &mut Tally) -> Result<Outcome> {
    let Some(built) = built else {
        let mut command = cargo();
        command.args(["test", "--no-fail-fast"]).args(programs::UNPRIVILEGED);
        return sequential(&mut command, plan, tally);
    };
    let (concurrent, others): (Vec<_>, Vec<_>) = built.tests.into_iter().partition(TestProgram::is_integration);
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast", "--lib", "--bins"]);
    for target in others.iter().filter_map(|program| program.target.as_ref()) {
        command.args(["--test", target]);
    }
    // Without `--doc`: there are no doctests, `cargo xtask arch` checks that.
    let mut outcome = sequential(&mut command, plan, tally)?;
    let mut commands: Vec<Command> = concurrent
        .iter()
        .map(|program| {
            let mut command = Command::new(&program.path);
            command
                .current_dir(root().join(programs::INTEGRATION))
                .envs(&built.variables)
                .env("CARGO", cargo_path())
                .args(["--show-output", WAITING_THREADS]);
            set(&mut command, plan);
            command
        })
        .collect();
    let runs = thread::scope(|scope| {
        let runs: Vec<_> = commands
            .iter_mut()
            .map(|command| scope.spawn(|| stream(command, &say)))
            .collect();
        runs.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    for run in runs {
        // Joining fails only if the thread has panicked; its message is on the terminal already.
        let Ok(run) = run else {
            bail!("the output of a test program could not be read")
        };
        let (sum, run) = run?;
        tally.add(sum);
        outcome.add(run);
    }
    Ok(outcome)
}

/// Runs a `cargo test` whose programs follow each other.
fn sequential(command: &mut Command, plan: &Plan, tally: &mut Tally) -> Result<Outcome> {
    command.envs(cargo_output::ENVIRONMENT);
    set(command, plan);
    // Without it the output of a passed test, and so its skip, would be hidden.
    command.args(["--", "--show-output"]);
    let (sum, outcome) = stream(command, &say)?;
    tally.add(sum);
    Ok(outcome)
}

/// What tests read of the environment.
fn set(command: &mut Command, plan: &Plan) {
    command.env("KNI_REQUIRE", plan.require);
    if plan.long {
        command.env("KNI_LONG", "1");
    }
}

/// Runs `command`, passes each line to show to `show` immediately, and sums up the results.
fn stream(command: &mut Command, show: &(dyn Fn(&str) + Sync)) -> Result<(Tally, Outcome)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let sums = thread::scope(|scope| {
        let errors = scope.spawn(|| read_errors(stderr, show));
        let lines = read(stdout, show);
        errors.join().map(|errors| [lines, errors])
    });
    let Ok(sums) = sums else {
        bail!("the output of the tests could not be read")
    };
    let (mut tally, mut outcome) = (Tally::default(), Outcome::default());
    let has_result = sums.iter().any(Reader::has_result);
    for reader in sums {
        tally.add(reader.tally());
        let (failures, times) = reader.outcome();
        outcome.failures.extend(failures);
        outcome.times.extend(times);
    }
    outcome.success = child.wait().context("cannot wait for the tests")?.success();
    if outcome.success && !has_result {
        bail!("{} ended without a result", command.get_program().display());
    }
    Ok((tally, outcome))
}

fn read(stream: Option<impl Read>, show: &dyn Fn(&str)) -> Reader {
    let mut reader = Reader::default();
    let Some(stream) = stream else { return reader };
    let mut stream = BufReader::new(stream);
    let mut bytes = Vec::new();
    // Bytes, not text: a test may print arbitrary output, which must not end the reading.
    while stream.read_until(b'\n', &mut bytes).is_ok_and(|length| length > 0) {
        let text = String::from_utf8_lossy(&bytes);
        let line = text.trim_end_matches(['\n', '\r']);
        if reader.line(line) {
            show(line);
        }
        drop(text);
        bytes.clear();
    }
    reader
}

/// Like [`read`], for the stream that also contains cargo's own messages.
fn read_errors(stream: Option<impl Read>, show: &dyn Fn(&str)) -> Reader {
    let mut reader = Reader::default();
    if let Some(stream) = stream {
        cargo_output::follow(stream, |line| {
            if reader.line(line) {
                show(line);
            }
        });
    }
    reader
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_lines_of_both_streams_count() {
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; echo 'SKIP x: no root' >&2; exit 3";
        let shown = Mutex::new(Vec::new());
        // Not printed: a line of this test that begins with SKIP would be counted, too.
        let show = |line: &str| shown.lock().unwrap().push(line.to_owned());
        let (tally, outcome) = stream(Command::new("sh").args(["-c", script]), &show).unwrap();
        assert!(!outcome.success);
        assert_eq!(shown.lock().unwrap().len(), 2);
        assert_eq!((tally.passed, tally.reported_skip), (2, 1));
    }

    #[test]
    fn a_program_that_ends_early_has_no_success() {
        let script = "echo 'running 7 tests'; echo 'test a ... ok'; exit 0";
        assert!(stream(Command::new("sh").args(["-c", script]), &|_| {}).is_err());
    }
}
