//! Why a test failed, as its output shows it, and whether it may be tried again.

use std::fmt;

/// Lines of a failed test's output that the summary repeats; the whole output is above.
pub(super) const SUMMARY_LINES: usize = 12;
/// Programs whose tests are never tried again: they compute their results, whatever the speed of the machine.
const PROTECTED_PROGRAMS: [&str; 1] = ["dataplane"];
/// Modules whose tests are never tried again: a failure that happens once is a hole or a leak that exists.
const PROTECTED_MODULES: [&str; 5] = ["attack", "enemies", "isolation", "memory", "rights"];

/// Why a test failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    /// At most [`SUMMARY_LINES`], without empty ones: from the last line that names an error, or else the first ones.
    pub(super) lines: Vec<String>,
    /// Whether the current block, an error or a panic, is one of a wait that ran out.
    is_exhausted: bool,
    /// Whether the current block is a panic.
    is_panic: bool,
    /// Whether an earlier block is a panic for another reason.
    has_other_panic: bool,
}

impl Failure {
    /// Adds a line of the test's output.
    pub(super) fn quote(&mut self, line: &str) {
        // What the test printed before may be longer than what is repeated. The error that it returned is printed last.
        if is_reason(line) {
            self.has_other_panic |= self.is_panic && !self.is_exhausted;
            self.is_panic = is_panic(line);
            self.is_exhausted = false;
            self.lines.clear();
        }
        self.is_exhausted |= is_exhausted(line);
        if self.lines.len() < SUMMARY_LINES && !line.trim().is_empty() {
            self.lines.push(line.to_owned());
        }
    }

    /// Whether a wait ran out and nothing else went wrong, as far as the output shows.
    pub(super) fn is_exhausted_wait(&self) -> bool {
        self.is_exhausted && !self.has_other_panic
    }

    /// The reason in one line.
    pub(super) fn reason(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|line| line.trim()).collect();
        let reason = lines.join(" ");
        reason.strip_prefix("Error: ").unwrap_or(&reason).to_owned()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| write!(f, "\n      {line}"))
    }
}

/// Whether tests of `program` whose path is `test` are never tried again and never in quarantine.
pub(super) fn is_protected(program: &str, test: &str) -> bool {
    PROTECTED_PROGRAMS.contains(&program) || test.split("::").any(|segment| PROTECTED_MODULES.contains(&segment))
}

/// Whether the line is the first one of an error that a test returned, or of a panic.
fn is_reason(line: &str) -> bool {
    line.starts_with("Error: ") || is_panic(line)
}

fn is_panic(line: &str) -> bool {
    line.starts_with("thread '") && line.contains(" panicked at ")
}

/// Whether the line contains the text of a wait that ran out, `waited 60s in vain`.
fn is_exhausted(line: &str) -> bool {
    line.split("waited ")
        .skip(1)
        .filter_map(|rest| rest.split_once(" in vain"))
        .any(|(duration, _)| is_duration(duration))
}

/// Whether the text is a duration such as `60s`, `1.5ms`.
fn is_duration(text: &str) -> bool {
    let unit = text.trim_start_matches(|char: char| char.is_ascii_digit() || char == '.');
    unit.len() < text.len() && ["s", "ms", "µs", "ns"].contains(&unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(output: &str) -> Failure {
        let mut failure = Failure::default();
        output.lines().for_each(|line| failure.quote(line));
        failure
    }

    #[test]
    fn only_waits_that_ran_out_are_recognised() {
        let again = [
            "Error: waited 60s in vain\n\nCaused by:\n    not yet",
            "log\nError: until the pod answers\n\nCaused by:\n    0: waited 75.6s in vain\n    1: not yet",
            "Error: until x: waited 1.5ms in vain: wrong is: 7",
            "thread 'a::b' (7) panicked at src/b.rs:1:2:\ncalled `Result::unwrap()` on an `Err` value: waited 60s in vain",
            "thread 'x' (7) panicked at src/b.rs:1:2:\nwaited 60s in vain\nError: waited 60s in vain",
        ];
        for output in again {
            assert!(failure(output).is_exhausted_wait(), "{output}");
        }
        let wrong = [
            "",
            "Error: 3 packets lost",
            "waited 60s in vain\nError: 3 packets lost",
            "Error: waited 60s in vain\nthread 'a' (7) panicked at src/b.rs:1:2:\nleft",
            "thread 'x' (7) panicked at src/b.rs:1:2:\nassertion failed\nError: waited 60s in vain",
            "Error: waited for nothing in vain",
            "Error: waited s in vain",
        ];
        for output in wrong {
            assert!(!failure(output).is_exhausted_wait(), "{output}");
        }
    }

    #[test]
    fn protected_tests_are_named_by_whole_segments() {
        assert!(is_protected("dataplane", "frames::arp"));
        assert!(is_protected("node", "attack::closed::others_lose_nothing"));
        assert!(is_protected("cluster", "fabric::enemies::forged"));
        assert!(is_protected("node", "lifecycle::memory::no_leak"));
        assert!(!is_protected("node", "egress::ports::a_port"));
        assert!(!is_protected("node", "lifecycle::memory_of_maps"));
    }

    #[test]
    fn a_reason_is_one_line() {
        let failure = failure("Error: until x\n\nCaused by:\n    waited 60s in vain");
        assert_eq!(failure.reason(), "until x Caused by: waited 60s in vain");
    }
}
