//! Runs test programs and reads their output.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use super::{
    machine,
    programs::TestProgram,
    reader::{Case, Reader, Seen},
    tally::Tally,
};
use crate::{
    progress,
    workspace::{cargo_path, clear_own_build},
};

/// Threads of a program whose tests wait for their permits: all of them begin at once.
const WAITING_THREADS: &str = "--test-threads=1024";
/// The exit code of a test program with failed tests.
const TESTS_FAILED: i32 = 101;

/// What tests read of the environment.
pub(super) type Environment = BTreeMap<&'static str, OsString>;

/// Shows a line.
pub(super) type Show<'a> = &'a (dyn Fn(&str) + Sync);

/// Tests to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) program: TestProgram,
    /// The paths of its tests; without any, all of them.
    pub(super) tests: Vec<String>,
    /// Whether tests that are ignored run, too.
    pub(super) ignored: bool,
}

impl Job {
    /// All tests of `program` that are not ignored.
    pub(super) fn whole(program: &TestProgram) -> Self {
        Self {
            program: program.clone(),
            tests: Vec::new(),
            ignored: false,
        }
    }

    /// The tests `tests` of `program`.
    pub(super) fn of(program: &TestProgram, tests: Vec<String>) -> Self {
        Self {
            program: program.clone(),
            tests,
            ignored: true,
        }
    }

    fn command(&self, environment: &Environment) -> Command {
        let mut command = Command::new(&self.program.path);
        clear_own_build(&mut command);
        command
            .current_dir(&self.program.folder)
            .envs(environment)
            .env("CARGO", cargo_path())
            .env("CARGO_MANIFEST_DIR", &self.program.folder)
            // Without it the output of a passed test, and so its skip, would be hidden.
            .arg("--show-output");
        if self.program.is_integration() {
            command.arg(WAITING_THREADS);
        }
        if self.ignored {
            command.arg("--include-ignored");
        }
        if !self.tests.is_empty() {
            command.arg("--exact").args(&self.tests);
        }
        command
    }
}

/// A test program that has ended.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) program: String,
    pub(super) path: PathBuf,
    /// Whether its tests wait for permits and may be tried again.
    pub(super) is_integration: bool,
    pub(super) seconds: f64,
    pub(super) tally: Tally,
    pub(super) cases: Vec<Case>,
    /// Whether it has ended as its results say: with success, or because of its failed tests.
    pub(super) is_sound: bool,
}

/// Runs the programs of `jobs`: first those whose tests wait for no permit, one after the other, then the others, all
/// at once: their tests agree among themselves how many run.
pub(super) fn all(jobs: &[Job], environment: &Environment, show: Show<'_>) -> Result<Vec<Run>> {
    let board = Board::new();
    let (concurrent, others): (Vec<&Job>, Vec<&Job>) = jobs.iter().partition(|job| job.program.is_integration());
    let mut runs = Vec::new();
    for job in others {
        runs.push(one(job, environment, &board, show)?);
    }
    let ended = thread::scope(|scope| {
        let threads: Vec<_> = concurrent
            .into_iter()
            .map(|job| scope.spawn(|| one(job, environment, &board, show)))
            .collect();
        threads
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect::<Vec<_>>()
    });
    progress::detail("");
    for run in ended {
        // Joining fails only if the thread has panicked; its message is on the terminal already.
        let Ok(run) = run else {
            bail!("the output of a test program could not be read")
        };
        runs.push(run?);
    }
    Ok(runs)
}

/// The tests of `program` whose listing has a line for each, such as `a::b: test`.
pub(super) fn list(program: &TestProgram) -> Result<Vec<String>> {
    let mut command = Command::new(&program.path);
    command
        .current_dir(&program.folder)
        .args(["--list", "--format", "terse"]);
    let listing = crate::command::output(&mut command)?;
    let names = listing.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

/// Runs one job, and passes each line to show to `show` immediately.
fn one(job: &Job, environment: &Environment, board: &Board, show: Show<'_>) -> Result<Run> {
    let start = Instant::now();
    let mut child = job
        .command(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", job.program.path.display()))?;
    let program = job.program.name.as_str();
    let is_integration = job.program.is_integration();
    let shown = |reader: &Reader, seen: Seen, line: &str| match seen {
        Seen::Hidden => {}
        Seen::Line => show(line),
        Seen::Ended(is_failed) => {
            show(&format!("[{program} {}] {line}", board.ended(program, reader)));
            if is_failed && is_integration {
                for line in machine::state() {
                    show(&format!("    machine: {line}"));
                }
            }
        }
    };
    let (output, errors) = read_both(&mut child, &shown)?;
    let status = child.wait().context("cannot wait for the tests")?;
    let mut tally = output.tally();
    tally.add(errors.tally());
    let has_result = output.has_result();
    if status.success() && !has_result {
        bail!("{program} ended without a result");
    }
    Ok(Run {
        program: program.to_owned(),
        path: job.program.path.clone(),
        is_integration,
        seconds: start.elapsed().as_secs_f64(),
        is_sound: has_result && is_explained(status, tally),
        tally,
        cases: output.cases(),
    })
}

/// Whether the results of a program explain its exit.
fn is_explained(status: ExitStatus, tally: Tally) -> bool {
    status.success() || (status.code() == Some(TESTS_FAILED) && tally.failed > 0)
}

/// Reads both outputs of a test program to their ends.
fn read_both(child: &mut Child, shown: &(dyn Fn(&Reader, Seen, &str) + Sync)) -> Result<(Reader, Reader)> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let errors = scope.spawn(|| read(stderr, shown));
        let output = read(stdout, shown);
        errors.join().map(|errors| (output, errors)).ok()
    })
    .context("the output of the tests could not be read")
}

