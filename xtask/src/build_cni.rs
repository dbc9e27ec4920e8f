//! `build-cni`: builds the CNI plugin as one small static program for nodes of every distribution.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    command,
    goal::{self, Build},
    programs::{STATIC, flags_variable, triple},
    workspace::{cargo, target},
};

const PACKAGE: &str = "kni-cni";
/// Size limit: runtimes start the plugin for each call, and images contain it.
const MAX_BYTES: u64 = 5 * 1000 * 1000;

/// The release profile of the plugin, optimised for size and start time. Set by environment variables, because the
/// release profile of the workspace is that of the agent.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s"),
    ("CARGO_PROFILE_RELEASE_LTO", "true"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_STRIP", "symbols"),
];

/// Runs the command.
pub(crate) fn command() -> Result<()> {
    let program = build()?;
    println!("{} ({} kB)", program.display(), size(&program)? / 1000);
    Ok(())
}

/// Builds the plugin and returns its absolute path.
pub(crate) fn build() -> Result<PathBuf> {
    goal::declared(Build::CniPlugin)?;
    let mut build = cargo();
    build.args(["build", "--release", "--package", PACKAGE, "--target", &triple()]);
    build.envs(PROFILE.iter().copied()).env(flags_variable(), STATIC);
    command::build(&mut build)?;
    let program = target().join(triple()).join("release").join(PACKAGE);
    let bytes = size(&program)?;
    ensure!(
        bytes < MAX_BYTES,
        "{} has {bytes} bytes, more than {MAX_BYTES}",
        program.display()
    );
    Ok(program)
}

fn size(program: &Path) -> Result<u64> {
    let metadata = fs::metadata(program).with_context(|| format!("cannot read {}", program.display()))?;
    Ok(metadata.len())
}
