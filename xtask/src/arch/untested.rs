//! Finds tests that no command runs: doctests, and unit tests in a target whose manifest has `test = false`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{Violation, manifest::Member, read_sources};
use crate::workspace::root;

/// What follows the fence of an example that rustdoc does not compile.
const NOT_COMPILED: [&str; 6] = ["text", "ignore", "console", "sh", "toml", "yaml"];

/// All of them in the sources of `members`.
pub(super) fn violations(members: &[Member]) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    for member in members {
        let folder = root().join(&member.folder);
        let manifest = read(&folder.join("Cargo.toml"))?;
        let mut files = Vec::new();
        read_sources(&folder.join("src"), &mut files)?;
        let untested = untested(&manifest);
        for file in files {
            let text = read(&file)?;
            let path = file.strip_prefix(root()).unwrap_or(&file);
            found.extend(doctests(&text).map(|line| Violation {
                path: path.to_owned(),
                line,
                rule: "a doctest, and no command runs doctests: write a unit test, or ```text".to_owned(),
            }));
            let inside = file.strip_prefix(&folder).unwrap_or(&file);
            if untested.iter().any(|target| inside.starts_with(target)) {
                found.extend(unit_tests(&text).map(|line| Violation {
                    path: path.to_owned(),
                    line,
                    rule: format!(
                        "a test in a target that {}/Cargo.toml excludes by `test = false`",
                        member.folder
                    ),
                }));
            }
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The files and folders, relative to the package, of the targets that have `test = false`: of a library all of `src`,
/// of a program its file, or its folder below `src/bin`.
fn untested(manifest: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for section in manifest.split("\n[") {
        let is_library = section.starts_with("lib]");
        let is_program = section.starts_with("[bin]]");
        if !(is_library || is_program) || !section.lines().any(|line| line == "test = false") {
            continue;
        }
        let path = section.lines().find_map(|line| line.strip_prefix("path = \""));
        let path = path.and_then(|path| path.strip_suffix('"'));
        found.push(match path.map(Path::new) {
            Some(path) if path.ends_with("main.rs") && path != Path::new("src/main.rs") => {
                path.parent().unwrap_or(path).to_owned()
            }
            Some(path) => path.to_owned(),
            None => "src".into(),
        });
    }
    found
}

/// The lines on which a doctest begins.
fn doctests(text: &str) -> impl Iterator<Item = usize> {
    let mut is_open = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let Some(comment) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            is_open = false;
            continue;
        };
        let Some(language) = comment.trim().strip_prefix("```") else {
            continue;
        };
        if !is_open && !NOT_COMPILED.contains(&language) {
            found.push(index + 1);
        }
        is_open = !is_open;
    }
    found.into_iter()
}

/// The lines with an attribute that makes a test or a module of tests.
fn unit_tests(text: &str) -> impl Iterator<Item = usize> {
    text.lines().enumerate().filter_map(|(index, line)| {
        let line = line.trim_start();
        let is_test = ["#[test]", "#[tokio::test", "#[rstest", "#[cfg(test)]"]
            .iter()
            .any(|start| line.starts_with(start));
        is_test.then_some(index + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_examples_that_rustdoc_compiles_are_doctests() {
        let text = "//! Head\n//! ```text\n//! a\n//! ```\n\n/// ```\n/// f();\n/// ```\n    /// ```no_run\n    /// g();\n    /// ```\n\
                    let x = \"```\";\n";
        assert_eq!(doctests(text).collect::<Vec<_>>(), [6, 9]);
    }

    #[test]
    fn the_targets_without_tests_are_read() {
        let text = "[package]\nname = \"a\"\n\n[[bin]]\nname = \"b\"\npath = \"src/bin/b/main.rs\"\ntest = false\n\n\
                    [[bin]]\nname = \"c\"\npath = \"src/main.rs\"\ntest = false\n\n[[bin]]\nname = \"d\"\n\
                    path = \"src/bin/d.rs\"\n";
        assert_eq!(untested(text), [Path::new("src/bin/b"), Path::new("src/main.rs")]);
        assert_eq!(
            untested("[package]\n\n[lib]\ntest = false\n\n[lints]\n"),
            [Path::new("src")]
        );
        assert!(untested("[lib]\ndoctest = false\n").is_empty());
    }

    #[test]
    fn tests_are_found_by_their_attributes() {
        let text = "fn f() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn a() {}\n}\n";
        assert_eq!(unit_tests(text).collect::<Vec<_>>(), [2, 4]);
    }
}
