//! `arch`: checks that the modules of kni-agent import downward only and leave outside crates to their owners.

mod comments;
mod declarations;
mod paths;
mod rules;
mod tokens;
mod vocabulary;
mod words;

use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{progress::say, workspace::root};

/// The folder that is checked.
const SOURCES: &str = "kni-agent/src";

/// A broken rule and where.
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

/// Arguments of `arch`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Look for retired words only, in these files and folders or everywhere
    #[arg(long, num_args = 0.., value_name = "PATH")]
    words: Option<Vec<PathBuf>>,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    match &args.words {
        Some(only) => vocabulary::print(only),
        None => check_all(),
    }
}

/// All checks of the architecture.
pub(crate) fn check_all() -> Result<()> {
    let mut files = Vec::new();
    read_sources(&root().join(SOURCES), &mut files)?;
    if files.is_empty() {
        bail!("there is no Rust file in {SOURCES}");
    }
    let mut violations = BTreeSet::new();
    for path in &files {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let in_crate = path
            .strip_prefix(root().join(SOURCES))
            .context("a source outside the crate")?;
        violations.extend(check(in_crate, &text));
    }
    for violation in &violations {
        say(&format!("{SOURCES}/{violation}"));
    }
    if !violations.is_empty() {
        bail!(
            "{} places break the rules of the architecture (the tables are in xtask/src/arch/rules.rs)",
            violations.len()
        );
    }
    say(&format!("layers: {} files, no import breaks the rules", files.len()));
    Ok(())
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

/// All rules that the file `path` (relative to the crate's sources) breaks with `text`. A path named twice on one line
/// counts once.
fn check(path: &Path, text: &str) -> BTreeSet<Violation> {
    let at = |line, rule| Violation {
        path: path.to_owned(),
        line,
        rule,
    };
    let Some(place) = Place::of(path) else {
        return BTreeSet::from([at(1, "a file name that is not UTF-8".to_owned())]);
    };
    let mut violations = BTreeSet::new();
    if let Some(rule) = refuse_header(&place, text) {
        violations.insert(at(1, rule));
    }
    let tokens = match tokens::cut(text) {
        Ok(tokens) => tokens,
        Err(error) => {
            violations.insert(at(1, format!("not Rust: {error}")));
            return violations;
        }
    };
    for found in paths::find(&tokens) {
        let refused = match found.root_relative(place.depth) {
            // `use crate::{self}` and the like name nothing.
            Some([]) => None,
            Some([first, ..]) => rules::refuse_import(&place.module, first),
            None => rules::refuse_outside(&place.module, &found.names),
        };
        violations.extend(refused.map(|rule| at(found.line, rule)));
    }
    violations
}

/// Which module a file belongs to.
struct Place {
    /// The top-level module.
    module: String,
    /// How deep the file's own module lies; 0 for a crate root.
    depth: usize,
    /// Whether this is the file that opens the top-level module.
    opens_module: bool,
}

impl Place {
    fn of(path: &Path) -> Option<Self> {
        let stem = path.with_extension("");
        let mut names: Vec<&str> = stem.iter().map(|name| name.to_str()).collect::<Option<_>>()?;
        if names.len() > 1 && names.last() == Some(&"mod") {
            names.pop();
        }
        let module = (*names.first()?).to_owned();
        let is_root = names == ["lib"] || names == ["main"];
        let depth = if is_root { 0 } else { names.len() };
        Some(Self {
            module,
            depth,
            opens_module: depth == 1,
        })
    }
}

/// Why the head of a module's first file does not tell its layer, if so.
fn refuse_header(place: &Place, text: &str) -> Option<String> {
    let Some(layer) = rules::layer(&place.module) else {
        return Some(format!("`{}` is in no layer; add it to the table", place.module));
    };
    if !place.opens_module {
        return None;
    }
    let stated = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .find_map(|line| line.strip_prefix("//! Layer: "))
        .map(|rest| rest.trim_end().trim_end_matches('.'));
    match stated {
        Some(stated) if stated == layer.name() => None,
        Some(stated) => Some(format!("says `Layer: {stated}`, but the table says `{}`", layer.name())),
        None => Some(format!("has no line `//! Layer: {}` in its header", layer.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_clean_module_breaks_nothing() {
        let text = "//! Attaches pods.\n//! Layer: service.\n\nmod plan;\nuse std::fs;\nuse crate::{ipam::Pool, model::{self, PodRef}, \
                    store::Store};\n#[cfg(test)] mod tests { use super::{*, plan::Step}; }\n";
        assert_eq!(broken("attach/mod.rs", text), Vec::<String>::new());
        assert_eq!(
            broken("attach/plan.rs", "use super::Attacher; use crate::attach::lock;"),
            Vec::<String>::new()
        );
        assert_eq!(
            broken("main.rs", "use kni_agent::{agent, dataplane::Dataplane};"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn an_upward_import_is_told_with_its_line() {
        let text = "//! Pools.\n//! Layer: engine\nuse crate::{\n    model::Lease,\n    store::Store,\n};\n";
        assert_eq!(
            broken("ipam.rs", text),
            ["ipam.rs:5: `ipam` (engine) imports `store` (driver), which is upward; imports go down only"]
        );
    }

    #[test]
    fn paths_through_super_and_inside_tests_count() {
        assert_eq!(broken("store/file.rs", "use super::super::netlink::Link;").len(), 1);
        assert_eq!(
            broken(
                "store/file.rs",
                "#[cfg(test)]\nmod tests { fn f() { crate::grpc::serve(); } }"
            )
            .len(),
            1
        );
        assert_eq!(
            broken("store/file.rs", "use super::netlink::Link;").len(),
            0,
            "a part of the store itself"
        );
    }

    #[test]
    fn an_outside_crate_in_the_wrong_module_is_told() {
        assert_eq!(
            broken("attach/run.rs", "fn f(map: aya::maps::Array<u32>) {}"),
            ["attach/run.rs:1: `aya` belongs to dataplane only, not to `attach`"]
        );
        assert_eq!(broken("ipam/pool.rs", "#[tokio::test]\nasync fn f() {}").len(), 1);
        assert_eq!(
            broken("ipam/pool.rs", "use std::{fmt, fs, time::{Duration, Instant}};").len(),
            2
        );
        assert_eq!(
            broken("agent.rs", "//! A.\n//! Layer: root\nuse redb::Database;").len(),
            1
        );
    }

    #[test]
    fn the_header_states_the_layer_of_the_table() {
        assert_eq!(
            broken("ipam/mod.rs", "//! Pools.\n"),
            ["ipam/mod.rs:1: has no line `//! Layer: engine` in its header"]
        );
        assert_eq!(
            broken("ipam/mod.rs", "//! Pools.\n//! Layer: driver\n"),
            ["ipam/mod.rs:1: says `Layer: driver`, but the table says `engine`"]
        );
        assert_eq!(broken("ipam/pool.rs", "//! A pool.\n"), Vec::<String>::new());
        assert_eq!(
            broken("oddity/mod.rs", "//! Odd.\n"),
            ["oddity/mod.rs:1: `oddity` is in no layer; add it to the table"]
        );
    }

    #[test]
    fn source_that_cannot_be_read_is_not_passed_over() {
        assert_eq!(broken("store/file.rs", "fn f() {").len(), 1);
    }
}
