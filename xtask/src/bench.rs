//! `bench`: prepares the machine, builds the release and hands over to the program `kni-bench`.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{
    demo::prepare,
    setup::Goal,
    workspace::{ebpf_object, release_program},
};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to kni-bench
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the command; returns only when the benchmarks could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    prepare(Goal::Bench, "kni-bench")?;
    let program = release_program("kni-bench");
    let mut bench = Command::new(&program);
    bench.args(&args.arguments).env("KNI_EBPF_OBJECT", ebpf_object());
    Err(bench.exec()).with_context(|| format!("cannot run {}", program.display()))
}
