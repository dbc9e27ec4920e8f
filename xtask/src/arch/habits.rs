//! Checks habits of tests and types: silent early returns, short patience, exclusive tests, `Deref` that is no guard.

use std::path::Path;

use super::{
    Violation,
    baseline::{Counted, crate_of},
};

/// The tests that run the programs.
const TESTS: &str = "tests/integration";
/// Calls that wait for something that must happen.
const WAITS: [&str; 4] = ["eventually(", "eventually_sync(", "until(", "until_sync("];
/// Texts before an early return that mean that the test did not run.
const SKIPS: [&str; 5] = [
    "if !long()",
    "if !is_long",
    "KNI_LONG",
    "not tested with",
    "KNI_PREVIOUS_AGENT",
];
/// Types that may implement `Deref`: guards, and what is removed when it is dropped.
const DEREF: [&str; 5] = ["Held", "Locked", "Node", "Pod", "Watched"];

/// The habits of one Rust file.
pub(super) fn check(path: &Path, text: &str) -> Vec<Counted> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let mut add = |check: &str, area: String, rule: String| {
            found.push(Counted {
                check: check.to_owned(),
                area,
                violation: Violation {
                    path: path.to_owned(),
                    line: index + 1,
                    rule,
                },
            });
        };
        let file = path.display().to_string();
        if let Some(name) = dereferenced(line).filter(|name| !DEREF.contains(name)) {
            let rule = format!("`{name}` is no guard: give it methods instead of `Deref`");
            add("deref", file.clone(), rule);
        }
        if !path.starts_with(TESTS) {
            continue;
        }
        if is_early_return(&lines, index) {
            let rule =
                "a test that returns without a check counts as passed: #[ignore = \"long: ...\"] or a requirement";
            add("early return", file.clone(), rule.to_owned());
        }
        if is_short_wait(line, lines.get(index + 1).copied().unwrap_or_default(), text) {
            let rule = "a wait for what must happen has less than a second: use patience()";
            add("short wait", file.clone(), rule.to_owned());
        }
        let mut names = line
            .trim_start()
            .strip_prefix("require!(")
            .unwrap_or_default()
            .split([',', ')']);
        if names.any(|name| name.trim() == "exclusive") {
            let rule = "an exclusive test keeps the whole machine: at most 4 of them";
            add("exclusive", crate_of(path), rule.to_owned());
        }
    }
    found
}

/// The type of `impl Deref for Type`.
fn dereferenced(line: &str) -> Option<&str> {
    let head = line.strip_prefix("impl")?;
    let (_, rest) = head.split_once("Deref for ")?;
    rest.split(|char: char| !char.is_alphanumeric()).next()
}

/// Whether the line returns early with success after a text that means that nothing was tested.
fn is_early_return(lines: &[&str], index: usize) -> bool {
    let is_return = lines
        .get(index)
        .is_some_and(|line| ["return Ok(());", "return;"].contains(&line.trim()));
    let before = lines.get(index.saturating_sub(4)..index).unwrap_or_default();
    let since = before
        .iter()
        .rposition(|line| line.trim_end().ends_with('}'))
        .map_or(0, |end| end + 1);
    let since = before.get(since..).unwrap_or_default();
    is_return && since.iter().any(|line| SKIPS.iter().any(|skip| line.contains(skip)))
}

/// Whether the first argument of a wait is below a second, itself or by a constant of the file.
fn is_short_wait(line: &str, next: &str, text: &str) -> bool {
    WAITS.iter().any(|wait| {
        let Some((_, rest)) = line.split_once(wait) else {
            return false;
        };
        let argument = if rest.is_empty() { next.trim() } else { rest };
        let (first, _) = argument.split_once(',').unwrap_or((argument, ""));
        let is_name = !first.is_empty() && first.chars().all(|char| char.is_ascii_uppercase() || char == '_');
        let constant = format!("const {first}: Duration = ");
        let value = if is_name {
            text.split_once(&constant).map_or("", |(_, value)| value)
        } else {
            first
        };
        let value = value.strip_prefix("Duration::from_millis(").unwrap_or_default();
        let digits: String = value
            .chars()
            .filter(|char| *char != '_')
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse::<u32>().is_ok_and(|millis| millis < 1000)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<(String, usize)> {
        let found = check(Path::new(path), text);
        found
            .into_iter()
            .map(|found| (found.check, found.violation.line))
            .collect()
    }

    fn in_tests(text: &str) -> Vec<(String, usize)> {
        rules("tests/integration/tests/node/a.rs", text)
    }

    #[test]
    fn a_silent_early_return_is_found() {
        let text = "fn a() -> Result<()> {\n    if !long() {\n        return Ok(());\n    }\n}\n";
        assert_eq!(in_tests(text), [("early return".to_owned(), 3)]);
        let text =
            "    let Ok(x) = y else {\n        println!(\"not tested with x\");\n        return Ok(());\n    };\n";
        assert_eq!(in_tests(text), [("early return".to_owned(), 3)]);
        let text = "    if !long() {\n        x();\n    }\n    if done {\n        return Ok(());\n    }\n";
        assert_eq!(in_tests(text), []);
    }

    #[test]
    fn a_short_wait_is_found() {
        let constant = "const SOON: Duration = Duration::from_millis(500);\n    eventually(SOON, || x()).await?;\n";
        assert_eq!(in_tests(constant), [("short wait".to_owned(), 2)]);
        assert_eq!(
            in_tests("    eventually_sync(Duration::from_millis(50), || x())?;\n").len(),
            1
        );
        assert_eq!(
            in_tests("    eventually_sync(Duration::from_millis(5_000), || x())?;\n"),
            []
        );
        assert_eq!(
            in_tests("    until(\n        Duration::from_millis(20),\n        x,\n").len(),
            1
        );
        assert_eq!(in_tests("    eventually(patience(), || x()).await?;\n"), []);
    }

    #[test]
    fn exclusive_tests_are_counted() {
        assert_eq!(
            in_tests("    require!(exclusive, root, netns);\n"),
            [("exclusive".to_owned(), 1)]
        );
        assert_eq!(in_tests("    require!(waiting, root);\n"), []);
    }

    #[test]
    fn only_guards_dereference() {
        assert_eq!(
            rules("a/src/b.rs", "impl std::ops::Deref for Shared {\n"),
            [("deref".to_owned(), 1)]
        );
        assert_eq!(rules("a/src/b.rs", "impl Deref for Locked<'_> {\n"), []);
    }
}
