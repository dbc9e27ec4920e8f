//! Sums up the output of the test programs, and selects the lines to show.

use std::fmt;

/// Sums over all test programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Passed tests.
    pub(crate) passed: usize,
    /// Failed tests.
    pub(crate) failed: usize,
    /// Tests that are ignored or have reported a skip.
    pub(crate) skipped: usize,
    /// Skipped tests that reported it with a line `SKIP `.
    pub(crate) reported_skip: usize,
}

impl Tally {
    /// Adds the sums of other programs.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reported_skip += other.reported_skip;
    }

    /// The same sums with one more test.
    pub(crate) fn count(&mut self, passed: bool) {
        if passed {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// Lines of a failed test's output that the summary repeats; the whole output is above.
const SUMMARY_LINES: usize = 12;

/// A failed test and why it failed, for the summary at the end of a long run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    test: String,
    /// At most [`SUMMARY_LINES`], without empty ones: from the last line that names an error, or else the first ones.
    lines: Vec<String>,
}

impl Failure {
    fn quote(&mut self, line: &str) {
        // What the test printed before may be longer than what is repeated. The error that it returned is printed last.
        if is_reason(line) {
            self.lines.clear();
        }
        if self.lines.len() < SUMMARY_LINES && !line.trim().is_empty() {
            self.lines.push(line.to_owned());
        }
    }
}

/// Whether the line is the first one of an error that a test returned, or of a panic.
fn is_reason(line: &str) -> bool {
    line.starts_with("Error: ") || (line.starts_with("thread '") && line.contains(" panicked at "))
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {}", self.test)?;
        self.lines.iter().try_for_each(|line| write!(f, "\n      {line}"))
    }
}

/// Parses one stream of test output by lines, as `cargo test -- --show-output` writes it.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    tally: Tally,
    /// Whether the current line is output of passed tests.
    in_successes: bool,
    /// Whether the current test has reported a skip.
    test_reported_skip: bool,
    /// Whether the current line is output of failed tests.
    in_failures: bool,
    failures: Vec<Failure>,
    times: Vec<Time>,
    /// Test programs that have ended with their sums.
    results: usize,
}

/// How long a test took, as it printed itself in its line `TIME`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Time {
    pub(crate) seconds: f64,
    /// Its name, and how it ran beside others.
    test: String,
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {:6.1} s  {}", self.seconds, self.test)
    }
}

impl Reader {
    /// Processes the next line; true if it has to be shown.
    ///
    /// The output of a passed test is not shown, except for its line `SKIP `.
    pub(crate) fn line(&mut self, line: &str) -> bool {
        if let Some(result) = line.strip_prefix("test result: ") {
            (self.in_successes, self.in_failures) = (false, false);
            self.results += 1;
            self.add(result);
            return true;
        }
        if line.starts_with("SKIP ") {
            self.skip();
            return true;
        }
        if let Some(time) = line.strip_prefix("TIME ") {
            let (seconds, test) = time.split_once(' ').unwrap_or_default();
            if let Ok(seconds) = seconds.parse() {
                let test = test.to_owned();
                self.times.push(Time { seconds, test });
            }
            return false;
        }
        match line {
            "successes:" => (self.in_successes, self.in_failures) = (true, false),
            // The first time before the output of the failed tests, the second time before the list of their names.
            "failures:" => (self.in_successes, self.in_failures) = (false, !self.in_failures),
            _ if line.starts_with("---- ") => {
                self.test_reported_skip = false;
                self.begin(line);
            }
            _ if self.in_failures => self.quote(line),
            _ => {}
        }
        // Tests that wait for their permit are counted by libtest as running.
        !self.in_successes && !line.ends_with(" has been running for over 60 seconds")
    }

    /// The current sums.
    pub(crate) fn tally(&self) -> Tally {
        // A skipped test returns normally, so its program has counted it as passed.
        Tally {
            passed: self.tally.passed.saturating_sub(self.tally.reported_skip),
            ..self.tally
        }
    }

    /// Whether a test program has ended with its sums. One that calls `exit` in a test has not, and succeeds all the same.
    pub(crate) const fn has_result(&self) -> bool {
        self.results > 0
    }

    /// The failed tests so far, and the times of those that print them.
    pub(crate) fn outcome(self) -> (Vec<Failure>, Vec<Time>) {
        (self.failures, self.times)
    }

    /// Begins the output of a test, whose line is `---- name stdout ----`.
    fn begin(&mut self, line: &str) {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.split(' ').next())
            && self.in_failures
        {
            self.failures.push(Failure {
                test: test.to_owned(),
                ..Failure::default()
            });
        }
    }

    fn quote(&mut self, line: &str) {
        if let Some(failure) = self.failures.last_mut() {
            failure.quote(line);
        }
    }

    fn skip(&mut self) {
        // Several skip reasons of one test count as one skipped test.
        if !(self.in_successes && self.test_reported_skip) {
            self.tally.reported_skip += 1;
            self.tally.skipped += 1;
        }
        self.test_reported_skip = true;
    }

    fn add(&mut self, result: &str) {
        self.tally.passed += number_before(result, "passed");
        self.tally.failed += number_before(result, "failed");
        self.tally.skipped += number_before(result, "ignored");
    }
}

