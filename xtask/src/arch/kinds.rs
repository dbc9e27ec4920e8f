//! Checks that the caches of the cluster's objects, the watches that fill them and the lists of kinds name the same.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result};

use super::{Violation, read_sources};
use crate::workspace::root;

/// The caches and the lists of kinds; more lists are in the modules of its folder.
const TABLES: &str = "kni-agent/cluster/src/tables.rs";
/// The watches; more are in the modules of its folder.
const WATCHES: &str = "kni-agent/reflectors/src/resources.rs";

/// Caches that have no watch or are in no list.
pub(super) fn check() -> Result<Vec<Violation>> {
    let read = |path: &str| fs::read_to_string(root().join(path)).with_context(|| format!("cannot read {path}"));
    let with_modules = |path: &str| -> Result<String> {
        let mut text = read(path)?;
        let mut modules = Vec::new();
        read_sources(&root().join(path).with_extension(""), &mut modules)?;
        for module in modules {
            text += &read(&module.display().to_string())?;
        }
        Ok(text)
    };
    Ok(differences(&with_modules(TABLES)?, &with_modules(WATCHES)?))
}

fn differences(tables: &str, watches: &str) -> Vec<Violation> {
    let filled = after(watches, "tables.");
    let lists: String = tables
        .lines()
        .filter(|line| line.trim_start().starts_with("(\""))
        .collect();
    let listed = after(&lists, "self.");
    let mut found = Vec::new();
    for (line, name) in fields(tables) {
        let mut missing = |rule: String| {
            found.push(Violation {
                path: Path::new(TABLES).to_owned(),
                line,
                rule,
            });
        };
        if !filled.contains(name) {
            missing(format!("no watch of {WATCHES} fills `{name}`"));
        }
        if !listed.contains(name) {
            missing(format!("`{name}` is in no list of kinds: needed, others, of_cluster"));
        }
    }
    found
}

/// The caches of `Tables` with their lines.
fn fields(tables: &str) -> Vec<(usize, &str)> {
    let lines = tables.lines().enumerate();
    let body = lines.skip_while(|(_, line)| !line.starts_with("pub struct Tables"));
    body.take_while(|(_, line)| *line != "}")
        .filter_map(|(index, line)| {
            let (name, kind) = line.trim().trim_start_matches("pub ").split_once(": ")?;
            kind.starts_with("Table<").then_some((index + 1, name))
        })
        .collect()
}

/// The names that follow `prefix`.
fn after<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let end = |rest: &str| {
        rest.find(|char: char| !char.is_alphanumeric() && char != '_')
            .unwrap_or(rest.len())
    };
    text.split(prefix)
        .skip(1)
        .filter_map(|rest| rest.get(..end(rest)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_without_a_watch_or_outside_of_the_lists_is_found() {
        let tables = "pub struct Tables {\n    pub pods: Table<Pod>,\n    pub nodes: Table<Node>,\n    x: u8,\n}\n\
                      fn needed() {\n    [\n        (\"pods\", &self.pods),\n    ]\n}\n";
        let watches = "|tables| &mut tables.pods, |tables| &mut tables.nodes";
        let found: Vec<String> = differences(tables, watches).iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 1);
        assert!(
            found[0].contains("tables.rs:3: `nodes` is in no list of kinds"),
            "{found:?}"
        );
        let found = differences(tables, "&mut tables.nodes");
        assert!(found[0].rule.contains("fills `pods`"), "{found:?}");
    }
}
