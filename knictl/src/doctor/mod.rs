//! Describes what checks found, and prints them as a report.

mod admission;
mod blocks;
pub(crate) mod cluster;
pub(crate) mod controller;
mod definitions;
mod egress;
mod egress_pools;
pub(crate) mod foreign;
mod networks;
pub(crate) mod node;
mod reports;

use serde::{Deserialize, Serialize};

use crate::{cli::Format, document, error::Error, escape::escaped};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// It works, but an operator should know.
    Warning,
    /// Something does not work.
    Failure,
}

/// One problem that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// What it concerns, such as `network blue`.
    pub(crate) object: String,
    pub(crate) problem: String,
    /// What the operator can do.
    pub(crate) remedy: String,
}

impl Finding {
    /// Something does not work.
    pub(crate) fn failure(object: impl Into<String>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            severity: Severity::Failure,
            object: object.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// An operator should know.
    pub(crate) fn warning(object: impl Into<String>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::failure(object, problem, remedy)
        }
    }
}

/// One check with what it found; without findings it passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Check {
    /// What was checked: the cluster, or a node by name.
    pub(crate) scope: String,
    /// Stable name for programs, such as `agent-ready`.
    pub(crate) name: String,
    /// What should hold, as a sentence.
    pub(crate) title: String,
    pub(crate) findings: Vec<Finding>,
}

impl Check {
    /// A check of `scope` with what it found.
    pub(crate) fn new(scope: &str, name: &str, title: &str, findings: Vec<Finding>) -> Self {
        Self {
            scope: scope.to_owned(),
            name: name.to_owned(),
            title: title.to_owned(),
            findings,
        }
    }

    fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// The checks of a run, in the order in which they are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) checks: Vec<Check>,
}

impl Report {
    /// The report in a form of output.
    pub(crate) fn text(&self, format: Format) -> Result<String, Error> {
        match format {
            Format::Json => document::json(self),
            Format::Yaml => document::yaml(self),
            Format::Table | Format::Wide => Ok(self.people()),
        }
    }

    /// Whether something does not work.
    pub(crate) fn has_failures(&self) -> bool {
        self.checks.iter().any(|check| check.worst() == Some(Severity::Failure))
    }

    fn people(&self) -> String {
        let mut lines = Vec::new();
        let mut scope = "";
        let (mut warnings, mut failed) = (0, 0);
        for check in &self.checks {
            if scope != check.scope {
                scope = &check.scope;
                lines.push(escaped(scope));
            }
            let word = match check.worst() {
                None => "ok",
                Some(Severity::Warning) => "warning",
                Some(Severity::Failure) => "FAILED",
            };
            warnings += usize::from(check.worst() == Some(Severity::Warning));
            failed += usize::from(check.worst() == Some(Severity::Failure));
            lines.push(format!("  {word:<8} {}", escaped(&check.title)));
            for finding in &check.findings {
                lines.push(format!(
                    "           {}: {}",
                    escaped(&finding.object),
                    escaped(&finding.problem)
                ));
                lines.push(format!("             -> {}", escaped(&finding.remedy)));
            }
        }
        let total = self.checks.len();
        let passed = total - warnings - failed;
        lines.push(format!(
            "{total} checks: {passed} ok, {warnings} with warnings, {failed} failed"
        ));
        lines.join("\n") + "\n"
    }
}

/// Whether the remedy is more than a reference to the problem.
#[cfg(test)]
fn has_advice(finding: &Finding) -> bool {
    let empty = [
        "",
        "remove the cause",
        "remove the cause that the message names",
        "see the log of the agent",
    ];
    finding.remedy.split(' ').count() >= 3 && !empty.contains(&finding.remedy.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let full = Finding::warning("network blue", "2 addresses are left", "add a subnet");
        let gone = Finding::failure("network \u{1b}[31mred", "it is not ready", "read its conditions");
        Report {
            checks: vec![
                Check::new("cluster", "a", "All is well", vec![]),
                Check::new("cluster", "b", "The networks have free addresses", vec![full]),
                Check::new("node n1", "c", "The networks are ready", vec![gone]),
            ],
        }
    }

    #[test]
    fn people_read_what_is_wrong_and_what_to_do() {
        assert!(report().has_failures());
        assert_eq!(
            report().text(Format::Table).unwrap(),
            "cluster\n  ok       All is well\n  warning  The networks have free addresses\n           network blue: 2 \
             addresses are left\n             -> add a subnet\nnode n1\n  FAILED   The networks are ready\n           \
             network \\u{1b}[31mred: it is not ready\n             -> read its conditions\n3 checks: 1 ok, 1 with \
             warnings, 1 failed\n"
        );
    }

    #[test]
    fn warnings_alone_are_no_failure_and_json_reads_back() {
        let mut report = report();
        report.checks.pop();
        assert!(!report.has_failures());
        let text = report.text(Format::Json).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }
}
