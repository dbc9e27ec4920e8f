//! Runs sets of tests, with their second tries, and decides whether they are a success.

use anyhow::{Result, bail};

use super::{
    grace::Expedited,
    ledger::Ledger,
    programs::{Built, TestProgram},
    reader::{Case, End},
    run::{self, Environment, Job, Run},
    second::{self, Settled},
    tally::Tally,
};
use crate::progress::say;

/// The reason of an ignored test that runs in long proofs begins with this.
const LONG: &str = "long:";

/// What a set of tests led to.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) runs: Vec<Run>,
    pub(super) settled: Settled,
}

impl Outcome {
    /// The sums over all programs.
    pub(super) fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        self.runs.iter().for_each(|run| tally.add(run.tally));
        tally
    }

    /// The tests of all programs, each with the name of its program.
    pub(super) fn cases(&self) -> impl Iterator<Item = (&str, &Case)> {
        self.runs
            .iter()
            .flat_map(|run| run.cases.iter().map(|case| (run.program.as_str(), case)))
    }

    /// The failed tests with their reasons, and the commands that repeat them.
    fn failures(&self) -> Vec<String> {
        let line = |(program, case): (&str, &Case)| match &case.end {
            End::Failed(failure) => {
                let again = second::repetition(program, &case.test);
                Some(format!("  {program} {}{failure}\n      again: {again}", case.test))
            }
            End::Passed | End::Quarantined(_) | End::Ignored(_) | End::Skipped => None,
        };
        self.cases().filter_map(line).collect()
    }
}

/// Runs `jobs`, then the tests that are ignored for the reason `long:` if `long`, then the second tries.
pub(super) fn run(jobs: &[Job], environment: &Environment, ledger: &Ledger, long: bool) -> Result<Outcome> {
    let _expedited = Expedited::begin()?;
    let mut runs = run::all(jobs, environment, &say)?;
    let programs: Vec<TestProgram> = jobs.iter().map(|job| job.program.clone()).collect();
    if long {
        add_long(&mut runs, &programs, environment)?;
    }
    let settled = second::resolve(&mut runs, ledger, &programs, environment, &say)?;
    Ok(Outcome { runs, settled })
}

/// One job for each program, with the tests that need no permit first.
pub(super) fn whole(built: &Built) -> Vec<Job> {
    built.tests.iter().map(Job::whole).collect()
}

/// Runs the tests that `runs` name as ignored for the reason `long:`. The reason is a part of the line with which a
/// program reports an ignored test, and of nothing else that can be asked for.
fn add_long(runs: &mut [Run], programs: &[TestProgram], environment: &Environment) -> Result<()> {
    let mut jobs = Vec::new();
    for run in runs.iter_mut() {
        let tests = take_long(run);
        if let Some(program) = programs.iter().find(|program| program.path == run.path)
            && !tests.is_empty()
        {
            jobs.push(Job::of(program, tests));
        }
    }
    for long in run::all(&jobs, environment, &say)? {
        if let Some(run) = runs.iter_mut().find(|run| run.path == long.path) {
            run.seconds += long.seconds;
            run.tally.add(long.tally);
            run.cases.extend(long.cases);
            run.is_sound &= long.is_sound;
        }
    }
    Ok(())
}

/// Removes the tests from `run` that are ignored for the reason `long:`.
fn take_long(run: &mut Run) -> Vec<String> {
    let is_long = |case: &Case| matches!(&case.end, End::Ignored(reason) if reason.starts_with(LONG));
    let (long, others): (Vec<Case>, Vec<Case>) = std::mem::take(&mut run.cases).into_iter().partition(is_long);
    run.cases = others;
    run.tally.skipped = run.tally.skipped.saturating_sub(long.len());
    long.into_iter().map(|case| case.test).collect()
}

/// Decides whether the tests are a success from their results and the ends of their programs.
///
/// `require` names what had to be present, so that no test may report a skip; empty if that is allowed.
pub(super) fn check(outcome: &Outcome, require: &str) -> Result<()> {
    let tally = outcome.tally();
    if tally.failed > 0 {
        // Printed last: the output of the failed tests may be many thousand lines above.
        let mut lines = vec![format!("{} tests failed", tally.failed)];
        lines.extend(outcome.failures());
        if outcome.settled.untried > 0 {
            lines.push(format!(
                "waits ran out in {} tests that tests/flakes.toml does not list: too many to try them again",
                outcome.settled.untried
            ));
        }
        bail!("{}", lines.join("\n"));
    }
    if let Some(run) = outcome.runs.iter().find(|run| !run.is_sound) {
        bail!("the test program {} failed outside of any test", run.program);
    }
    if tally.passed == 0 {
        bail!("no test ran");
    }
    if !require.is_empty() && tally.reported_skip > 0 {
        bail!(
            "{} tests were skipped, though this run requires {require}",
            tally.reported_skip
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(tally: Tally, is_sound: bool, require: &str) -> Result<()> {
        let run = Run {
            tally,
            is_sound,
            ..Run::default()
        };
        let outcome = Outcome {
            runs: vec![run],
            ..Outcome::default()
        };
        check(&outcome, require)
    }

    #[test]
    fn only_tests_that_ran_and_held_are_a_success() {
        let good = Tally {
            passed: 3,
            ..Tally::default()
        };
        let skipped = Tally {
            skipped: 1,
            reported_skip: 1,
            ..good
        };
        assert!(checked(good, true, "root").is_ok());
        assert!(checked(good, false, "root").is_err(), "a program failed by itself");
        assert!(checked(Tally::default(), true, "root").is_err(), "nothing ran");
        assert!(checked(Tally { failed: 1, ..good }, true, "root").is_err());
        assert!(checked(skipped, true, "root").is_err());
        assert!(checked(skipped, true, "").is_ok());
        assert!(
            checked(Tally { skipped: 1, ..good }, true, "root").is_ok(),
            "an ignored test was meant to be"
        );
    }

    #[test]
    fn only_tests_ignored_for_their_length_run_in_long_proofs() {
        let case = |test: &str, end| Case {
            test: test.to_owned(),
            end,
            time: None,
            tries: 1,
            first: None,
        };
        let mut run = Run {
            tally: Tally {
                passed: 1,
                skipped: 2,
                ..Tally::default()
            },
            cases: vec![
                case("a", End::Ignored("long: a benchmark".to_owned())),
                case("b", End::Ignored("a measurement".to_owned())),
                case("c", End::Passed),
            ],
            ..Run::default()
        };
        assert_eq!(take_long(&mut run), ["a"]);
        assert_eq!((run.tally.passed, run.tally.skipped, run.cases.len()), (1, 1, 2));
    }
}
