//! Checks the crates against the tables: the layer of each crate, and the owners of external crates within the agent.

use std::{collections::BTreeSet, path::Path};

use super::{
    Violation,
    manifest::Member,
    paths,
    rules::{self, AGENT},
    tokens,
};

/// Whether the crate in `folder` is one of the agent's.
pub(super) fn is_of_agent(folder: &str) -> bool {
    Path::new(folder).starts_with(AGENT)
}

/// Violations in the manifests of the workspace, and rows of the tables without a crate.
pub(super) fn check(members: &[Member]) -> BTreeSet<Violation> {
    let mut violations = BTreeSet::new();
    let folders: Vec<String> = members.iter().map(|member| member.folder.clone()).collect();
    for rule in rules::stale(&folders) {
        violations.insert(Violation {
            path: "xtask/src/arch/rules.rs".into(),
            line: 1,
            rule,
        });
    }
    for member in members {
        let at = |line, rule| Violation {
            path: format!("{}/Cargo.toml", member.folder).into(),
            line,
            rule,
        };
        if rules::layer(&member.folder).is_none() {
            let rule = format!("`{}` is in no layer; add it to the table", member.folder);
            violations.insert(at(1, rule));
        }
        for (package, line) in &member.dependencies {
            let own = members.iter().find(|other| other.package == *package);
            let refused = match own {
                Some(other) => rules::refuse_dependency(&member.folder, &other.folder),
                None => None,
            };
            let outside = is_of_agent(&member.folder)
                .then(|| rules::refuse_outside(rules::owner(&member.folder), &[package.replace('-', "_")]))
                .flatten();
            violations.extend(refused.or(outside).map(|rule| at(*line, rule)));
        }
    }
    violations
}

/// The rules that the file `path` of the crate in `folder` breaks. A path named twice on one line counts once.
pub(super) fn check_file(folder: &str, path: &Path, text: &str) -> BTreeSet<Violation> {
    let at = |line, rule| Violation {
        path: path.to_owned(),
        line,
        rule,
    };
    let mut violations = BTreeSet::new();
    if path == Path::new(folder).join("src/lib.rs") {
        violations.extend(refuse_header(folder, text).map(|rule| at(1, rule)));
    }
    let tokens = match tokens::cut(text) {
        Ok(tokens) => tokens,
        Err(error) => {
            violations.insert(at(1, format!("not Rust: {error}")));
            return violations;
        }
    };
    for found in paths::find(&tokens) {
        let refused = rules::refuse_outside(rules::owner(folder), &found.names);
        violations.extend(refused.map(|rule| at(found.line, rule)));
    }
    violations
}

/// The reason why the header of a crate does not state its layer; `None` if it does.
fn refuse_header(folder: &str, text: &str) -> Option<String> {
    let layer = rules::layer(folder)?;
    let stated = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .find_map(|line| line.strip_prefix("//! Layer: "))
        .map(|rest| rest.trim_end().trim_end_matches('.'));
    match stated {
        Some(stated) if stated == layer.name() => None,
        Some(stated) => Some(format!(
            "states `Layer: {stated}`, but the table has `{}`",
            layer.name()
        )),
        None => Some(format!("has no line `//! Layer: {}.` in its header", layer.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(folder: &str, file: &str, text: &str) -> Vec<String> {
        let path = Path::new(folder).join(file);
        check_file(folder, &path, text)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    fn member(folder: &str, package: &str, dependencies: &[&str]) -> Member {
        Member {
            folder: folder.into(),
            package: package.into(),
            dependencies: dependencies.iter().map(|name| ((*name).to_owned(), 7)).collect(),
        }
    }

    /// The violations of these crates, without stale rows.
    fn of_manifests(members: &[Member]) -> Vec<String> {
        let found = check(members).into_iter();
        found
            .filter(|violation| !violation.path.starts_with("xtask"))
            .map(|violation| violation.to_string())
            .collect()
    }

    #[test]
    fn a_dependency_upward_is_reported_with_its_line() {
        let members = [
            member("kni-agent/ipam", "kni-ipam", &["kni-model", "kni-store", "ipnet"]),
            member("kni-agent/store", "kni-store", &["redb"]),
            member("kni-agent/model", "kni-model", &[]),
        ];
        assert_eq!(
            of_manifests(&members),
            [
                "kni-agent/ipam/Cargo.toml:7: `kni-agent/ipam` (engine) depends on `kni-agent/store` (driver), which is \
              upward; dependencies go down only"
            ]
        );
    }

    #[test]
    fn an_outside_crate_has_its_owner_in_the_manifests_too() {
        assert_eq!(
            of_manifests(&[member("kni-agent/ipam", "kni-ipam", &["tokio"])]),
            ["kni-agent/ipam/Cargo.toml:7: `ipam` is pure and may not use `tokio`"]
        );
        assert_eq!(
            of_manifests(&[member("kni-agent/pods", "kni-pods", &["tokio"])]),
            Vec::<String>::new()
        );
        assert_eq!(
            of_manifests(&[member("knictl", "knictl", &["tonic"])]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_crate_without_a_layer_is_refused() {
        assert_eq!(
            of_manifests(&[member("kni-agent/odd", "kni-odd", &[])]),
            ["kni-agent/odd/Cargo.toml:1: `kni-agent/odd` is in no layer; add it to the table"]
        );
    }

    #[test]
    fn an_outside_crate_in_the_wrong_crate_is_reported_also_in_tests() {
        assert_eq!(
            broken("kni-agent/pods", "src/run.rs", "fn f(map: aya::maps::Array<u32>) {}"),
            ["kni-agent/pods/src/run.rs:1: `aya` belongs to dataplane only, not to `pods`"]
        );
        assert_eq!(
            broken("kni-agent/ipam", "src/pool.rs", "#[tokio::test]\nasync fn f() {}").len(),
            1
        );
        assert_eq!(
            broken(
                "kni-agent/ipam",
                "src/pool.rs",
                "use std::{fmt, fs, time::{Duration, Instant}};"
            )
            .len(),
            2
        );
        assert_eq!(broken("kni-agent", "src/agent.rs", "use redb::Database;").len(), 1);
    }

    #[test]
    fn the_header_states_the_layer_of_the_table() {
        assert_eq!(
            broken("kni-agent/ipam", "src/lib.rs", "//! Pools.\n"),
            ["kni-agent/ipam/src/lib.rs:1: has no line `//! Layer: engine.` in its header"]
        );
        assert_eq!(
            broken("kni-agent/ipam", "src/lib.rs", "//! Pools.\n//! Layer: driver\n"),
            ["kni-agent/ipam/src/lib.rs:1: states `Layer: driver`, but the table has `engine`"]
        );
        assert_eq!(
            broken("kni-agent/ipam", "src/lib.rs", "//! Pools.\n//! Layer: engine.\n"),
            Vec::<String>::new()
        );
        assert_eq!(
            broken("kni-agent/ipam", "src/pool.rs", "//! A pool.\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn source_that_cannot_be_read_is_not_passed_over() {
        assert_eq!(broken("kni-agent/store", "src/file.rs", "fn f() {").len(), 1);
    }
}
