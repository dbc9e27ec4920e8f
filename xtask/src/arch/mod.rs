//! `arch`: checks that crates depend only on lower layers, that only their owners use external crates, that files do
//! not import each other in cycles, and that no name and no comment contains a retired word.

mod comments;
mod cycles;
mod declarations;
mod features;
mod layers;
pub(crate) mod manifest;
mod modules;
mod paths;
mod rules;
mod tokens;
mod untested;
mod vocabulary;
mod words;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use modules::Modules;

use crate::{progress::say, workspace::root};

/// A violated rule and its location.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    path: PathBuf,
    line: usize,
    rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.rule)
    }
}

/// All checks of the architecture.
pub(crate) fn check_all() -> Result<()> {
    let members = manifest::members(root())?;
    let mut violations = layers::check(&members);
    violations.extend(features::check()?);
    let mut files = 0;
    for member in &members {
        let sources = root().join(&member.folder).join("src");
        if layers::is_of_agent(&member.folder) {
            let mut paths = Vec::new();
            read_sources(&sources, &mut paths)?;
            for path in &paths {
                let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
                let relative = path.strip_prefix(root()).unwrap_or(path);
                violations.extend(layers::check_file(&member.folder, relative, &text));
            }
        }
        for file in roots(&root().join(&member.folder))? {
            let modules = Modules::read(&file, &member.package)?;
            files += modules.all.len();
            violations.extend(cycles::find(&modules, root()));
        }
    }
    violations.extend(vocabulary::violations()?);
    violations.extend(untested::violations(&members)?);
    for violation in &violations {
        say(&violation.to_string());
    }
    if !violations.is_empty() {
        bail!("{} violations of the rules of the architecture", violations.len());
    }
    say(&format!(
        "arch: {} crates with {files} files: layers, cycles and words follow the rules",
        members.len()
    ));
    Ok(())
}

/// The root files of a package: library, programs, tests.
fn roots(package: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = ["src/lib.rs", "src/main.rs"]
        .iter()
        .map(|file| package.join(file))
        .collect();
    for folder in ["src/bin", "tests"] {
        let Ok(entries) = fs::read_dir(package.join(folder)) else {
            continue;
        };
        for entry in entries {
            let path = entry
                .with_context(|| format!("cannot list {folder} of {}", package.display()))?
                .path();
            if path.extension().is_some_and(|kind| kind == "rs") {
                found.push(path);
            } else {
                found.push(path.join("main.rs"));
            }
        }
    }
    found.retain(|file| file.is_file());
    found.sort();
    Ok(found)
}

fn read_sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        if path.is_dir() {
            read_sources(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
