//! Compares violations with the numbers that are tolerated today, which may only go down.
//!
//! A row of `baseline.txt` is `check | area | number`: so many violations of the check were in the area when it was
//! introduced. More of them are errors. `cargo xtask arch --lower` writes the present numbers where they are smaller,
//! and removes rows that are not needed any more.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use anyhow::{Context, Result};

use super::Violation;
use crate::workspace::root;

/// The file with the tolerated numbers.
const FILE: &str = "xtask/src/arch/baseline.txt";

/// A violation whose number is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counted {
    /// The name of the check.
    pub(super) check: String,
    /// A crate or a file.
    pub(super) area: String,
    /// Where it is.
    pub(super) violation: Violation,
}

/// The tolerated numbers by check and area.
pub(super) type Baseline = BTreeMap<(String, String), usize>;

/// Reads the file.
pub(super) fn read() -> Result<Baseline> {
    let text = fs::read_to_string(root().join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Baseline> {
    let rows = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    rows.map(|row| {
        let (head, number) = row.rsplit_once(" | ").with_context(|| format!("{FILE}: {row}"))?;
        let (check, area) = head.split_once(" | ").with_context(|| format!("{FILE}: {row}"))?;
        let number = number.parse().with_context(|| format!("{FILE}: {row}"))?;
        Ok(((check.to_owned(), area.to_owned()), number))
    })
    .collect()
}

/// The violations of each check and area that has more than are tolerated.
pub(super) fn exceeding(found: &[Counted], baseline: &Baseline) -> Vec<Violation> {
    let numbers = numbers(found);
    let mut errors = Vec::new();
    for counted in found {
        let key = (counted.check.clone(), counted.area.clone());
        let tolerated = baseline.get(&key).copied().unwrap_or_default();
        let number = numbers.get(&key).copied().unwrap_or_default();
        if number > tolerated {
            let mut violation = counted.violation.clone();
            if tolerated > 0 {
                write!(violation.rule, " (one of {number}, tolerated are {tolerated})").unwrap_or_default();
            }
            errors.push(violation);
        }
    }
    errors
}

/// The rows whose numbers are larger than needed.
pub(super) fn slack(found: &[Counted], baseline: &Baseline) -> usize {
    let numbers = numbers(found);
    let is_smaller = |key, tolerated: &usize| numbers.get(key).copied().unwrap_or_default() < *tolerated;
    baseline
        .iter()
        .filter(|(key, tolerated)| is_smaller(key, tolerated))
        .count()
}

/// Writes the present numbers where they are smaller.
pub(super) fn lower(found: &[Counted], baseline: &Baseline) -> Result<()> {
    let path = root().join(FILE);
    fs::write(&path, lowered(found, baseline)).with_context(|| format!("cannot write {}", path.display()))
}

fn lowered(found: &[Counted], baseline: &Baseline) -> String {
    let numbers = numbers(found);
    let mut text = "# check | area | tolerated number; may only go down: cargo xtask arch --lower\n".to_owned();
    for (key, tolerated) in baseline {
        let number = numbers.get(key).copied().unwrap_or_default().min(*tolerated);
        if number > 0 {
            writeln!(text, "{} | {} | {number}", key.0, key.1).unwrap_or_default();
        }
    }
    text
}

fn numbers(found: &[Counted]) -> Baseline {
    let mut numbers = Baseline::new();
    for counted in found {
        *numbers
            .entry((counted.check.clone(), counted.area.clone()))
            .or_default() += 1;
    }
    numbers
}

/// The crate of a file: its folder in the repository.
pub(super) fn crate_of(path: &Path) -> String {
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
    let source = parts.iter().position(|part| part == "src").unwrap_or(1);
    let depth = if parts.first().is_some_and(|part| part == "tests") {
        2
    } else {
        source
    };
    parts.get(..depth).unwrap_or_default().join("/")
}

/// The texts of violations, as tests of the checks compare them.
#[cfg(test)]
pub(super) fn shown(found: &[Counted]) -> Vec<String> {
    found.iter().map(|found| found.violation.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(number: usize) -> Vec<Counted> {
        let violation = Violation {
            path: "a/src/b.rs".into(),
            line: 1,
            rule: "bad".to_owned(),
        };
        let counted = Counted {
            check: "word judge".to_owned(),
            area: "a".to_owned(),
            violation,
        };
        vec![counted; number]
    }

    #[test]
    fn more_than_tolerated_are_errors() {
        let baseline = parse("# x\nword judge | a | 2\n").unwrap();
        assert_eq!(exceeding(&found(2), &baseline), []);
        let errors = exceeding(&found(3), &baseline);
        assert_eq!(errors.len(), 3);
        assert_eq!(errors[0].rule, "bad (one of 3, tolerated are 2)");
        assert_eq!(exceeding(&found(1), &Baseline::new())[0].rule, "bad");
    }

    #[test]
    fn numbers_go_down_only() {
        let baseline = parse("word judge | a | 2\nwidth | b | 4\n").unwrap();
        assert_eq!(slack(&found(2), &baseline), 1);
        assert!(lowered(&found(1), &baseline).ends_with("\nword judge | a | 1\n"));
        assert!(lowered(&found(9), &baseline).ends_with("\nword judge | a | 2\n"));
    }

    #[test]
    fn files_belong_to_crates() {
        assert_eq!(crate_of(Path::new("kni-agent/pods/src/a/b.rs")), "kni-agent/pods");
        assert_eq!(crate_of(Path::new("tests/integration/src/a.rs")), "tests/integration");
        assert_eq!(crate_of(Path::new("docs/faq.md")), "docs");
    }
}
