//! Checks that programs and tests use the same features of external crates.
//!
//! Cargo unifies features over the packages of one command. If only the tests enable a feature, builds of programs and
//! builds of tests compile that crate and all its dependents separately.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::Violation;
use crate::{command::output, workspace::cargo};

/// The sets of features with which each crate is used.
type Features = BTreeMap<String, BTreeSet<String>>;

/// The crates that tests use with other features than programs.
pub(super) fn check() -> Result<Vec<Violation>> {
    Ok(differences(
        &read(&tree("normal,build")?),
        &read(&tree("normal,build,dev")?),
    ))
}

fn tree(edges: &str) -> Result<String> {
    let mut command = cargo();
    command.args([
        "tree",
        "--workspace",
        "--prefix",
        "none",
        "--format",
        "{p}|{f}",
        "--edges",
        edges,
    ]);
    output(&mut command)
}

fn read(tree: &str) -> Features {
    let mut found = Features::new();
    for line in tree.lines() {
        let Some((package, features)) = line.split_once('|') else {
            continue;
        };
        let features = features.trim_end_matches("(*)").trim_end();
        found.entry(package.to_owned()).or_default().insert(features.to_owned());
    }
    found
}

fn differences(programs: &Features, tests: &Features) -> Vec<Violation> {
    let mut found = Vec::new();
    for (package, of_tests) in tests {
        // A crate that only tests use is compiled once.
        let Some(of_programs) = programs.get(package) else {
            continue;
        };
        if of_tests != of_programs {
            let show = |features: &BTreeSet<String>| features.iter().cloned().collect::<Vec<_>>().join(" / ");
            found.push(Violation {
                path: "Cargo.toml".into(),
                line: 1,
                rule: format!(
                    "`{package}` is used with [{}] by programs and with [{}] by tests, and so compiled twice; name the \
                     features in a dependency that is no dev-dependency",
                    show(of_programs),
                    show(of_tests)
                ),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_of_tests_alone_is_found() {
        let programs = read("a v1|net (*)\nb v1|\nb v1|std\n");
        let tests = read("a v1|full,net\nb v1|\nb v1|std (*)\nonly-tests v2|x\n");
        let found = differences(&programs, &tests);
        assert_eq!(found.len(), 1);
        assert!(
            found[0]
                .rule
                .starts_with("`a v1` is used with [net] by programs and with [full,net] by tests")
        );
    }
}
