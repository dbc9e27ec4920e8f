//! `flakes`: which tests needed a second try or failed in the saved reports.

use std::collections::BTreeMap;

use anyhow::Result;

use super::report::{self, Row, Saved};

/// The second tries for each run that the project allows itself, over the saved reports.
const BUDGET: f64 = 0.2;

/// Counts of one test.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    second: usize,
    failed: usize,
    /// The last reason.
    reason: String,
}

/// Runs the command.
pub(crate) fn command() -> Result<()> {
    for line in table(&report::saved()?) {
        println!("{line}");
    }
    Ok(())
}

fn table(saved: &[Saved]) -> Vec<String> {
    let mut tests: BTreeMap<(&str, &str), Counts> = BTreeMap::new();
    for row in saved.iter().flat_map(|saved| &saved.rows) {
        let is_second = row.tries > 1;
        let is_failed = matches!(row.outcome.as_str(), "failed" | "quarantined");
        if is_second || is_failed {
            let counts = tests.entry((&row.program, &row.test)).or_default();
            counts.second += usize::from(is_second);
            counts.failed += usize::from(is_failed);
            row.reason.clone_into(&mut counts.reason);
        }
    }
    let tries = saved
        .iter()
        .flat_map(|saved| &saved.rows)
        .filter(|row: &&Row| row.tries > 1)
        .count();
    let runs = u32::try_from(saved.len()).unwrap_or(u32::MAX);
    let rate = f64::from(u32::try_from(tries).unwrap_or(u32::MAX)) / f64::from(runs.max(1));
    let verdict = if rate > BUDGET { "over" } else { "within" };
    let mut lines = vec![format!(
        "{runs} runs with {tries} second tries, {rate:.2} for each run: {verdict} the budget of {BUDGET}"
    )];
    let mut tests: Vec<((&str, &str), Counts)> = tests.into_iter().collect();
    tests.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.second + counts.failed));
    for ((program, test), counts) in tests {
        lines.push(format!(
            "{:4} second tries {:4} failures  {program}::{test}  ({})",
            counts.second, counts.failed, counts.reason
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, outcome: &str, tries: u32) -> Row {
        Row {
            program: "node".to_owned(),
            test: test.to_owned(),
            outcome: outcome.to_owned(),
            seconds: 1.0,
            tries,
            reason: "waited".to_owned(),
        }
    }

    #[test]
    fn tests_that_were_not_plainly_good_are_counted() {
        let runs = [
            vec![row("a", "passed", 2), row("b", "passed", 1)],
            vec![row("a", "failed", 2), row("b", "passed", 1)],
            vec![row("c", "failed", 1)],
        ];
        let saved: Vec<Saved> = runs.into_iter().map(|rows| Saved { rows }).collect();
        assert_eq!(
            table(&saved),
            [
                "3 runs with 2 second tries, 0.67 for each run: over the budget of 0.2",
                "   2 second tries    1 failures  node::a  (waited)",
                "   0 second tries    1 failures  node::c  (waited)",
            ]
        );
        assert_eq!(
            table(&[]),
            ["0 runs with 0 second tries, 0.00 for each run: within the budget of 0.2"]
        );
    }
}
