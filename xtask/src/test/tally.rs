//! Sums over test programs.

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
