//! The recorded seconds of each privileged test, `tests/times.toml`: the longest of those that wait begins first.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{
    reader::{Case, End},
    suite::Outcome,
};
use crate::workspace::{root, target};

/// The tests read the file of this variable; without it they begin in the order of their names.
pub(super) const VARIABLE: &str = "KNI_TEST_TIMES";

/// Seconds by program and path.
pub(super) type Times = BTreeMap<String, BTreeMap<String, f64>>;

/// The file of the repository.
pub(super) fn file() -> PathBuf {
    root().join("tests/times.toml")
}

/// Writes the times of a complete run into the file `path`.
pub(super) fn record(outcome: &Outcome, path: &Path) -> Result<()> {
    write(path, &measured(outcome.cases()))
}

/// Writes a file with random times, so that the tests `tests` (program and path) begin in an order that `seed` decides.
pub(super) fn shuffle<'a>(tests: impl Iterator<Item = (&'a str, &'a str)>, seed: u64) -> Result<PathBuf> {
    let mut state = seed;
    let mut times = Times::new();
    for (program, test) in tests {
        let of_program = times.entry(program.to_owned()).or_default();
        of_program.insert(test.to_owned(), f64::from(random(&mut state)) / 10.0);
    }
    let path = target().join("test-order.toml");
    write(&path, &times)?;
    Ok(path)
}

/// The next of a sequence of numbers below 10 000, by the generator `SplitMix64`.
fn random(state: &mut u64) -> u32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut value = *state;
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    u32::try_from((value ^ (value >> 31)) % 10_000).unwrap_or_default()
}

fn measured<'a>(cases: impl Iterator<Item = (&'a str, &'a Case)>) -> Times {
    let mut times = Times::new();
    for (program, case) in cases {
        if let (End::Passed, Some(time)) = (&case.end, &case.time) {
            let of_program = times.entry(program.to_owned()).or_default();
            of_program.insert(case.test.clone(), time.seconds);
        }
    }
    times
}

fn write(path: &Path, times: &Times) -> Result<()> {
    fs::write(path, text(times)).with_context(|| format!("cannot write {}", path.display()))
}

fn text(times: &Times) -> String {
    let mut text =
        "# Seconds of each privileged test, written by `cargo xtask test --record`. The longest begin first.\n"
            .to_owned();
    for (program, tests) in times {
        // Writing to a text cannot fail.
        writeln!(text, "\n[{program}]").unwrap_or_default();
        for (test, seconds) in tests {
            writeln!(text, "\"{test}\" = {seconds:.1}").unwrap_or_default();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::reader::Time;

    fn case(test: &str, end: End, seconds: Option<f64>) -> Case {
        let share = String::new();
        Case {
            test: test.to_owned(),
            end,
            time: seconds.map(|seconds| Time { seconds, share }),
            tries: 1,
            first: None,
        }
    }

    #[test]
    fn times_of_good_tests_are_recorded() {
        let cases = [
            case("b", End::Passed, Some(2.04)),
            case("a::c", End::Passed, Some(12.0)),
            case(
                "failed",
                End::Failed(super::super::failure::Failure::default()),
                Some(1.0),
            ),
            case("unmeasured", End::Passed, None),
        ];
        let times = measured(cases.iter().map(|case| ("node", case)));
        let text = text(&times);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(lines, ["", "[node]", "\"a::c\" = 12.0", "\"b\" = 2.0"]);
    }

    #[test]
    fn a_seed_decides_the_order() {
        let numbers = |seed: u64| {
            let mut state = seed;
            [0; 4].map(|_: u32| random(&mut state))
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
    }
}
