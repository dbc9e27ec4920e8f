//! Reads the members of the workspace and their dependencies from the manifests.

use std::{fs, path::Path};

use anyhow::{Context, Result};

/// A crate of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its folder, relative to the root of the repository.
    pub(crate) folder: String,
    /// The name of its package.
    pub(crate) package: String,
    /// The packages it depends on, in every kind of dependency section, with the line of each.
    pub(crate) dependencies: Vec<(String, usize)>,
}

/// The crates of the workspace at `root`.
pub(crate) fn members(root: &Path) -> Result<Vec<Member>> {
    folders(&read(&root.join("Cargo.toml"))?)
        .into_iter()
        .map(|folder| {
            let path = root.join(&folder).join("Cargo.toml");
            let text = read(&path)?;
            let package = package(&text).with_context(|| format!("{} names no package", path.display()))?;
            Ok(Member {
                folder,
                package,
                dependencies: dependencies(&text),
            })
        })
        .collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The strings of `members = [...]`.
fn folders(text: &str) -> Vec<String> {
    let list = text.split_once("members = [").map_or("", |(_, rest)| rest);
    let list = list.split_once(']').map_or("", |(list, _)| list);
    strings(list)
}

/// The strings of a list.
pub(super) fn strings(list: &str) -> Vec<String> {
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

fn package(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("name = \""))?;
    line.strip_suffix('"').map(str::to_owned)
}

/// The keys of every section that ends in `dependencies`.
fn dependencies(text: &str) -> Vec<(String, usize)> {
    let mut is_inside = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if let Some(section) = line.strip_prefix('[') {
            is_inside = section.trim_end().trim_end_matches(']').ends_with("dependencies");
            continue;
        }
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '-' || char == '_';
        let name: String = line.chars().take_while(|char| is_name(*char)).collect();
        if is_inside && !name.is_empty() {
            found.push((name, index + 1));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_dependencies_are_read() {
        assert_eq!(
            folders("[workspace]\nmembers = [\n    \"a\",\n    \"b/c\",\n]\n[x]\ny = [\"d\"]"),
            ["a", "b/c"]
        );
        let text = "[package]\nname = \"a\"\n\n[dependencies]\n# why\nb.workspace = true\nc-d = { version = \"1\" }\n\n\
                    [features]\ne = []\n[target.'cfg(unix)'.dev-dependencies]\nf = \"1\"\n";
        assert_eq!(package(text).as_deref(), Some("a"));
        assert_eq!(
            dependencies(text),
            [("b".to_owned(), 6), ("c-d".to_owned(), 7), ("f".to_owned(), 12)]
        );
    }

    #[test]
    fn every_member_of_this_workspace_is_read() {
        let members = members(crate::workspace::root()).unwrap();
        let own = members.iter().find(|member| member.folder == "xtask").unwrap();
        assert_eq!(own.package, "xtask");
        assert!(own.dependencies.iter().any(|(name, _)| name == "anyhow"));
    }
}
