//! Runs the table of editors in builds without one defence each: exactly the rows that need the defence are red.
//!
//! A file of `tests/integration/without` is the change that removes one defence, from the sources or from the manifests
//! of the deployment. It is applied to a copy of the checkout, never to the checkout itself.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    Plan, Summary, environment,
    ledger::Ledger,
    programs::{self, Built},
    run::Environment,
    selection, suite,
};
use crate::{
    build_ebpf,
    command::{build, output},
    goal::Goal,
    node::require_root,
    progress::{Progress, say},
    setup,
    workspace::{cargo, root, target},
};

/// The folder of the changes.
const FOLDER: &str = "tests/integration/without";
/// The test of the table.
const TEST: &str = "cluster::cluster::editors::";
/// What a change of the sources leads to: the programs that are built anew, and their variables.
const BUILT: [(&str, &str); 2] = [("kni-agent", "KNI_AGENT_BIN"), ("kni-controller", "KNI_CONTROLLER_BIN")];
/// What a first build takes over: third-party crates are the same, and those of the workspace are newer in the copy.
const SEED: [&str; 3] = [".fingerprint", "build", "deps"];

/// A change that removes one defence.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    name: String,
    path: PathBuf,
}

impl Change {
    /// All of them, in the order of their names.
    fn all() -> Result<Vec<Self>> {
        let folder = root().join(FOLDER);
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.context("cannot read an entry")?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(name) = name.strip_suffix(".patch").map(str::to_owned) {
                all.push(Self { name, path });
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The files that it changes.
    fn files(&self) -> Result<Vec<String>> {
        let mut list = Command::new("git");
        let numbers = output(list.current_dir(root()).args(["apply", "--numstat"]).arg(&self.path))?;
        let files = numbers.lines().filter_map(|line| line.split('\t').nth(2));
        Ok(files.map(str::to_owned).collect())
    }

    /// Whether programs have to be built.
    fn is_of_sources(&self) -> Result<bool> {
        Ok(self.files()?.iter().any(|file| !file.starts_with("deploy/")))
    }

    /// An error if it does not apply to the checkout.
    fn check(&self) -> Result<()> {
        let mut check = Command::new("git");
        output(check.current_dir(root()).args(["apply", "--check"]).arg(&self.path)).map(drop)
    }

    /// Applies it to the copy, which is no checkout of its own.
    fn apply(&self, copy: &Path) -> Result<()> {
        let above = copy.parent().context("a folder above the copy")?;
        let mut apply = Command::new("git");
        apply.current_dir(copy).env("GIT_CEILING_DIRECTORIES", above);
        output(apply.arg("apply").arg(&self.path)).map(drop)
    }
}

/// Runs the table without the defence `name`, or without each one.
pub(super) fn run(name: &str, plan: &Plan, summary: &mut Summary) -> Result<()> {
    require_root("test")?;
    let mut changes = Change::all()?;
    changes.retain(|change| name.is_empty() || change.name == name);
    ensure!(!changes.is_empty(), "{FOLDER} has no file {name}.patch");
    changes.iter().try_for_each(Change::check)?;
    let ledger = Ledger::read()?;
    let mut progress = Progress::new(setup::STEPS + 2 + changes.len());
    setup::run(Goal::Test, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    let built = progress.step("test programs", || programs::build_some(&BTreeSet::from(["cluster"])))?;
    let jobs = selection::named(&built, &[TEST.to_owned()])?;
    let mut failed = Vec::new();
    for change in &changes {
        let outcome = progress.step(&format!("without {}", change.name), || {
            let (mut environment, _) = environment(&built, plan)?;
            change_environment(change, &built, &mut environment)?;
            suite::run(&jobs, &environment, &ledger, false)
        })?;
        let is_right = suite::check(&outcome, plan.require);
        say(&format!(
            "without {}: {}",
            change.name,
            if is_right.is_ok() { "as listed" } else { "NOT as listed" }
        ));
        failed.extend(is_right.err().map(|_| change.name.as_str()));
        summary.tally.add(outcome.tally());
    }
    if !failed.is_empty() {
        bail!(
            "other rows than those of the list are red without {}",
            failed.join(", ")
        );
    }
    Ok(())
}

/// Makes the copy without the defence, and names its programs and manifests in the environment of the test.
fn change_environment(change: &Change, built: &Built, environment: &mut Environment) -> Result<()> {
    let place = target().join("without");
    let copy = place.join("sources");
    copy_checkout(&copy)?;
    change.apply(&copy)?;
    environment.insert("KNI_WITHOUT", change.name.clone().into());
    environment.insert("KNI_DEPLOY", copy.join("deploy").into());
    if !change.is_of_sources()? {
        return Ok(());
    }
    let folder = place.join("build");
    seed(&folder)?;
    let mut command = cargo();
    command.current_dir(&copy).env("CARGO_TARGET_DIR", &folder);
    command.env("KNI_EBPF_OBJECT", crate::workspace::ebpf_object());
    command.args(["build", "--workspace"]);
    for (program, _) in BUILT {
        command.args(["--bin", program]);
    }
    build(&mut command)?;
    for (program, variable) in BUILT {
        ensure!(built.variables.contains_key(variable), "no test reads {variable}");
        environment.insert(variable, folder.join("debug").join(program).into());
    }
    Ok(())
}

/// Makes the copy equal to the files that git knows. Equal files stay as they are, so that cargo compiles only what was
/// changed by this or by the last change.
fn copy_checkout(copy: &Path) -> Result<()> {
    let mut list = Command::new("git");
    let tracked = output(
        list.current_dir(root())
            .args(["ls-files", "--cached", "--others", "--exclude-standard"]),
    )?;
    let tracked: BTreeSet<PathBuf> = tracked.lines().map(PathBuf::from).collect();
    for file in &tracked {
        let (from, to) = (root().join(file), copy.join(file));
        // A file that was deleted, but not yet in git.
        let Ok(content) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|present| present == content) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        fs::copy(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
    }
    remove_others(copy, Path::new(""), &tracked)
}

/// Removes what is in the copy beside those files.
fn remove_others(copy: &Path, folder: &Path, files: &BTreeSet<PathBuf>) -> Result<()> {
    let at = copy.join(folder);
    for entry in fs::read_dir(&at).with_context(|| format!("cannot read {}", at.display()))? {
        let entry = entry.context("cannot read an entry")?;
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            remove_others(copy, &path, files)?;
        } else if !files.contains(&path) {
            fs::remove_file(entry.path()).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Fills the folder of builds with what was compiled for the tests, once.
fn seed(folder: &Path) -> Result<()> {
    let debug = folder.join("debug");
    if debug.exists() {
        return Ok(());
    }
    fs::create_dir_all(&debug).with_context(|| format!("cannot create {}", debug.display()))?;
    for part in SEED {
        let mut copy = Command::new("cp");
        output(
            copy.args(["-a", "--reflink=auto"])
                .arg(target().join("debug").join(part))
                .arg(&debug),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_applies_to_the_sources_and_has_a_reason() {
        let all = Change::all().unwrap();
        assert!(all.len() >= 8, "{} changes", all.len());
        for change in all {
            change
                .check()
                .unwrap_or_else(|error| panic!("{}: {error:#}", change.name));
            let text = fs::read_to_string(&change.path).unwrap();
            assert!(
                !text.starts_with("diff") && !text.starts_with("---"),
                "{} has no first line",
                change.name
            );
            assert!(!change.files().unwrap().is_empty(), "{} changes nothing", change.name);
        }
    }

    #[test]
    fn the_copy_has_what_git_knows_and_nothing_else() {
        let copy = std::env::temp_dir().join(format!("xtask-without-{}", std::process::id()));
        fs::create_dir_all(copy.join("deploy")).unwrap();
        fs::write(copy.join("deploy/stray.yaml"), "").unwrap();
        copy_checkout(&copy).unwrap();
        assert!(!copy.join("deploy/stray.yaml").exists());
        let manifest = "deploy/base/access.yaml";
        assert_eq!(
            fs::read(copy.join(manifest)).unwrap(),
            fs::read(root().join(manifest)).unwrap()
        );
        fs::remove_dir_all(&copy).unwrap();
    }
}
