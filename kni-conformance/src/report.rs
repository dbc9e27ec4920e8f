//! Presents the results of a run: as a table, as JSON and as the XML of `JUnit`.

use std::fmt::Write as _;

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use crate::cases::Level;

/// Most characters of a reason in the table; the documents have all of it.
const REASON: usize = 200;
/// Spaces between columns.
const GAP: u16 = 2;

/// The result of a case, and why it did not pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", content = "why", rename_all = "kebab-case")]
pub enum Outcome {
    /// The server behaves as required.
    Passed,
    /// It does not.
    Failed(String),
    /// It lacks the optional feature.
    NotOffered(String),
}

impl Outcome {
    /// The name of the result.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::NotOffered(_) => "not offered",
        }
    }

    /// Why the case did not pass; empty if it did.
    pub fn reason(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Failed(reason) | Self::NotOffered(reason) => reason,
        }
    }
}

/// The result of a case.
#[derive(Debug, Clone, Serialize)]
pub struct CaseResult {
    /// Level of the case.
    pub level: Level,
    /// Name of the case.
    pub name: &'static str,
    /// Its result.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Its duration, with the cleanup.
    pub seconds: f64,
}

impl CaseResult {
    /// Whether the server does not behave as required.
    pub fn is_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// The results of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// In the order of the cases.
    pub results: Vec<CaseResult>,
}

impl Report {
    /// The failed cases.
    pub fn failed(&self) -> impl Iterator<Item = &CaseResult> {
        self.results.iter().filter(|result| result.is_failed())
    }

    /// One line per case, and a summary.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header(["LEVEL", "CASE", "RESULT", "TIME", "WHY"]);
        for result in &self.results {
            table.add_row([
                result.level.to_string(),
                result.name.to_owned(),
                result.outcome.name().to_owned(),
                format!("{:.2} s", result.seconds),
                short(result.outcome.reason()),
            ]);
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, GAP));
        }
        let count = |name: &str| {
            self.results
                .iter()
                .filter(|result| result.outcome.name() == name)
                .count()
        };
        let counts = ["passed", "failed", "not offered"].map(|name| format!("{} {name}", count(name)));
        format!("{}\n\n{}\n", table.trim_fmt(), counts.join(", "))
    }

    /// A JSON document.
    pub fn json(&self) -> String {
        // A report has neither maps with other keys than texts nor types that fail to serialize.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// A test suite in the XML of `JUnit`; what is not offered is skipped.
    pub fn junit(&self) -> String {
        let failures = self.failed().count();
        let skipped = self
            .results
            .iter()
            .filter(|result| matches!(result.outcome, Outcome::NotOffered(_)));
        let mut xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"kni-conformance\" tests=\"{}\" \
             failures=\"{failures}\" skipped=\"{}\">\n",
            self.results.len(),
            skipped.count()
        );
        for CaseResult {
            level,
            name,
            outcome,
            seconds,
        } in &self.results
        {
            let reason = escaped(outcome.reason());
            let inner = match outcome {
                Outcome::Passed => String::new(),
                Outcome::Failed(_) => format!("<failure message=\"{reason}\"/>"),
                Outcome::NotOffered(_) => format!("<skipped message=\"{reason}\"/>"),
            };
            // Writing into a string cannot fail.
            writeln!(
                xml,
                "  <testcase classname=\"{level}\" name=\"{name}\" time=\"{seconds:.3}\">{inner}</testcase>"
            )
            .unwrap_or_default();
        }
        xml + "</testsuite>\n"
    }
}

/// A text of the server without control characters.
fn one_line(text: &str) -> String {
    text.chars()
        .map(|char| if char.is_control() { ' ' } else { char })
        .collect()
}

fn short(reason: &str) -> String {
    let mut text: String = one_line(reason).chars().take(REASON).collect();
    if reason.chars().nth(REASON).is_some() {
        text.push('…');
    }
    text
}

fn escaped(text: &str) -> String {
    one_line(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let result = |level, name, outcome| CaseResult {
            level,
            name,
            outcome,
            seconds: 0.5,
        };
        Report {
            results: vec![
                result(Level::Core, "good", Outcome::Passed),
                result(Level::Core, "bad", Outcome::Failed("a < b\n\"c\"".to_owned())),
                result(Level::Extended, "absent", Outcome::NotOffered("none".to_owned())),
            ],
        }
    }

    #[test]
    fn a_table_has_all_results() {
        let table = report().table();
        let lines: Vec<&str> = table.lines().map(str::trim_end).collect();
        assert_eq!(
            lines,
            [
                "LEVEL     CASE    RESULT       TIME    WHY",
                "core      good    passed       0.50 s",
                "core      bad     failed       0.50 s  a < b \"c\"",
                "extended  absent  not offered  0.50 s  none",
                "",
                "1 passed, 1 failed, 1 not offered",
            ]
        );
    }

    #[test]
    fn documents_have_all_results() {
        let value: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        let bad = serde_json::json!({
            "level": "core", "name": "bad", "result": "failed", "why": "a < b\n\"c\"", "seconds": 0.5,
        });
        assert_eq!(value["results"][1], bad);
        assert_eq!(value["results"][2]["result"], "not-offered");
        let xml = report().junit();
        assert!(xml.contains("tests=\"3\" failures=\"1\" skipped=\"1\""), "{xml}");
        assert!(xml.contains("<failure message=\"a &lt; b &quot;c&quot;\"/>"), "{xml}");
    }
}
