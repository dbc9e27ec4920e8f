//! Checks what `deny.toml` states about licenses, banned crates, wildcards and sources.
//!
//! The same file is for cargo-deny, whose other checks need the network (known vulnerabilities) or a reader (twins of
//! a crate). Compiling cargo-deny takes minutes on a new machine; these checks take a second.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result, ensure};

use super::{
    Violation, license,
    manifest::{Member, strings},
};
use crate::{
    command::output,
    workspace::{cargo, root},
};

const SETTINGS: &str = "deny.toml";
const LOCK: &str = "Cargo.lock";

/// What `deny.toml` states.
#[derive(Debug, PartialEq, Eq)]
struct Settings {
    /// The targets whose crates are looked at.
    targets: Vec<String>,
    licenses: Vec<String>,
    banned: Vec<String>,
    registries: Vec<String>,
}

impl Settings {
    /// Reads the text of the file. A list that is not found is an error, as without it nothing would be checked.
    fn read(text: &str) -> Result<Self> {
        let list = |section: &str, key: &str| -> Result<String> {
            let found = list(text, section, key).with_context(|| format!("{SETTINGS} has no {key} in [{section}]"))?;
            ensure!(!strings(&found).is_empty(), "{SETTINGS}: {key} in [{section}] is empty");
            Ok(found)
        };
        let banned = list("bans", "deny")?;
        let crates = banned
            .split("crate = ")
            .skip(1)
            .filter_map(|entry| strings(entry).into_iter().next());
        Ok(Self {
            targets: strings(&list("graph", "targets")?),
            licenses: strings(&list("licenses", "allow")?),
            banned: crates.collect(),
            registries: strings(&list("sources", "allow-registry")?),
        })
    }
}

/// The text between the brackets of `key = [...]` in `[section]`, without comments.
fn list(text: &str, section: &str, key: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let mut inside = lines.skip_while(|line| *line != format!("[{section}]")).skip(1);
    let first = inside.find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix("= ["))?;
    let mut found = first.to_owned();
    if !first.ends_with(']') {
        found.extend(inside.take_while(|line| *line != "]"));
    }
    Some(found)
}

/// The violations of the settings by the crates of `Cargo.lock` and by the manifests.
pub(super) fn check(members: &[Member]) -> Result<Vec<Violation>> {
    let read = |path: &str| fs::read_to_string(root().join(path)).with_context(|| format!("cannot read {path}"));
    let settings = Settings::read(&read(SETTINGS)?)?;
    let mut found = of_licenses(&licenses(&settings.targets)?, &settings.licenses);
    found.extend(of_lock(&read(LOCK)?, &settings));
    let folders = members.iter().map(|member| format!("{}/Cargo.toml", member.folder));
    for path in ["Cargo.toml".to_owned()].into_iter().chain(folders) {
        found.extend(of_manifest(&path, &read(&path)?));
    }
    Ok(found)
}

/// The license of each package that a build for one of `targets` may contain or run.
fn licenses(targets: &[String]) -> Result<BTreeMap<String, String>> {
    let mut tree = cargo();
    tree.args(["tree", "--locked", "--workspace", "--all-features", "--prefix", "none"]);
    tree.args(["--edges", "normal,build,dev", "--format", "{p}|{l}"]);
    for target in targets {
        tree.args(["--target", target]);
    }
    Ok(packages(&output(&mut tree)?))
}

fn packages(tree: &str) -> BTreeMap<String, String> {
    let lines = tree.lines().filter_map(|line| line.split_once('|'));
    let license = |text: &str| text.trim_end_matches("(*)").trim_end().to_owned();
    lines
        .map(|(package, text)| (package.to_owned(), license(text)))
        .collect()
}

fn violation(path: &str, line: usize, rule: String) -> Violation {
    Violation {
        path: path.into(),
        line,
        rule,
    }
}

fn of_licenses(packages: &BTreeMap<String, String>, allowed: &[String]) -> Vec<Violation> {
    let refused = packages.iter().filter(|(_, text)| !license::is_allowed(text, allowed));
    let rule = |(package, text): (&String, &String)| {
        format!("`{package}` has the license `{text}`, which {SETTINGS} does not allow")
    };
    refused.map(|found| violation(LOCK, 1, rule(found))).collect()
}

