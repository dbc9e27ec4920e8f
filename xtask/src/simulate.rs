//! `simulate`: prepares the machine, builds the release and executes the program `kni-simulate`.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{goal::Goal, prepare::prepare, programs::Profile};

/// Arguments of `simulate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build with the profile of the tests, which takes less time
    #[arg(long)]
    dev: bool,
    /// Passed on to kni-simulate: --nodes, --pods, --networks, --rate, --duration and others
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the command; returns only when the simulation could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    let profile = if args.dev { Profile::Dev } else { Profile::Release };
    prepare(
        Goal::Test,
        profile,
        &["kni-simulate", "kni-simulated-nodes", "kni-controller"],
    )?;
    let program = profile.program("kni-simulate");
    let mut simulate = Command::new(&program);
    simulate.args(&args.arguments);
    simulate.env("KNI_SIMULATED_NODES_BIN", profile.program("kni-simulated-nodes"));
    simulate.env("KNI_CONTROLLER_BIN", profile.program("kni-controller"));
    Err(simulate.exec()).with_context(|| format!("cannot run {}", program.display()))
}