/// The number before `word` in `ok. 3 passed; 1 failed; 0 ignored; ...`.
fn number_before(result: &str, word: &str) -> usize {
    let mut previous = "";
    for part in result.split([' ', ';']).filter(|part| !part.is_empty()) {
        if part == word {
            return previous.parse().unwrap_or(0);
        }
        previous = part;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Tally, Vec<&str>) {
        let mut reader = Reader::default();
        let shown = text.lines().filter(|line| reader.line(line)).collect();
        (reader.tally(), shown)
    }

    #[test]
    fn results_of_several_programs_add_up() {
        let (tally, shown) = read(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.07s\n\
             test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        );
        assert_eq!(
            tally,
            Tally {
                passed: 14,
                failed: 3,
                skipped: 1,
                reported_skip: 0
            }
        );
        assert_eq!(tally.to_string(), "14 passed, 3 failed, 1 skipped");
        assert_eq!(shown.len(), 2);
    }

    #[test]
    fn a_test_that_says_skip_did_not_pass() {
        let (tally, shown) = read(
            "test a ... ok\n\nsuccesses:\n\n---- a stdout ----\nchatter\nSKIP a: needs root\nSKIP a: needs bpf\n\n\
             ---- b stdout ----\nSKIP b: needs root\n\nsuccesses:\n    a\n    b\n    c\n\n\
             test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        );
        assert_eq!(
            tally,
            Tally {
                passed: 1,
                failed: 0,
                skipped: 2,
                reported_skip: 2
            }
        );
        assert!(
            !shown.contains(&"chatter") && shown.contains(&"SKIP b: needs root"),
            "{shown:?}"
        );
    }

    #[test]
    fn the_output_of_failed_tests_is_shown() {
        let (_, shown) = read(
            "successes:\n\n---- a stdout ----\nquiet\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\nloud\n\n\
             failures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured",
        );
        assert!(shown.contains(&"loud") && !shown.contains(&"quiet"), "{shown:?}");
    }

    #[test]
    fn the_summary_repeats_the_begin_of_each_failure() {
        let long = "a line\n".repeat(20);
        let text = format!(
            "successes:\n\n---- a stdout ----\nquiet\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\n\
             Error: first\n\n  second\n---- c::d stdout ----\n{long}\n\
             ---- e stdout ----\nshort\n\nfailures:\n    b\n    c::d\n    e\n\n\
             test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\nafter"
        );
        let mut reader = Reader::default();
        for line in text.lines() {
            reader.line(line);
        }
        let [b, c, e] = reader.outcome().0.try_into().unwrap();
        assert_eq!(b.to_string(), "  b\n      Error: first\n        second");
        assert_eq!((c.test.as_str(), c.lines.len()), ("c::d", SUMMARY_LINES));
        assert_eq!(e.lines, ["short"], "the names of failed tests are not output");
    }

    #[test]
    fn the_summary_repeats_the_error_after_a_long_output() {
        let long = "a line\n".repeat(20);
        let text = format!(
            "failures:\n\n---- a stdout ----\n{long}Error: too many\n\nCaused by:\n---- b stdout ----\n{long}\n\
             thread 'b' (7) panicked at src/b.rs:1:2:\ncaught\nError: left\n\n---- c stdout ----\n{long}\n\
             thread 'c' (8) panicked at src/c.rs:1:2:\nright\n\nfailures:\n    a\n    b\n    c\n"
        );
        let mut reader = Reader::default();
        for line in text.lines() {
            reader.line(line);
        }
        let [a, b, c] = reader.outcome().0.try_into().unwrap();
        assert_eq!(a.lines, ["Error: too many", "Caused by:"]);
        assert_eq!(
            b.lines,
            ["Error: left"],
            "the error that was returned, not the caught panic"
        );
        assert_eq!(c.lines, ["thread 'c' (8) panicked at src/c.rs:1:2:", "right"]);
    }

    #[test]
    fn times_are_collected_and_not_shown() {
        let mut reader = Reader::default();
        let lines = ["TIME 12.5 a::b (Cpu, waited 0.1 s)", "TIME of day", "12:00"];
        let shown: Vec<&str> = lines.into_iter().filter(|line| reader.line(line)).collect();
        assert_eq!(shown, ["12:00"]);
        let [time] = reader.outcome().1.try_into().unwrap();
        assert_eq!(time.to_string(), "    12.5 s  a::b (Cpu, waited 0.1 s)");
    }

    #[test]
    fn words_of_a_test_itself_count_nothing() {
        let (tally, _) = read("5 passed\nresult: 7 failed\ntest result ok\nnot a SKIP line");
        assert_eq!(tally, Tally::default());
    }
}
