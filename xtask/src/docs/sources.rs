//! Reads the names of the reference pages from the sources and the custom resource definitions.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};

/// Crates and folders whose keys are visible to users.
const PRODUCT: [&str; 8] = [
    "deploy",
    "kni-agent",
    "kni-api",
    "kni-cni",
    "kni-common",
    "kni-controller",
    "knictl",
    "proto",
];
/// Prefix of the keys of this project.
const GROUP: &str = "kni.dev/";

/// The texts of all sources and manifests except tests.
pub(super) fn product(root: &Path) -> Result<String> {
    let mut text = String::new();
    for folder in PRODUCT {
        append(&root.join(folder), &["rs", "yaml", "proto", "tpl"], &mut text)?;
    }
    Ok(text)
}

fn append(folder: &Path, kinds: &[&str], text: &mut String) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if name == "tests" || name == "target" || name == "examples" {
            continue;
        }
        if path.is_dir() {
            append(&path, kinds, text)?;
        } else if path
            .extension()
            .is_some_and(|kind| kinds.iter().any(|known| kind == *known))
        {
            let read = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            text.push_str(read.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default());
            text.push('\n');
        }
    }
    Ok(())
}

/// The rows of the table of verdicts: word and code.
pub(super) fn verdicts(text: &str) -> BTreeMap<String, u16> {
    let row = |line: &str| {
        let (_name, rest) = line.trim().split_once(" = ")?;
        let (code, rest) = rest.split_once(", \"")?;
        let (word, _) = rest.split_once('"')?;
        Some((word.to_owned(), code.parse().ok()?))
    };
    text.lines().filter_map(row).collect()
}

/// The metric families in the sources of `folder`.
pub(super) fn metrics(folder: &Path) -> Result<BTreeSet<String>> {
    let mut text = String::new();
    append(folder, &["rs"], &mut text)?;
    Ok(literals(&text)
        .filter(|literal| {
            literal.starts_with("kni_") && literal.chars().all(|char| char.is_ascii_lowercase() || char == '_')
        })
        .map(str::to_owned)
        .collect())
}

/// The annotations and labels of this project in the sources, without API versions.
pub(super) fn keys(text: &str) -> BTreeSet<String> {
    let is_version = |name: &str| name.starts_with("v1");
    literals(text)
        .filter_map(|literal| literal.strip_prefix(GROUP))
        .filter(|name| !name.is_empty() && !is_version(name) && !name.contains(['{', ' ']))
        .map(|name| format!("{GROUP}{name}"))
        .collect()
}

/// The string literals on one line.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split('"').skip(1).step_by(2))
}

/// The fields of each kind in the definitions of `folder`, such as `spec.rules[].to`.
pub(super) fn fields(folder: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut kinds = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let kind = text.lines().find_map(|line| line.strip_prefix("    kind: "));
        if let Some(kind) = kind {
            kinds.insert(kind.to_owned(), fields_of(&text));
        }
    }
    Ok(kinds)
}

/// The fields of a definition, by the indentation of its lines.
fn fields_of(text: &str) -> BTreeSet<String> {
    let mut keys: Vec<(usize, String)> = Vec::new();
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        let Some((key, _)) = trimmed.split_once(':') else {
            continue;
        };
        if trimmed.starts_with('-') || key.contains(' ') {
            continue;
        }
        keys.retain(|(above, _)| *above < indent);
        keys.push((indent, key.trim_matches('"').to_owned()));
        found.extend(field(&keys));
    }
    found
}

/// The field at the path `keys` of a definition, if it is a field.
fn field(keys: &[(usize, String)]) -> Option<String> {
    let start = keys.iter().position(|(_, key)| key == "openAPIV3Schema")?;
    let mut names = keys.get(start + 1..)?.iter().map(|(_, key)| key.as_str());
    let mut path = String::new();
    loop {
        match names.next() {
            Some("properties") => {}
            Some("items") if !path.is_empty() => {
                path.push_str("[]");
                continue;
            }
            _ => return None,
        }
        let name = names.next()?;
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(name);
        if names.len() == 0 {
            return Some(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_and_keys_are_read() {
        let text = "    /// No.\n    NoRoute = 25, \"no_route\", \"the network has no route\";\n    A = B,\n";
        assert_eq!(verdicts(text), BTreeMap::from([("no_route".into(), 25)]));
        let text =
            "// \"kni.dev/no\"\nconst A: &str = \"kni.dev/a\"; f(\"kni.dev/v1alpha1\", \"kni.dev/\", \"x/kni.dev/b\");";
        assert_eq!(keys(text), BTreeSet::from(["kni.dev/a".into()]));
    }

    #[test]
    fn fields_are_read_by_their_indentation() {
        let text = "    schema:\n      openAPIV3Schema:\n        description: \"a: b\"\n        properties:\n          spec:\n            \
                    properties:\n              rules:\n                items:\n                  properties:\n                    to:\n                      \
                    type: string\n                type: array\n              labels:\n                additionalProperties:\n                  \
                    type: string\n            required:\n            - rules\n          status:\n            type: object\n";
        let found: Vec<_> = fields_of(text).into_iter().collect();
        assert_eq!(
            found,
            ["spec", "spec.labels", "spec.rules", "spec.rules[].to", "status"]
        );
    }
}
