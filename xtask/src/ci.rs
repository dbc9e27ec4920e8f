//! `ci`: runs the checks of every change, from the fastest to `test`.

use std::{
    fs,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};

use crate::{
    arch,
    build_ebpf::{self, Architecture},
    cold,
    command::{build, output, run},
    docs, fresh,
    goal::Goal,
    progress::Progress,
    setup,
    test::{self, Summary},
    workspace::{cargo, root, target},
};

/// Arguments of `ci`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ignore what earlier commands have kept outside the checkout
    #[arg(long)]
    cold: bool,
}

/// Runs the command; stops at the first check that fails.
pub(crate) fn command(args: &Args) -> ExitCode {
    cold::set(args.cold);
    match checks() {
        Ok(()) => test::command_with(&test::Args::default(), last),
        Err(error) => test::conclude(Err(error), Summary::default()),
    }
}

/// What follows the tests, as it runs programs that were compiled for them.
fn last() -> Result<()> {
    fresh::gate(&mut Progress::new(1))?;
    note_pass()
}

/// Writes the checked commit to `target/ci-passed`, if the files are those of a commit.
fn note_pass() -> Result<()> {
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(root()).args(arguments));
    // A copy of the files without git has no commit to note.
    let Ok(changes) = git(&["status", "--porcelain"]) else {
        return Ok(());
    };
    if changes.trim().is_empty() {
        let path = target().join("ci-passed");
        fs::write(&path, git(&["rev-parse", "HEAD"])?).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Refuses links of comments that lead nowhere. Not in the harness of the tests: checking it once more takes longer
/// than many crates of the product together.
fn documentation() -> Result<()> {
    let mut doc = cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--exclude", "kni-integration"]);
    build(doc.env("RUSTDOCFLAGS", "-D warnings"))
}

fn checks() -> Result<()> {
    let mut progress = Progress::new(7 + setup::STEPS);
    progress.step("format", || {
        run(cargo().args(["fmt", "--all", "--check"])).context("the code is not formatted (`cargo fmt --all`)")
    })?;
    progress.step("lints", || {
        build(cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    progress.step("documentation", documentation)?;
    progress.step("architecture", || arch::check_all().and_then(|()| test::check_ledger()))?;
    // Runs before any program is built, so that no program is rebuilt with the object in it.
    setup::run(Goal::All, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("eBPF programs for arm64", || build_ebpf::provide(Architecture::Aarch64))?;
    progress.step("pages", docs::check)
}
