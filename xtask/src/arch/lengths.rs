//! Checks the length of files and the width of comments.
//!
//! Lines of a file are all of its lines, comments and blank ones included, without its modules for tests: from
//! `#[cfg(test)]` at the margin to the brace at the margin that closes the module. Files of tests have no limit.

use std::path::Path;

use super::{
    Violation,
    baseline::{Counted, crate_of},
    comments,
};

/// Maximum number of lines of a file, without its tests.
const MAX_LINES: usize = 400;
/// Crates whose comments become the descriptions of fields, line by line.
const DESCRIPTIONS: &str = "kni-api";
/// Maximum number of columns of a line with a comment; rustfmt wraps code, but no comments.
const MAX_COLUMNS: usize = 120;

/// The lengths of one Rust file.
pub(super) fn check(path: &Path, text: &str) -> Vec<Counted> {
    let mut found = wide(path, text);
    let lines = lines(text);
    if lines > MAX_LINES && !is_of_tests(path) {
        // One violation for each line, so that a file that is too long today may not grow.
        let excess = lines - MAX_LINES;
        let rule = format!("{lines} lines without tests: at most {MAX_LINES}, split it by responsibility");
        let violation = Violation {
            path: path.to_owned(),
            line: 1,
            rule,
        };
        let counted = Counted {
            check: "lines".to_owned(),
            area: path.display().to_string(),
            violation,
        };
        found.extend(std::iter::repeat_n(counted, excess));
    }
    found
}

/// Whether the file has nothing but tests.
fn is_of_tests(path: &Path) -> bool {
    path.iter().any(|part| part == "tests" || part == "tests.rs")
}

/// The number of lines without the modules for tests.
fn lines(text: &str) -> usize {
    let mut number = 0;
    let mut is_test = false;
    let mut rest = text.lines().peekable();
    while let Some(line) = rest.next() {
        if is_test {
            is_test = line != "}";
        } else if line == "#[cfg(test)]" && rest.peek().is_some_and(|next| next.starts_with("mod ")) {
            is_test = rest.next().is_some_and(|next| next.ends_with('{'));
        } else {
            number += 1;
        }
    }
    number
}

/// The lines with a comment that are too wide. Rows of tables have to stay, and words that fit into no line.
fn wide(path: &Path, text: &str) -> Vec<Counted> {
    if path.starts_with(DESCRIPTIONS) {
        return Vec::new();
    }
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for prose in comments::of_rust(text) {
        let line = lines.get(prose.line - 1).copied().unwrap_or_default();
        let columns = line.chars().count();
        let longest = line.split_whitespace().map(|word| word.chars().count()).max();
        let is_row = prose.text.starts_with('|');
        if columns > MAX_COLUMNS && !is_row && longest.is_some_and(|longest| longest < MAX_COLUMNS / 2) {
            let rule = format!("a comment of {columns} columns: at most {MAX_COLUMNS}");
            found.push(Counted {
                check: "width".to_owned(),
                area: crate_of(path),
                violation: Violation {
                    path: path.to_owned(),
                    line: prose.line,
                    rule,
                },
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::baseline;

    fn rules(path: &str, text: &str) -> Vec<String> {
        baseline::shown(&check(Path::new(path), text))
    }

    #[test]
    fn a_file_without_its_tests_has_at_most_400_lines() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "    x\n".repeat(300));
        assert_eq!(
            rules("a/src/b.rs", &format!("{}{tests}", "x\n".repeat(400))),
            Vec::<String>::new()
        );
        let found = rules("a/src/b.rs", &format!("{}{tests}", "x\n".repeat(402)));
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            "a/src/b.rs:1: 402 lines without tests: at most 400, split it by responsibility"
        );
        assert_eq!(rules("a/src/tests.rs", &"x\n".repeat(500)), Vec::<String>::new());
    }

    #[test]
    fn a_comment_has_at_most_120_columns() {
        let comment = |words: usize| format!("fn f() {{}}\n/// {}\n", "ab cd ".repeat(words));
        assert_eq!(rules("a/src/b.rs", &comment(19)), Vec::<String>::new());
        assert_eq!(
            rules("a/src/b.rs", &comment(20)),
            ["a/src/b.rs:2: a comment of 124 columns: at most 120"]
        );
        let row = format!("//! | {} |\n", "ab cd ".repeat(20));
        assert_eq!(rules("a/src/b.rs", &row), Vec::<String>::new());
        let url = format!("// https://{}\n", "a".repeat(130));
        assert_eq!(rules("a/src/b.rs", &url), Vec::<String>::new());
        assert_eq!(
            rules("a/src/b.rs", &format!("let a = \"// {}\";\n", "a b ".repeat(40))),
            Vec::<String>::new()
        );
    }
}
