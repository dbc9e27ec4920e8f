//! Checks the subjects of new commits.

use std::process::Command;

use anyhow::Result;

use super::Violation;
use crate::{command::output, progress::say, workspace::root};

/// The last commit whose subject is not checked, nor those before it.
const FIRST_CHECKED: &str = "9a113c4f050f28803ade4524e706635770440a66";
/// Maximum length of a subject.
const MAX_COLUMNS: usize = 72;

/// The subjects since [`FIRST_CHECKED`] that break a rule; none in a tree without that history.
pub(super) fn check() -> Result<Vec<Violation>> {
    let git = || {
        let mut command = Command::new("git");
        command.arg("-C").arg(root());
        command
    };
    if output(git().args(["merge-base", "--is-ancestor", FIRST_CHECKED, "HEAD"])).is_err() {
        say("arch: subjects of commits are not checked: there is no history of them");
        return Ok(Vec::new());
    }
    let log = output(git().args([
        "log",
        "--no-merges",
        "--format=%h %s",
        &format!("{FIRST_CHECKED}..HEAD"),
    ]))?;
    Ok(log.lines().flat_map(of_line).collect())
}

/// The broken rules of one line, a short hash and a subject.
fn of_line(line: &str) -> Vec<Violation> {
    let (hash, subject) = line.split_once(' ').unwrap_or((line, ""));
    let columns = subject.chars().count();
    let is_area = |area: &str| !area.is_empty() && !area.contains(char::is_whitespace);
    let has_area = subject
        .split_once(": ")
        .is_some_and(|(areas, text)| areas.split(", ").all(is_area) && !text.is_empty());
    let rules = [
        (
            columns > MAX_COLUMNS,
            format!("{columns} columns, at most {MAX_COLUMNS}"),
        ),
        (!has_area, "no area, `area: what changed`".to_owned()),
        (subject.ends_with('.'), "a full stop".to_owned()),
    ];
    let broken = rules.into_iter().filter(|(is_broken, _)| *is_broken);
    let violation = |(_, what)| Violation {
        path: format!("commit {hash}").into(),
        line: 1,
        rule: format!("the subject has {what}: {subject}"),
    };
    broken.map(violation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_has_an_area_72_columns_and_no_full_stop() {
        assert_eq!(of_line("abc docs: what changed"), []);
        assert_eq!(of_line("abc pods, netlink: what changed"), []);
        let rule = |line: &str| of_line(line).iter().map(|found| found.rule.clone()).collect::<Vec<_>>();
        assert_eq!(rule("abc docs: a."), ["the subject has a full stop: docs: a."]);
        assert_eq!(rule("abc WIP"), ["the subject has no area, `area: what changed`: WIP"]);
        assert!(rule(&format!("abc docs: {}", "a".repeat(67)))[0].starts_with("the subject has 73 columns"));
    }
}
