//! Checks that each crate states the oldest Rust that may compile it: there is no file that pins a toolchain, so cargo
//! has to refuse an older one.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{Violation, manifest::Member};
use crate::workspace::root;

const LINE: &str = "rust-version.workspace = true";

/// The manifests without that line.
pub(super) fn check(members: &[Member]) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    for member in members {
        let path = Path::new(&member.folder).join("Cargo.toml");
        let text = fs::read_to_string(root().join(&path)).with_context(|| format!("cannot read {}", path.display()))?;
        found.extend(of_manifest(&path, &text));
    }
    Ok(found)
}

fn of_manifest(path: &Path, text: &str) -> Option<Violation> {
    (!text.lines().any(|line| line == LINE)).then(|| Violation {
        path: path.to_owned(),
        line: 1,
        rule: format!("no `{LINE}`, so that cargo accepts a Rust that is too old"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_without_the_line_is_found() {
        let path = Path::new("a/Cargo.toml");
        assert_eq!(
            of_manifest(path, "[package]\nname = \"a\"\nrust-version.workspace = true\n"),
            None
        );
        let found = of_manifest(path, "[package]\nname = \"a\"\n# rust-version.workspace = true\n").unwrap();
        assert!(found.to_string().starts_with("a/Cargo.toml:1: no `rust-version"));
    }
}
