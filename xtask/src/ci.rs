//! `ci`: runs the checks of every change, from the fastest to `test`.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{
    arch,
    build_ebpf::{self, Architecture},
    command::{build, run},
    docs,
    progress::Progress,
    setup::{self, Goal},
    test::{self, Tally},
    workspace::cargo,
};

/// Runs the command; stops at the first check that fails.
pub(crate) fn command() -> ExitCode {
    match checks() {
        Ok(()) => test::command(&test::Args::default()),
        Err(error) => test::conclude(Err(error), Tally::default()),
    }
}

fn checks() -> Result<()> {
    let mut progress = Progress::new(6 + setup::STEPS);
    progress.step("format", || {
        run(cargo().args(["fmt", "--all", "--check"])).context("the code is not formatted (`cargo fmt --all`)")
    })?;
    progress.step("lints", || {
        build(cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    progress.step("architecture", arch::check_all)?;
    // Runs before any program is built, so that no program is rebuilt with the object in it.
    setup::run(Goal::All, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("eBPF programs for arm64", || build_ebpf::provide(Architecture::Aarch64))?;
    progress.step("pages", docs::check)
}
