//! `bench`: prepares the machine, builds the release and executes the program `kni-bench`.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{goal::Goal, prepare::prepare, programs::Profile, workspace::ebpf_object};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to kni-bench
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the command; returns only when the benchmarks could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    prepare(Goal::Bench, Profile::Release, &["kni-bench", "kni-cni"])?;
    let program = Profile::Release.program("kni-bench");
    let mut bench = Command::new(&program);
    bench.args(&args.arguments).env("KNI_EBPF_OBJECT", ebpf_object());
    bench.env("KNI_AGENT_BIN", Profile::Release.program("kni-agent"));
    bench.env("KNI_KNICTL_BIN", Profile::Release.program("knictl"));
    bench.env("KNI_CNI_BIN", Profile::Release.program("kni-cni"));
    Err(bench.exec()).with_context(|| format!("cannot run {}", program.display()))
}
