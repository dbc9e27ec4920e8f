//! Repeats tests in the built programs, on a machine that may be made slower, and reports how sure the result is.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{
    ledger::Ledger,
    reader::{Case, End},
    run::{self, Environment, Job},
    second::{self, Settled},
    suite::{self, Outcome},
    times,
};
use crate::progress::say;

/// How to repeat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) times: u32,
    /// Whether the order is random.
    pub(super) shuffle: bool,
    pub(super) seed: Option<u64>,
}

/// Runs `jobs` as often as `manner` demands, into `outcome`; stops at the first wrong result.
pub(super) fn run(
    jobs: &[Job],
    manner: &Manner,
    environment: &Environment,
    ledger: &Ledger,
    outcome: &mut Outcome,
) -> Result<()> {
    let start = Instant::now();
    let mut done = 0;
    for number in 1..=manner.times {
        let environment = prepared(jobs, manner, number, environment)?;
        let repetition = suite::run(jobs, &environment, ledger, false)?;
        let checked = suite::check(&repetition, "");
        outcome.runs.extend(repetition.runs);
        outcome.settled.add(repetition.settled);
        if let Err(error) = checked {
            summarise(outcome, done, start.elapsed());
            return Err(error.context(format!("repetition {number} of {}", manner.times)));
        }
        done = number;
        say(&format!(
            "repetition {number} of {}: passed, {} second tries so far, {:.0} s",
            manner.times,
            outcome.settled.tried.len(),
            start.elapsed().as_secs_f64()
        ));
    }
    summarise(outcome, done, start.elapsed());
    if outcome.tally().passed == 0 {
        bail!("no test ran");
    }
    Ok(())
}

/// The environment of one repetition: its seed and its order.
fn prepared(jobs: &[Job], manner: &Manner, number: u32, environment: &Environment) -> Result<Environment> {
    let mut environment = environment.clone();
    let seed = manner.seed.map(|seed| seed.wrapping_add(u64::from(number - 1)));
    if let Some(seed) = seed {
        environment.insert("KNI_SEED", seed.to_string().into());
        say(&format!("seed {seed}"));
    }
    if manner.shuffle {
        let mut tests = Vec::new();
        for job in jobs.iter().filter(|job| job.program.is_integration()) {
            let names = if job.tests.is_empty() {
                run::list(&job.program)?
            } else {
                job.tests.clone()
            };
            tests.extend(names.into_iter().map(|name| (job.program.name.as_str(), name)));
        }
        let seed = seed.unwrap_or_else(|| u64::from(number));
        let order = times::shuffle(tests.iter().map(|(program, test)| (*program, test.as_str())), seed)?;
        environment.insert(times::VARIABLE, order.into());
    }
    Ok(environment)
}

fn summarise(outcome: &Outcome, repetitions: u32, took: Duration) {
    for line in lines(outcome, repetitions, took) {
        say(&line);
    }
}

fn lines(outcome: &Outcome, repetitions: u32, took: Duration) -> Vec<String> {
    let tally = outcome.tally();
    let Settled { tried, .. } = &outcome.settled;
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let failures = count(tally.failed);
    let runs = failures.saturating_add(count(tally.passed));
    let second = count(tried.len());
    let mut lines = vec![
        format!(
            "{repetitions} repetitions in {:.0} s: {} passed, {failures} failed, {second} second tries",
            took.as_secs_f64(),
            tally.passed
        ),
        format!(
            "with 95 % confidence, one try of a test fails in at most {:.2} % of all cases, one of both tries in at most {:.2} %",
            100.0 * bound(failures + second, runs),
            100.0 * bound(failures, runs)
        ),
        format!(
            "and a repetition of all in at most {:.1} %",
            100.0 * bound(u32::from(failures > 0), repetitions + u32::from(failures > 0))
        ),
    ];
    let slowest = outcome.cases().filter(|(_, case)| case.time.is_some());
    let seconds = |case: &Case| case.time.as_ref().map_or(0.0, |time| time.seconds);
    if let Some((program, case)) = slowest.max_by(|a, b| seconds(a.1).total_cmp(&seconds(b.1))) {
        lines.push(format!("slowest: {:.1} s, {program} {}", seconds(case), case.test));
    }
    for (program, case) in outcome.cases() {
        if matches!(case.end, End::Failed(_)) {
            lines.push(format!("again: {}", second::repetition(program, &case.test)));
        }
    }
    lines
}

/// The upper limit of the rate of failures, with 95 % confidence, after `failures` in `runs`: the rule of three without
/// any.
fn bound(failures: u32, runs: u32) -> f64 {
    if runs == 0 {
        return 1.0;
    }
    // The expected number at which so few failures have a probability of 5 %.
    let (mut low, mut high) = (0.0, f64::from(failures) * 2.0 + 20.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if at_most(failures, middle) > 0.05 {
            low = middle;
        } else {
            high = middle;
        }
    }
    (high / f64::from(runs)).min(1.0)
}

/// The probability of at most `failures` if `expected` are expected.
fn at_most(failures: u32, expected: f64) -> f64 {
    let (mut term, mut sum) = ((-expected).exp(), 0.0);
    for number in 0..=failures {
        if number > 0 {
            term *= expected / f64::from(number);
        }
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::{run::Run, tally::Tally};

    #[test]
    fn the_bound_without_a_failure_is_three_by_the_number() {
        let is = |value: f64, expected: f64| assert!((value - expected).abs() < 0.0005, "{value}");
        is(bound(0, 200), 0.015);
        is(bound(1, 100), 0.0474);
        is(bound(5, 100), 0.1051);
        is(bound(0, 2), 1.0);
        is(bound(0, 0), 1.0);
    }

    #[test]
    fn a_summary_names_the_rates() {
        let run = Run {
            tally: Tally {
                passed: 200,
                ..Tally::default()
            },
            ..Run::default()
        };
        let outcome = Outcome {
            runs: vec![run],
            ..Outcome::default()
        };
        let lines = lines(&outcome, 200, Duration::from_secs(90));
        assert_eq!(
            lines.first().unwrap(),
            "200 repetitions in 90 s: 200 passed, 0 failed, 0 second tries"
        );
        assert!(
            lines.get(1).unwrap().contains("at most 1.50 % of all cases"),
            "{lines:?}"
        );
    }
}
