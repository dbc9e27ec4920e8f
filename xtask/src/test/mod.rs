//! `test`: prepares the machine, runs all tests of the workspace and the virtual machine, and sums up the results.

mod tally;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, ExitCode, Stdio},
    thread,
};

use anyhow::{Context, Result, bail};
pub(crate) use tally::Tally;
use tally::{Failure, Reader, Time};

use crate::{
    build_cni, build_ebpf, cargo_output, crds,
    cross::{self, Depth},
    node,
    progress::{Progress, say},
    setup::{self, Goal},
    vm,
    workspace::{cargo, is_root},
};

/// Arguments of `test`.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Stop at a tier: 0 needs no privilege, 1 adds network namespaces, 2 adds loaded programs and the tests of a
    /// whole node, 3 adds the other kernel [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3))]
    tier: Option<u8>,
    /// Run the tests that take minutes in full length, and compile for arm64
    #[arg(long)]
    long: bool,
}

/// The parts of a tier.
struct Plan {
    /// The value of `KNI_REQUIRE`: privileges that must be present.
    require: &'static str,
    /// Whether to build the eBPF object and to include the package of the integration tests.
    programs: bool,
    /// Whether to run the virtual machine.
    vm: bool,
    /// Whether to run long tests in full length.
    long: bool,
}

impl Plan {
    fn new(args: &Args) -> Self {
        let (require, programs, vm) = match args.tier {
            Some(0) => ("", false, false),
            Some(1) => ("root,netns", false, false),
            Some(2) => ("root,netns,bpf,machine", true, false),
            _ => ("root,netns,bpf,machine", true, true),
        };
        Self {
            require,
            programs,
            vm,
            long: args.long,
        }
    }

    /// Whether to compile for arm64.
    fn crosses(&self) -> bool {
        self.long && self.vm
    }

    fn steps(&self) -> usize {
        let before = if self.programs { setup::STEPS + 3 } else { 0 };
        let after = if self.vm { vm::STEPS } else { 0 };
        let other = if self.crosses() { cross::STEPS } else { 0 };
        1 + before + 1 + after + other
    }
}

/// Runs the command; the last line of its output is the sum.
pub(crate) fn command(args: &Args) -> ExitCode {
    let mut tally = Tally::default();
    let result = run(&Plan::new(args), &mut tally);
    conclude(result, tally)
}

/// Prints the reason of a failure, if any, and the sum as the last line.
pub(crate) fn conclude(result: Result<()>, mut tally: Tally) -> ExitCode {
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            // A failure outside of any test, such as a compile error, must not end with zero failed tests.
            tally.failed = tally.failed.max(1);
            ExitCode::FAILURE
        }
    };
    println!("{tally}");
    code
}

