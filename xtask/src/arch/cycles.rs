//! Checks that the files of a folder do not import each other in cycles.
//!
//! The files directly below one module are siblings; the children of a sibling are part of it. A sibling imports
//! another one if it contains a path that resolves there, directly or through imports and exports of their parent.
//! Edges between a module and its descendants are ignored, because a parent declares and exports its children. Tests
//! are ignored, too.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{Violation, modules::Modules};

/// An import of one sibling by another: file and line.
type Arrows = BTreeMap<String, BTreeMap<String, (String, usize)>>;

/// The cycles among the files of a crate, with paths relative to `root`.
pub(super) fn find(modules: &Modules, root: &Path) -> Vec<Violation> {
    let mut folders: BTreeMap<Vec<String>, Arrows> = BTreeMap::new();
    for (from, module) in &modules.all {
        for found in &module.paths {
            let Some(to) = modules.target(from, found) else {
                continue;
            };
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let (Some(source), Some(target)) = (from.get(common), to.get(common)) else {
                continue;
            };
            let folder = from.get(..common).unwrap_or_default().to_vec();
            let file = module.file.strip_prefix(root).unwrap_or(&module.file);
            let arrows = folders.entry(folder).or_default();
            let arrow = arrows.entry(source.clone()).or_default();
            arrow
                .entry(target.clone())
                .or_insert_with(|| (file.display().to_string(), found.line));
        }
    }
    folders.values().flat_map(circles).collect()
}

/// One violation per group of connected cycles: its files, and the shortest cycle of the first file.
fn circles(arrows: &Arrows) -> Vec<Violation> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for start in arrows.keys() {
        if seen.contains(start) {
            continue;
        }
        let Some(circle) = shortest(arrows, start) else {
            continue;
        };
        let tied: Vec<String> = reached(arrows, start)
            .into_iter()
            .filter(|name| reached(arrows, name).contains(start))
            .collect();
        let mut rule = format!("circle of {} files ({}): {start}", tied.len(), tied.join(", "));
        seen.extend(tied);
        let mut place = None;
        for (position, name) in circle.iter().enumerate() {
            let next = circle.get(position + 1).unwrap_or(start);
            let Some((file, line)) = arrows.get(name).and_then(|targets| targets.get(next)) else {
                continue;
            };
            rule.extend([" -> ", next.as_str(), " (", file, ":", &line.to_string(), ")"]);
            place.get_or_insert((file.clone(), *line));
        }
        let (file, line) = place.unwrap_or_default();
        found.push(Violation {
            path: file.into(),
            line,
            rule,
        });
    }
    found
}

/// All modules that `start` imports, directly and indirectly.
fn reached(arrows: &Arrows, start: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![start.to_owned()];
    while let Some(name) = open.pop() {
        for target in arrows.get(&name).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(target.clone()) {
                open.push(target.clone());
            }
        }
    }
    found
}

/// The shortest path from `start` back to it.
fn shortest(arrows: &Arrows, start: &str) -> Option<Vec<String>> {
    let mut ways: Vec<Vec<String>> = vec![vec![start.to_owned()]];
    let mut visited = BTreeSet::from([start.to_owned()]);
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let targets = way.last().and_then(|last| arrows.get(last));
            for target in targets.into_iter().flat_map(BTreeMap::keys) {
                if target == start {
                    return Some(way);
                }
                if visited.insert(target.clone()) {
                    longer.push([way.as_slice(), std::slice::from_ref(target)].concat());
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The cycles of a crate with these files.
    fn circles_of(name: &str, files: &[(&str, &str)]) -> Vec<String> {
        let folder = std::env::temp_dir().join(format!("xtask-cycles-{name}-{}", std::process::id()));
        for (file, text) in files {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let modules = Modules::read(&folder.join("lib.rs"), "own").unwrap();
        let found = find(&modules, &folder);
        fs::remove_dir_all(&folder).unwrap();
        found.into_iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn two_files_that_import_each_other_are_a_circle() {
        let found = circles_of(
            "two",
            &[
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "use crate::b::B;\npub struct A;"),
                ("b.rs", "fn f() {\n    super::a::f();\n}\npub struct B;"),
            ],
        );
        assert_eq!(found, ["circle of 2 files (a, b): a -> b (a.rs:1) -> a (b.rs:2)"]);
    }

    #[test]
    fn a_child_and_its_parent_are_no_circle() {
        let found = circles_of(
            "parent",
            &[
                ("lib.rs", "mod a;"),
                ("a/mod.rs", "mod b; pub use b::B; pub struct A; fn f() { b::g(); }"),
                (
                    "a/b.rs",
                    "use super::A; pub struct B; #[cfg(test)] mod tests { use super::super::c; }",
                ),
            ],
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn an_import_by_way_of_the_parent_counts() {
        let found = circles_of(
            "facade",
            &[
                ("lib.rs", "mod a; mod b; mod c; pub use b::B; use c::*;"),
                ("a.rs", "use super::B;\npub struct A;"),
                ("b.rs", "use crate::C;\npub struct B;"),
                ("c/mod.rs", "mod d; pub struct C;"),
                ("c/d.rs", "use crate::a::A;"),
            ],
        );
        assert_eq!(
            found,
            ["circle of 3 files (a, b, c): a -> b (a.rs:1) -> c (b.rs:1) -> a (c/d.rs:1)"]
        );
    }

    #[test]
    fn imports_of_tests_do_not_count() {
        let found = circles_of(
            "tests",
            &[
                ("lib.rs", "mod a; mod b; #[cfg(test)] mod fixtures;"),
                ("a.rs", "use crate::b::B;\npub struct A;"),
                ("b.rs", "pub struct B;\n#[cfg(test)]\nmod tests { use crate::a::A; }"),
                ("fixtures.rs", "use crate::a::A;"),
            ],
        );
        assert_eq!(found, Vec::<String>::new());
    }
}
