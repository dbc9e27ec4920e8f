//! The table of the gates: how long the machine worked for the tests of each, beside its budget. A gate over its budget
//! does not fail the run.

use super::{
    reader::{Case, Time},
    suite::Outcome,
};
use crate::progress::say;

/// How many of the slowest tests are listed.
const SLOWEST: usize = 10;
/// The part of a budget by which a gate may exceed it.
const TOLERANCE: f64 = 1.3;
/// The gates, by test program, each with its budget in seconds on the reference machine.
const BUDGETS: [(&str, &str, f64); 5] = [
    ("units", "", 60.0),
    ("engine", "dataplane", 150.0),
    ("node", "node", 420.0),
    ("cluster", "cluster", 400.0),
    ("cri", "cri", 360.0),
];
/// The part of the machine that a test takes, by the first word of its share: the slots of `tests/integration`, of six
/// on two CPUs.
const PARTS: [(&str, f64); 4] = [
    ("Exclusive", 1.0),
    ("Steady", 3.0 / 6.0),
    ("Busy", 2.0 / 6.0),
    ("Waiting", 1.0 / 6.0),
];

/// Prints the table and the slowest tests.
pub(super) fn report(outcome: &Outcome, slowness: f64) {
    for (gate, program, budget) in BUDGETS {
        // Programs of units run one after the other. The others run at once: their tests share the machine.
        let runs = outcome.runs.iter().filter(|run| {
            if program.is_empty() {
                !run.is_integration
            } else {
                run.program == program
            }
        });
        let (mut tests, mut seconds) = (0, 0.0);
        for run in runs {
            tests += run.cases.len();
            seconds += if program.is_empty() {
                run.seconds
            } else {
                worked(&run.cases)
            };
        }
        if tests > 0 {
            say(&line(gate, tests, seconds, budget * slowness));
        }
    }
    let times = slowest(outcome.cases());
    if !times.is_empty() {
        say("the slowest tests:");
        for time in &times {
            say(time);
        }
    }
}

/// The seconds for which the whole machine would work for the tests.
fn worked(cases: &[Case]) -> f64 {
    let of = |time: &Time| {
        let word = time.share.split(',').next().unwrap_or_default();
        let part = PARTS.iter().find(|(share, _)| *share == word);
        time.seconds * part.map_or(1.0, |(_, part)| *part)
    };
    cases.iter().filter_map(|case| case.time.as_ref().map(of)).sum()
}

fn line(gate: &str, tests: usize, seconds: f64, budget: f64) -> String {
    let verdict = if seconds > TOLERANCE * budget {
        ", OVER BUDGET"
    } else {
        ""
    };
    format!("gate {gate:8} {tests:5} tests {seconds:6.0} s, budget {budget:.0} s{verdict}")
}

fn slowest<'a>(cases: impl Iterator<Item = (&'a str, &'a Case)>) -> Vec<String> {
    let mut times: Vec<(&str, &Case, &Time)> = cases
        .filter_map(|(program, case)| Some((program, case, case.time.as_ref()?)))
        .collect();
    times.sort_by(|a, b| b.2.seconds.total_cmp(&a.2.seconds));
    let listed = times.into_iter().take(SLOWEST);
    listed
        .map(|(program, case, time)| format!("  {:6.1} s  {program} {} ({})", time.seconds, case.test, time.share))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::reader::End;

    #[test]
    fn a_gate_far_over_its_budget_is_marked() {
        assert_eq!(
            line("node", 265, 380.0, 300.0),
            "gate node       265 tests    380 s, budget 300 s"
        );
        assert!(line("node", 265, 391.0, 300.0).ends_with(", OVER BUDGET"));
    }

    fn case(test: &str, seconds: f64, share: &str) -> Case {
        let share = share.to_owned();
        Case {
            test: test.to_owned(),
            end: End::Passed,
            time: Some(Time { seconds, share }),
            tries: 1,
            first: None,
        }
    }

    #[test]
    fn a_test_counts_by_its_part_of_the_machine() {
        let shares = [
            "Steady, waited 3.0 s",
            "Busy, waited 1.0 s",
            "Waiting, waited 9.0 s",
            "Exclusive",
        ];
        let cases = shares.map(|share| case("a", 6.0, share));
        assert!((worked(&cases) - 12.0).abs() < 1e-9);
    }

    #[test]
    fn the_slowest_come_first() {
        let cases: Vec<Case> = (0..20).map(|number| case("a", f64::from(number), "Busy")).collect();
        let lines = slowest(cases.iter().map(|case| ("node", case)));
        assert_eq!(lines.len(), SLOWEST);
        assert_eq!(lines.first().unwrap(), "    19.0 s  node a (Busy)");
    }
}