fn run(plan: &Plan, tally: &mut Tally) -> Result<()> {
    if !plan.require.is_empty() && !is_root() {
        bail!(
            "the tests make network namespaces and load eBPF programs, which needs root; \
             `cargo xtask test --tier 0` runs those that need no privilege"
        );
    }
    let mut progress = Progress::new(plan.steps());
    progress.step("definitions", crds::up_to_date)?;
    if plan.programs {
        setup::run(if plan.vm { Goal::All } else { Goal::Test }, &mut progress)?;
        progress.step("eBPF programs", || build_ebpf::build(false))?;
        progress.step("CNI plugin", || build_cni::build().map(drop))?;
        // Built before the tests, so that the build time is not part of the first test that needs them.
        node::build_programs(&mut progress, &["--helm", "--kni"])?;
    }
    let tests = progress.step("tests", || {
        let mut outcome = cargo_test(plan, tally)?;
        outcome.report_times();
        judge(plan, *tally, &outcome)
    });
    // The virtual machine runs in any case: its result may explain the others.
    let machine = if plan.vm {
        let result = vm::run(&mut progress);
        tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    let other = if plan.crosses() {
        let result = cross::compile(Depth::Check, &mut progress);
        tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    tests.and(machine).and(other)
}

/// What a run of `cargo test` leads to, beside the sums.
#[derive(Default)]
struct Outcome {
    /// Whether cargo succeeded.
    success: bool,
    failures: Vec<Failure>,
    times: Vec<Time>,
}

/// How many of the slowest tests are listed.
const SLOWEST: usize = 25;

impl Outcome {
    /// Lists the slowest tests, so that the time of a run has names.
    fn report_times(&mut self) {
        self.times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let sum: f64 = self.times.iter().map(|time| time.seconds).sum();
        say(&format!(
            "{} tests with privileges took {sum:.0} s in sum; the slowest:",
            self.times.len()
        ));
        for time in self.times.iter().take(SLOWEST) {
            say(&time.to_string());
        }
    }
}

/// Decides whether the tests are a success from their output and the exit status of cargo.
fn judge(plan: &Plan, tally: Tally, outcome: &Outcome) -> Result<()> {
    if tally.failed > 0 {
        // Printed last: the output of the failed tests may be many thousand lines above.
        let mut lines = vec![format!("{} tests failed", tally.failed)];
        lines.extend(outcome.failures.iter().map(ToString::to_string));
        bail!("{}", lines.join("\n"));
    }
    if !outcome.success {
        bail!("`cargo test` failed outside of any test");
    }
    if tally.passed == 0 {
        bail!("no test ran");
    }
    if plan.programs && tally.reported_skip > 0 {
        bail!(
            "{} tests were skipped, though this run requires {}",
            tally.reported_skip,
            plan.require
        );
    }
    Ok(())
}

/// Runs the tests of the workspace into `tally`.
fn cargo_test(plan: &Plan, tally: &mut Tally) -> Result<Outcome> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]);
    if !plan.programs {
        command.args(["--exclude", "kni-integration"]);
    }
    command.env("KNI_REQUIRE", plan.require);
    command.envs(cargo_output::ENVIRONMENT);
    if plan.long {
        command.env("KNI_LONG", "1");
    }
    // Without it the output of a passed test, and so its skip, would be hidden.
    command.args(["--", "--show-output"]);
    // Tests that mostly wait share a CPU; the others wait for one of their own.
    let threads = 2 * thread::available_parallelism().map_or(1, usize::from);
    command.arg(format!("--test-threads={threads}"));
    stream(&mut command, tally, &say)
}

/// Runs `command`, passes each line to show to `show` immediately, and sums up the results.
fn stream(command: &mut Command, tally: &mut Tally, show: &(dyn Fn(&str) + Sync)) -> Result<Outcome> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run cargo test")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let sums = thread::scope(|scope| {
        let errors = scope.spawn(|| read_errors(stderr, show));
        let lines = read(stdout, show);
        errors.join().map(|errors| [lines, errors])
    });
    // Joining fails only if the thread has panicked; its message is on the terminal already.
    let Ok(sums) = sums else {
        bail!("the output of the tests could not be read")
    };
    let mut outcome = Outcome::default();
    for reader in sums {
        let sum = reader.tally();
        let (failures, times) = reader.outcome();
        outcome.failures.extend(failures);
        outcome.times.extend(times);
        tally.passed += sum.passed;
        tally.failed += sum.failed;
        tally.skipped += sum.skipped;
        tally.reported_skip += sum.reported_skip;
    }
    outcome.success = child.wait().context("cannot wait for cargo test")?.success();
    Ok(outcome)
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

    fn judged(tally: Tally, success: bool) -> Result<()> {
        let outcome = Outcome {
            success,
            ..Outcome::default()
        };
        judge(&Plan::new(&Args::default()), tally, &outcome)
    }

    #[test]
    fn only_tests_that_ran_and_held_are_a_success() {
        let good = Tally {
            passed: 3,
            ..Tally::default()
        };
        assert!(judged(good, true).is_ok());
        assert!(judged(good, false).is_err(), "cargo itself failed");
        assert!(judged(Tally::default(), true).is_err(), "nothing ran");
        assert!(judged(Tally { failed: 1, ..good }, true).is_err());
        assert!(
            judged(
                Tally {
                    skipped: 1,
                    reported_skip: 1,
                    ..good
                },
                true
            )
            .is_err()
        );
        assert!(
            judged(Tally { skipped: 1, ..good }, true).is_ok(),
            "an ignored test was meant to be"
        );
    }

    #[test]
    fn the_lines_of_both_streams_count() {
        let mut tally = Tally::default();
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; echo 'SKIP x: no root' >&2; exit 3";
        let shown = Mutex::new(Vec::new());
        // Not printed: a line of this test that begins with SKIP would be counted, too.
        let show = |line: &str| shown.lock().unwrap().push(line.to_owned());
        let outcome = stream(Command::new("sh").args(["-c", script]), &mut tally, &show).unwrap();
        assert!(!outcome.success);
        assert_eq!(shown.lock().unwrap().len(), 2);
        assert_eq!((tally.passed, tally.reported_skip), (2, 1));
    }
}
