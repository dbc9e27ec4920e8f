//! Reads the output of a test program: the result of each test, the sums, and the lines to show.

use super::{failure::Failure, tally::Tally};

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It held.
    Passed,
    /// It failed.
    Failed(Failure),
    /// It failed in quarantine.
    Quarantined(Failure),
    /// It was not run, for this reason.
    Ignored(String),
    /// It has reported a skip.
    Skipped,
}

/// A test that has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    /// Its path in its program.
    pub(crate) test: String,
    pub(crate) end: End,
    /// What it printed of its time.
    pub(crate) time: Option<Time>,
    /// How often it was run.
    pub(crate) tries: u32,
    /// Why the first of two tries failed.
    pub(crate) first: Option<String>,
}

/// How long a test took, as it printed itself in its line `TIME`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Time {
    pub(crate) seconds: f64,
    /// How it ran beside others.
    pub(crate) share: String,
}

/// Where the current line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    /// In the lines of results.
    #[default]
    Results,
    /// In the output of passed tests.
    Successes,
    /// In the output of failed tests.
    Failures,
    /// In the list of the names of failed tests.
    Names,
}

/// What a line leads to, beside its place in the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing to show.
    Hidden,
    /// A line to show.
    Line,
    /// A test has ended; true if it failed.
    Ended(bool),
}

/// Parses one stream of test output by lines, as a test program with `--show-output` writes it.
#[derive(Debug, Default)]
pub(super) struct Reader {
    tally: Tally,
    part: Part,
    /// The test whose output the current line belongs to: its index in `cases`.
    current: Option<usize>,
    /// Whether the current test has reported a skip.
    test_reported_skip: bool,
    cases: Vec<Case>,
    /// Tests that the program has announced.
    announced: usize,
    /// Test programs that have ended with their sums.
    results: usize,
}

impl Reader {
    /// Processes the next line.
    ///
    /// The output of a passed test is not shown, except for its line `SKIP `.
    pub(super) fn line(&mut self, line: &str) -> Seen {
        if let Some(result) = line.strip_prefix("test result: ") {
            (self.part, self.current) = (Part::Results, None);
            self.results += 1;
            self.add(result);
            return Seen::Line;
        }
        if line.starts_with("SKIP ") {
            self.skip();
            return Seen::Line;
        }
        if let Some(time) = line.strip_prefix("TIME ") {
            self.time(time);
            return Seen::Hidden;
        }
        if self.part == Part::Results
            && let Some(case) = ended(line)
        {
            let is_failed = matches!(case.end, End::Failed(_));
            self.cases.push(case);
            return Seen::Ended(is_failed);
        }
        match line {
            "successes:" => (self.part, self.current) = (Part::Successes, None),
            // The first time before the output of the failed tests, the second time before the list of their names.
            "failures:" => {
                self.part = if self.part == Part::Failures {
                    Part::Names
                } else {
                    Part::Failures
                };
                self.current = None;
            }
            _ if self.begins(line) => {}
            _ if self.part == Part::Failures => self.quote(line),
            _ => self.announce(line),
        }
        // Tests that wait for their permit are counted by libtest as running.
        if self.part == Part::Successes || line.ends_with(" has been running for over 60 seconds") {
            Seen::Hidden
        } else {
            Seen::Line
        }
    }

    /// The current sums.
    pub(super) fn tally(&self) -> Tally {
        // A skipped test returns normally, so its program has counted it as passed.
        Tally {
            passed: self.tally.passed.saturating_sub(self.tally.reported_skip),
            ..self.tally
        }
    }

    /// Whether a test program has ended with its sums. One that calls `exit` in a test has not, and succeeds all the
    /// same.
    pub(super) const fn has_result(&self) -> bool {
        self.results > 0
    }

    /// The ended tests, and the number of all that the program has announced.
    pub(super) const fn count(&self) -> (usize, usize) {
        (self.cases.len(), self.announced)
    }

    /// The tests that have ended.
    pub(super) fn cases(self) -> Vec<Case> {
        self.cases
    }

    /// Begins the output of a test, if this is its line, `---- name stdout ----`.
    fn begins(&mut self, line: &str) -> bool {
        let name = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"));
        // A test may print such a line itself.
        let found = name.and_then(|name| self.cases.iter().rposition(|case| case.test == name));
        if found.is_some() {
            (self.current, self.test_reported_skip) = (found, false);
        }
        found.is_some()
    }

    fn quote(&mut self, line: &str) {
        if let Some(Case {
            end: End::Failed(failure),
            ..
        }) = self.current()
        {
            failure.quote(line);
        }
    }

    fn skip(&mut self) {
        // Several skip reasons of one test count as one skipped test.
        if !(self.part == Part::Successes && self.test_reported_skip) {
            self.tally.reported_skip += 1;
            self.tally.skipped += 1;
        }
        self.test_reported_skip = true;
        if let Some(case) = self.current()
            && case.end == End::Passed
        {
            case.end = End::Skipped;
        }
    }

    /// Reads `12.5 a::b (Busy, waited 0.1 s)`.
    fn time(&mut self, text: &str) {
        let (seconds, rest) = text.split_once(' ').unwrap_or_default();
        let share = rest
            .split_once(" (")
            .map_or("", |(_, share)| share.trim_end_matches(')'));
        let share = share.to_owned();
        if let (Ok(seconds), Some(case)) = (seconds.parse(), self.current()) {
            case.time = Some(Time { seconds, share });
        }
    }

    fn current(&mut self) -> Option<&mut Case> {
        self.cases.get_mut(self.current?)
    }

    /// Reads `running 7 tests`.
    fn announce(&mut self, line: &str) {
        let number = line.strip_prefix("running ").and_then(|rest| rest.split_once(" test"));
        if let Some(Ok(number)) = number.map(|(number, _)| number.parse::<usize>()) {
            self.announced += number;
        }
    }

    fn add(&mut self, result: &str) {
        self.tally.passed += number_before(result, "passed");
        self.tally.failed += number_before(result, "failed");
        self.tally.skipped += number_before(result, "ignored");
    }
}

/// The test whose end the line reports: `test a::b ... ok`.
fn ended(line: &str) -> Option<Case> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let test = name.split(" - ").next().unwrap_or(name);
    let end = match result {
        "ok" => End::Passed,
        "FAILED" => End::Failed(Failure::default()),
        "ignored" => End::Ignored(String::new()),
        _ => End::Ignored(result.strip_prefix("ignored, ")?.to_owned()),
    };
    Some(Case {
        test: test.to_owned(),
        end,
        time: None,
        tries: 1,
        first: None,
    })
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
mod tests;