fn read(stream: Option<impl Read>, shown: &dyn Fn(&Reader, Seen, &str)) -> Reader {
    let mut reader = Reader::default();
    let Some(stream) = stream else { return reader };
    let mut stream = BufReader::new(stream);
    let mut bytes = Vec::new();
    // Bytes, not text: a test may print arbitrary output, which must not end the reading.
    while stream.read_until(b'\n', &mut bytes).is_ok_and(|length| length > 0) {
        let text = String::from_utf8_lossy(&bytes);
        let line = text.trim_end_matches(['\n', '\r']);
        let seen = reader.line(line);
        shown(&reader, seen, line);
        drop(text);
        bytes.clear();
    }
    reader
}

/// How many tests of each running program have ended.
struct Board {
    start: Instant,
    counts: Mutex<BTreeMap<String, (usize, usize)>>,
}

impl Board {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            counts: Mutex::new(BTreeMap::new()),
        }
    }

    /// Notes the counts of a program's reader; returns them with the elapsed time, `212/265 4:31`.
    fn ended(&self, program: &str, reader: &Reader) -> String {
        let (ended, of) = reader.count();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.insert(program.to_owned(), (ended, of));
        let mut text = String::new();
        for (program, (ended, of)) in counts.iter().filter(|(_, (ended, of))| ended < of) {
            // Writing to a text cannot fail.
            write!(text, " {program} {ended} of {of}").unwrap_or_default();
        }
        progress::detail(text.trim_start());
        let seconds = self.start.elapsed().as_secs();
        format!("{ended}/{of} {}:{:02}", seconds / 60, seconds % 60)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// A program that is no test program but ends like one.
    fn script(name: &str, text: &str) -> (PathBuf, TestProgram) {
        let folder = std::env::temp_dir().join(format!("xtask-run-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("program");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let program = TestProgram {
            name: "some".to_owned(),
            path,
            folder: folder.clone(),
        };
        (folder, program)
    }

    fn run(name: &str, text: &str) -> (Result<Run>, Vec<String>) {
        let (folder, program) = script(name, text);
        let shown = Mutex::new(Vec::new());
        // Not printed: a line of this test that begins with SKIP would be counted, too.
        let show = |line: &str| shown.lock().unwrap().push(line.to_owned());
        let run = one(&Job::whole(&program), &Environment::new(), &Board::new(), &show);
        fs::remove_dir_all(folder).unwrap();
        (run, shown.into_inner().unwrap())
    }

    #[test]
    fn the_lines_of_both_streams_count() {
        let text = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; echo 'SKIP x: no root' >&2; exit 3";
        let (run, shown) = run("both", text);
        let run = run.unwrap();
        assert!(!run.is_sound);
        assert_eq!(shown.len(), 2);
        assert_eq!((run.tally.passed, run.tally.reported_skip), (2, 1));
    }

    #[test]
    fn a_program_that_ends_early_has_no_success() {
        let (run, _) = run("early", "echo 'running 7 tests'; echo 'test a ... ok'; exit 0");
        assert!(run.is_err());
    }

    #[test]
    fn failed_tests_explain_an_exit_and_a_crash_explains_itself() {
        let failed = "echo 'running 2 tests'; echo 'test a ... FAILED'; echo 'test result: FAILED. 1 passed; 1 failed'";
        let (program, shown) = run("failed", &format!("{failed}; exit 101"));
        let program = program.unwrap();
        assert!(program.is_sound && program.tally.failed == 1 && program.cases.len() == 1);
        assert_eq!(shown.get(1).unwrap(), "[some 1/2 0:00] test a ... FAILED");
        let (program, _) = run("killed", &format!("{failed}; kill -9 $$"));
        assert!(!program.unwrap().is_sound);
        let (program, _) = run("crashed", "echo 'test a ... FAILED'; exit 101");
        assert!(!program.unwrap().is_sound);
    }
}
