//! Reads the report of a run of upstream's end-to-end tests.

use std::{fmt, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The result of a case that was attempted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Case {
    /// Its full name.
    pub(super) name: String,
    /// The part of the suite that it belongs to.
    pub(super) group: String,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    /// By itself, and why.
    Skipped(String),
    /// In any way, and why.
    Failed(String),
}

impl Case {
    pub(super) fn has_passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => write!(f, "passed"),
            Self::Skipped(why) => write!(f, "skipped: {why}"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// The cases of a report that Ginkgo wrote as JSON, without those that the run was not to execute.
pub(super) fn read(file: &Path) -> Result<Vec<Case>> {
    let text = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let report: Value = serde_json::from_slice(&text).with_context(|| file.display().to_string())?;
    let suites = report.as_array().context("a report without suites")?;
    let specs = suites
        .iter()
        .filter_map(|suite| suite["SpecReports"].as_array())
        .flatten();
    Ok(specs.filter_map(case).collect())
}

fn case(spec: &Value) -> Option<Case> {
    let leaf = spec["LeafNodeType"].as_str()?;
    let message = spec["Failure"]["Message"].as_str().unwrap_or_default();
    let state = spec["State"].as_str()?;
    let outcome = match (leaf, state) {
        ("It", "passed") => Outcome::Passed,
        // Without a message it was not selected.
        ("It", "skipped" | "pending") if message.is_empty() => return None,
        ("It", "skipped") => Outcome::Skipped(first_line(message)),
        // Setting up and tearing down the suite are reported only if they fail.
        (_, "passed" | "skipped") => return None,
        (_, state) => Outcome::Failed(format!("{state}: {}", first_line(message))),
    };
    let containers = spec["ContainerHierarchyTexts"].as_array();
    let texts: Vec<&str> = containers.into_iter().flatten().filter_map(Value::as_str).collect();
    let own = spec["LeafNodeText"].as_str().unwrap_or_default();
    let own = if leaf == "It" { own } else { leaf };
    let group = texts.first().copied().unwrap_or(leaf);
    Some(Case {
        name: [&texts[..], &[own]].concat().join(" "),
        group: group.trim_start_matches("[sig-network] ").to_owned(),
        outcome,
        took: Duration::from_nanos(spec["RunTime"].as_u64().unwrap_or_default()),
    })
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(leaf: &str, state: &str, message: &str) -> Value {
        json!({
            "ContainerHierarchyTexts": ["[sig-network] Part", "inner"],
            "LeafNodeType": leaf,
            "LeafNodeText": "does",
            "State": state,
            "RunTime": 2_000_000_000_u64,
            "Failure": { "Message": message },
        })
    }

    #[test]
    fn selected_cases_are_reported_with_their_reasons() {
        let passed = case(&spec("It", "passed", "")).unwrap();
        assert_eq!(passed.name, "[sig-network] Part inner does");
        assert_eq!((passed.group.as_str(), passed.took), ("Part", Duration::from_secs(2)));
        assert_eq!(passed.outcome, Outcome::Passed);
        assert_eq!(case(&spec("It", "skipped", "")), None);
        let skipped = case(&spec("It", "skipped", "needs more\nhere")).unwrap();
        assert_eq!(skipped.outcome, Outcome::Skipped("needs more".into()));
        let failed = case(&spec("It", "timedout", "late")).unwrap();
        assert_eq!(failed.outcome, Outcome::Failed("timedout: late".into()));
        assert_eq!(case(&spec("SynchronizedBeforeSuite", "passed", "")), None);
        assert!(case(&spec("SynchronizedBeforeSuite", "failed", "no node")).is_some());
    }
}
