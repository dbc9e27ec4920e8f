//! Checks that each crate mentions every crate that its manifest names.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result};

use super::{
    Violation,
    manifest::Member,
    read_sources,
    tokens::{self, Kind},
};
use crate::workspace::root;

/// Dependencies that no source mentions, by folder, name and reason.
const EXCUSED: &[(&str, &str, &str)] = &[
    ("proto", "prost-types", "generated code names it"),
    ("proto", "tonic-prost", "generated code names it"),
    ("proto", "prost", "generated code names it"),
    ("local-node", "prost", "generated code names it"),
    ("local-node", "tonic-prost", "generated code names it"),
];

/// The dependencies of the members that no file of theirs mentions.
pub(super) fn check(members: &[Member]) -> Result<Vec<Violation>> {
    let folders: Vec<&str> = members.iter().map(|member| member.folder.as_str()).collect();
    let mut found = Vec::new();
    for member in members {
        let mut words = BTreeSet::new();
        for path in sources(&member.folder, &folders)? {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            words.extend(mentioned(&text));
        }
        found.extend(unmentioned(member, &words));
    }
    Ok(found)
}

/// The Rust files of a crate, without those of crates in its folder.
fn sources(folder: &str, members: &[&str]) -> Result<Vec<std::path::PathBuf>> {
    let own = root().join(folder);
    let mut files = Vec::new();
    for part in ["src", "tests", "benches", "examples"] {
        let part = own.join(part);
        let is_member = |other: &&str| *other != folder && root().join(other).starts_with(&part);
        if part.is_dir() && !members.iter().any(is_member) {
            read_sources(&part, &mut files)?;
        }
    }
    let build = own.join("build.rs");
    files.extend(build.is_file().then_some(build));
    Ok(files)
}

/// The names in a file.
fn mentioned(text: &str) -> Vec<String> {
    let tokens = tokens::cut(text).unwrap_or_default();
    let word = |kind| if let Kind::Word(word) = kind { Some(word) } else { None };
    tokens.into_iter().filter_map(|token| word(token.kind)).collect()
}

fn unmentioned(member: &Member, words: &BTreeSet<String>) -> Vec<Violation> {
    let is_excused = |name: &str| {
        EXCUSED
            .iter()
            .any(|(folder, of, _)| *folder == member.folder && *of == name)
    };
    let is_unused = |name: &str| !words.contains(&name.replace('-', "_")) && !is_excused(name);
    let unused = member.dependencies.iter().filter(|(name, _)| is_unused(name));
    let violation = |(name, line): &(String, usize)| Violation {
        path: Path::new(&member.folder).join("Cargo.toml"),
        line: *line,
        rule: format!("no file of the crate mentions `{name}`: remove the dependency, or excuse it with a reason"),
    };
    unused.map(violation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_that_no_file_mentions_is_found() {
        let member = Member {
            folder: "a".to_owned(),
            package: "a".to_owned(),
            dependencies: vec![("tokio-stream".to_owned(), 7), ("nix".to_owned(), 8)],
        };
        let words: BTreeSet<String> = mentioned("use tokio_stream::X; // nix\n").into_iter().collect();
        let found: Vec<String> = unmentioned(&member, &words).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            ["a/Cargo.toml:8: no file of the crate mentions `nix`: remove the dependency, or excuse it with a reason"]
        );
    }
}