/// Banned crates, and sources other than the allowed ones.
fn of_lock(lock: &str, settings: &Settings) -> Vec<Violation> {
    let is_allowed = |source: &str| {
        let registry = source.strip_prefix("registry+");
        registry.is_some_and(|registry| settings.registries.iter().any(|allowed| allowed == registry))
    };
    let value = |line: &str, key: &str| {
        Some(
            line.strip_prefix(key)?
                .strip_prefix(" = \"")?
                .trim_end_matches('"')
                .to_owned(),
        )
    };
    let rule = |line: &str| {
        if let Some(name) = value(line, "name").filter(|name| settings.banned.contains(name)) {
            return Some(format!("`{name}` is banned by {SETTINGS}"));
        }
        let source = value(line, "source").filter(|source| !is_allowed(source))?;
        Some(format!("`{source}` is no source that {SETTINGS} allows"))
    };
    let lines = (1..).zip(lock.lines());
    lines
        .filter_map(|(number, line)| Some(violation(LOCK, number, rule(line)?)))
        .collect()
}

/// Dependencies on any version.
fn of_manifest(path: &str, text: &str) -> Vec<Violation> {
    let lines = (1..).zip(text.lines());
    let wild = lines.filter(|(_, line)| line.replace(' ', "").contains("=\"*\""));
    let rule = |number| violation(path, number, "a dependency on any version".to_owned());
    wild.map(|(number, _)| rule(number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "[graph]\n# why\ntargets = [\"x\", \"y\"]\n[licenses]\nallow = [\n    # not \"GPL\"\n    \"MIT\",\n    \
                        \"ISC\",\n]\nconfidence-threshold = 0.9\n[bans]\ndeny = [\n    { crate = \"bad\", reason = \"as \
                        written\" },\n]\n[sources]\nallow-registry = [\"https://index.example\"]\n";

    fn settings() -> Settings {
        Settings::read(TEXT).unwrap()
    }

    #[test]
    fn the_settings_are_read() {
        let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let expected = Settings {
            targets: strings(&["x", "y"]),
            licenses: strings(&["MIT", "ISC"]),
            banned: strings(&["bad"]),
            registries: strings(&["https://index.example"]),
        };
        assert_eq!(settings(), expected);
        assert!(Settings::read("[graph]\ntargets = [\"x\"]\n").is_err(), "missing lists");
        assert!(
            Settings::read(&TEXT.replace("\"MIT\",", "").replace("\"ISC\",", "")).is_err(),
            "an empty list"
        );
        Settings::read(include_str!("../../../deny.toml")).unwrap();
    }

    #[test]
    fn a_license_that_is_not_allowed_is_named() {
        let packages = packages("a v1|MIT (*)\nb v2 (proc-macro)|MIT AND GPL-3.0\nc v1|\n\n");
        let found = of_licenses(&packages, &settings().licenses);
        let rules: Vec<&str> = found.iter().map(|violation| violation.rule.as_str()).collect();
        assert_eq!(
            rules,
            [
                "`b v2 (proc-macro)` has the license `MIT AND GPL-3.0`, which deny.toml does not allow",
                "`c v1` has the license ``, which deny.toml does not allow",
            ]
        );
    }

    #[test]
    fn banned_crates_other_sources_and_any_version_are_found() {
        let lock = "[[package]]\nname = \"bad\"\nsource = \"registry+https://index.example\"\n[[package]]\nname = \
                    \"worse\"\nsource = \"git+https://code.example/worse#1\"\n";
        let found: Vec<String> = of_lock(lock, &settings()).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "Cargo.lock:2: `bad` is banned by deny.toml",
                "Cargo.lock:6: `git+https://code.example/worse#1` is no source that deny.toml allows"
            ]
        );
        let manifest = "a = \"1\"\nb = { version=\"*\" }\n";
        assert_eq!(
            of_manifest("Cargo.toml", manifest),
            [violation("Cargo.toml", 2, "a dependency on any version".into())]
        );
    }
}
