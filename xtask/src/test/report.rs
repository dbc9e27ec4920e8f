//! The reports of a run: `target/test-report.json` and `.xml` (`JUnit`), and a line for each test in
//! `target/test-reports`.

use std::{
    fmt::Write as _,
    fs,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

use super::{
    reader::{Case, End},
    suite::Outcome,
};
use crate::workspace::target;

/// How many earlier reports are retained.
const RETAINED: usize = 20;

/// A test as reports describe it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) program: String,
    pub(super) test: String,
    pub(super) outcome: String,
    pub(super) seconds: f64,
    pub(super) tries: u32,
    pub(super) reason: String,
}

impl Row {
    fn new(program: &str, case: &Case) -> Self {
        let (outcome, reason) = match &case.end {
            End::Passed => ("passed", case.first.clone().unwrap_or_default()),
            End::Failed(failure) => ("failed", failure.reason()),
            End::Quarantined(failure) => ("quarantined", failure.reason()),
            End::Ignored(reason) => ("ignored", reason.clone()),
            End::Skipped => ("skipped", String::new()),
        };
        Self {
            program: program.to_owned(),
            test: case.test.clone(),
            outcome: outcome.to_owned(),
            seconds: case.time.as_ref().map_or(0.0, |time| time.seconds),
            tries: case.tries,
            reason,
        }
    }

    fn json(&self) -> String {
        format!(
            "{{\"program\": {}, \"name\": {}, \"outcome\": {}, \"seconds\": {:.1}, \"tries\": {}, \"reason\": {}}}",
            json(&self.program),
            json(&self.test),
            json(&self.outcome),
            self.seconds,
            self.tries,
            json(&self.reason)
        )
    }

    fn xml(&self) -> String {
        let content = match self.outcome.as_str() {
            "failed" => format!("<failure message=\"{}\"/>", xml(&self.reason)),
            "passed" if self.tries > 1 => format!("<flakyFailure message=\"{}\"/>", xml(&self.reason)),
            "passed" => String::new(),
            _ => format!("<skipped message=\"{}\"/>", xml(&self.reason)),
        };
        format!(
            "<testcase classname=\"{}\" name=\"{}\" time=\"{:.1}\">{content}</testcase>",
            xml(&self.program),
            xml(&self.test),
            self.seconds
        )
    }

    /// A line whose fields are separated by tabulators.
    fn line(&self) -> String {
        let reason = self.reason.replace(char::is_control, " ");
        format!(
            "{}\t{}\t{}\t{:.1}\t{}\t{reason}",
            self.program, self.test, self.outcome, self.seconds, self.tries
        )
    }

    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split('\t').collect();
        let [program, test, outcome, seconds, tries, reason] = fields.as_slice() else {
            return None;
        };
        Some(Self {
            program: (*program).to_owned(),
            test: (*test).to_owned(),
            outcome: (*outcome).to_owned(),
            seconds: seconds.parse().ok()?,
            tries: tries.parse().ok()?,
            reason: (*reason).to_owned(),
        })
    }
}

/// An earlier report.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Saved {
    pub(super) rows: Vec<Row>,
}

/// Writes the reports of a run on a machine with this `slowness`.
pub(super) fn write(outcome: &Outcome, slowness: f64) -> Result<()> {
    let rows: Vec<Row> = outcome.cases().map(|(program, case)| Row::new(program, case)).collect();
    let tally = outcome.tally();
    let tests: Vec<String> = rows.iter().map(|row| format!("    {}", row.json())).collect();
    let text = format!(
        "{{\n  \"slowness\": {slowness:.2},\n  \"passed\": {},\n  \"failed\": {},\n  \"skipped\": {},\n  \"tests\": [\n{}\n  ]\n}}\n",
        tally.passed,
        tally.failed,
        tally.skipped,
        tests.join(",\n")
    );
    save("test-report.json", &text)?;
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"kni\" tests=\"{}\" failures=\"{}\" skipped=\"{}\">\n",
        rows.len(),
        tally.failed,
        tally.skipped
    );
    for row in &rows {
        // Writing to a text cannot fail.
        writeln!(text, "  {}", row.xml()).unwrap_or_default();
    }
    text.push_str("</testsuite>\n");
    save("test-report.xml", &text)?;
    let lines: Vec<String> = rows.iter().map(Row::line).collect();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    save(&format!("test-reports/{now:012}.tsv"), &lines.join("\n"))?;
    for path in files()?.iter().rev().skip(RETAINED) {
        fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// The earlier reports, the oldest first.
pub(super) fn saved() -> Result<Vec<Saved>> {
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Saved {
            rows: text.lines().filter_map(Row::parse).collect(),
        })
    };
    files()?.iter().map(read).collect()
}

fn files() -> Result<Vec<PathBuf>> {
    let folder = target().join("test-reports");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "tsv"));
    files.sort();
    Ok(files)
}

fn save(name: &str, text: &str) -> Result<()> {
    let path = target().join(name);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A text of JSON.
fn json(text: &str) -> String {
    let mut quoted = "\"".to_owned();
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            char if char < ' ' => write!(quoted, "\\u{:04x}", u32::from(char)).unwrap_or_default(),
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    quoted
}

/// A text as the value of an attribute of XML.
fn xml(text: &str) -> String {
    let text = text.replace(|char: char| char < ' ', " ");
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            program: "node".to_owned(),
            test: "a::b".to_owned(),
            outcome: "passed".to_owned(),
            seconds: 1.5,
            tries: 2,
            reason: "waited \"60s\"\u{1b} <in> vain".to_owned(),
        }
    }

    #[test]
    fn reports_quote_reasons() {
        assert_eq!(
            row().json(),
            "{\"program\": \"node\", \"name\": \"a::b\", \"outcome\": \"passed\", \"seconds\": 1.5, \"tries\": 2, \
             \"reason\": \"waited \\\"60s\\\"\\u001b <in> vain\"}"
        );
        assert_eq!(
            row().xml(),
            "<testcase classname=\"node\" name=\"a::b\" time=\"1.5\"><flakyFailure message=\"waited &quot;60s&quot;  \
             &lt;in&gt; vain\"/></testcase>"
        );
    }

    #[test]
    fn a_saved_line_is_read_again() {
        let read = Row::parse(&row().line()).unwrap();
        let reason = "waited \"60s\"  <in> vain".to_owned();
        assert_eq!(read, Row { reason, ..row() });
        assert_eq!(Row::parse("node\ta"), None);
    }
}
