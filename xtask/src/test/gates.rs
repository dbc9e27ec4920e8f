//! The table of the gates: how long the tests of each took, beside its budget. A gate over its budget does not fail the
//! run.

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
    ("engine", "dataplane", 180.0),
    ("node", "node", 300.0),
    ("cluster", "cluster", 360.0),
    ("cri", "cri", 360.0),
];

/// Prints the table and the slowest tests.
pub(super) fn report(outcome: &Outcome, slowness: f64) {
    for (gate, program, budget) in BUDGETS {
        // Programs of units run one after the other, the others at once.
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
            seconds += run.seconds;
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

    #[test]
    fn the_slowest_come_first() {
        let case = |test: &str, seconds: f64| Case {
            test: test.to_owned(),
            end: End::Passed,
            time: Some(Time {
                seconds,
                share: "Busy".to_owned(),
            }),
            tries: 1,
            first: None,
        };
        let cases: Vec<Case> = (0..20).map(|number| case("a", f64::from(number))).collect();
        let lines = slowest(cases.iter().map(|case| ("node", case)));
        assert_eq!(lines.len(), SLOWEST);
        assert_eq!(lines.first().unwrap(), "    19.0 s  node a (Busy)");
    }
}
