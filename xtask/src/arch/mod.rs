//! `arch`: checks that crates depend only on lower layers, that only their owners use external crates, that files do
//! not import each other in cycles, that no name and no comment contains a retired word, that licenses and sources are
//! allowed, and what else CONTRIBUTING states and text can show.

mod baseline;
mod comments;
mod commits;
mod cycles;
mod declarations;
mod deny;
mod features;
mod habits;
mod kinds;
mod layers;
mod lengths;
mod license;
pub(crate) mod manifest;
mod modules;
mod paths;
mod rules;
mod tokens;
mod untested;
mod unused;
mod versions;
mod vocabulary;
mod words;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use baseline::Counted;
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

/// Options of the checks.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Lower the tolerated numbers of violations to the present ones
    #[arg(long)]
    lower: bool,
}

/// All checks of the architecture.
pub(crate) fn check_all() -> Result<()> {
    check(&Args::default())
}

/// All checks of the architecture.
pub(crate) fn check(args: &Args) -> Result<()> {
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
    violations.extend(untested::violations(&members)?);
    violations.extend(unused::check(&members)?);
    violations.extend(kinds::check()?);
    violations.extend(deny::check(&members)?);
    violations.extend(versions::check(&members)?);
    violations.extend(commits::check()?);
    violations.extend(compared(args)?);
    for violation in &violations {
        say(&violation.to_string());
    }
    if !violations.is_empty() {
        bail!("{} violations of the rules of the architecture", violations.len());
    }
    say(&format!(
        "arch: {} crates with {files} files: layers, cycles, words, lengths, habits and licenses follow the rules",
        members.len()
    ));
    Ok(())
}

/// The violations whose number is compared with the tolerated one, where it is larger.
fn compared(args: &Args) -> Result<Vec<Violation>> {
    let mut found: Vec<Counted> = vocabulary::violations()?;
    for path in vocabulary::files()? {
        let relative = path.strip_prefix(root()).unwrap_or(&path);
        if relative.extension().is_some_and(|kind| kind == "rs") {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            found.extend(lengths::check(relative, &text));
            found.extend(habits::check(relative, &text));
        }
    }
    let tolerated = baseline::read()?;
    let slack = baseline::slack(&found, &tolerated);
    if args.lower {
        baseline::lower(&found, &tolerated)?;
    } else if slack > 0 {
        say(&format!(
            "arch: {slack} tolerated numbers are too large: cargo xtask arch --lower"
        ));
    }
    let mut exceeding = baseline::exceeding(&found, &tolerated);
    exceeding.dedup();
    Ok(exceeding)
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
