//! Decides what a failed test means: a wrong result, a test in quarantine, or a wait that ran out, which is tried
//! again, alone.

use anyhow::Result;

use super::{
    failure::{Failure, is_protected},
    ledger::Ledger,
    machine,
    programs::TestProgram,
    reader::End,
    run::{self, Environment, Job, Run, Show},
};
/// How many tests that are not in the ledger may be tried again in one run.
const UNLISTED: usize = 2;

/// What a failed test means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// It is final.
    Wrong,
    /// It is shown and does not fail the run.
    Quarantined,
    /// It may be tried again; whether the ledger lists it.
    Again { is_listed: bool },
}

/// A test that was tried again, or would have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Second {
    pub(super) program: String,
    pub(super) test: String,
    /// Why the first try failed.
    pub(super) reason: String,
    pub(super) has_passed: bool,
}

impl Second {
    /// The test, the reason and the command that repeats it.
    pub(super) fn lines(&self) -> [String; 2] {
        [
            format!("  {} {}: {}", self.program, self.test, self.reason),
            format!("      again: {}", repetition(&self.program, &self.test)),
        ]
    }
}

/// The command that repeats a test.
pub(super) fn repetition(program: &str, test: &str) -> String {
    format!("cargo xtask test --only {program}::{test}")
}

/// What became of the failed tests of a run.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// Tests that were tried again.
    pub(super) tried: Vec<Second>,
    /// Tests that failed in quarantine, with their reasons.
    pub(super) quarantined: Vec<String>,
    /// Waits that ran out, which exceed the number that may be tried again.
    pub(super) untried: usize,
}

impl Settled {
    /// Adds what became of the failed tests of another run.
    pub(super) fn add(&mut self, other: Self) {
        self.tried.extend(other.tried);
        self.quarantined.extend(other.quarantined);
        self.untried += other.untried;
    }

    /// Lines that report it.
    pub(super) fn lines(&self) -> Vec<String> {
        let passed: Vec<&Second> = self.tried.iter().filter(|second| second.has_passed).collect();
        let mut lines = Vec::new();
        if !passed.is_empty() {
            lines.push(format!("{} passed at the second try:", passed.len()));
            lines.extend(passed.iter().flat_map(|second| second.lines()));
        }
        if !self.quarantined.is_empty() {
            lines.push(format!("{} failed in quarantine:", self.quarantined.len()));
            lines.extend(self.quarantined.iter().map(|test| format!("  {test}")));
        }
        lines
    }
}

/// Settles the failed tests of `runs`: changes the results and sums of those in quarantine, and of those that hold when
/// they are tried again.
pub(super) fn resolve(
    runs: &mut [Run],
    ledger: &Ledger,
    programs: &[TestProgram],
    environment: &Environment,
    show: Show<'_>,
) -> Result<Settled> {
    let meanings = meanings(runs, ledger);
    let unlisted = meanings
        .iter()
        .filter(|(_, _, meaning)| *meaning == Meaning::Again { is_listed: false })
        .count();
    let mut settled = Settled::default();
    for (run, case, meaning) in meanings {
        let Some(run) = runs.get_mut(run) else { continue };
        let Some(found) = run.cases.get_mut(case) else { continue };
        let End::Failed(failure) = found.end.clone() else {
            continue;
        };
        let reason = failure.reason();
        match meaning {
            Meaning::Wrong => {}
            Meaning::Quarantined => {
                found.end = End::Quarantined(failure);
                run.tally.failed -= 1;
                run.tally.skipped += 1;
                settled
                    .quarantined
                    .push(format!("{} {}: {reason}", run.program, found.test));
            }
            // The run has failed in any case, and each of them may wait for minutes again.
            Meaning::Again { is_listed: false } if unlisted > UNLISTED => settled.untried += 1,
            Meaning::Again { .. } => {
                let Some(program) = programs.iter().find(|program| program.name == run.program) else {
                    continue;
                };
                let has_passed = again(program, &found.test, environment, show)?;
                found.tries = 2;
                if has_passed {
                    found.first = Some(reason.clone());
                    found.end = End::Passed;
                    run.tally.failed -= 1;
                    run.tally.passed += 1;
                }
                settled.tried.push(Second {
                    program: run.program.clone(),
                    test: found.test.clone(),
                    reason,
                    has_passed,
                });
            }
        }
    }
    Ok(settled)
}

/// The failed tests of `runs`, by their indices, and what they mean.
fn meanings(runs: &[Run], ledger: &Ledger) -> Vec<(usize, usize, Meaning)> {
    let mut found = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        for (number, case) in run.cases.iter().enumerate() {
            if let End::Failed(failure) = &case.end {
                found.push((index, number, meaning(run, &case.test, failure, ledger)));
            }
        }
    }
    found
}

fn meaning(run: &Run, test: &str, failure: &Failure, ledger: &Ledger) -> Meaning {
    if !run.is_integration || is_protected(&run.program, test) {
        Meaning::Wrong
    } else if ledger.quarantines(&run.program, test) {
        Meaning::Quarantined
    } else if run.is_sound && failure.is_exhausted_wait() {
        let is_listed = ledger.lists(&run.program, test);
        Meaning::Again { is_listed }
    } else {
        Meaning::Wrong
    }
}

/// Runs one test alone; true if it held.
fn again(program: &TestProgram, test: &str, environment: &Environment, show: Show<'_>) -> Result<bool> {
    show(&format!(
        "second try of {} {test}, alone, because a wait ran out",
        program.name
    ));
    for line in machine::state() {
        show(&format!("    machine: {line}"));
    }
    let runs = run::all(&[Job::of(program, vec![test.to_owned()])], environment, show)?;
    let has_passed = |run: &Run| run.is_sound && run.tally.passed == 1 && run.tally.failed == 0;
    Ok(runs.iter().all(has_passed))
}

#[cfg(test)]
mod tests;
