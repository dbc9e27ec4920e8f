//! `demo`: prepares the machine, builds the release and hands over to the program `kni-demo`.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    build_ebpf,
    command::run,
    progress::Progress,
    setup::{self, Goal},
    workspace::{cargo, is_root, release_program},
};

/// Arguments of `demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave the node running and print what to try
    #[arg(long)]
    keep: bool,
}

/// Runs the command; returns only when the demonstration could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    prepare(Goal::Demo, "kni-demo")?;
    let mut demo = Command::new(release_program("kni-demo"));
    demo.arg("--agent").arg(release_program("kni-agent"));
    demo.arg("--knictl").arg(release_program("knictl"));
    if args.keep {
        demo.arg("--keep");
    }
    // Replaces this process, so that signals and the exit code are the demonstration's own.
    Err(demo.exec()).with_context(|| format!("cannot run {}", release_program("kni-demo").display()))
}

/// Sets up the machine for `goal` and builds the agent, knictl and `program` of the integration package as released.
pub(crate) fn prepare(goal: Goal, program: &str) -> Result<()> {
    if !is_root() {
        bail!("`{program}` makes network namespaces and loads eBPF programs, which needs root");
    }
    let mut progress = Progress::new(setup::STEPS + 2);
    setup::run(goal, &mut progress)?;
    let object = progress.loud("eBPF programs", || build_ebpf::build(false))?;
    progress.loud("agent and tools", || {
        let mut build = cargo();
        build.args([
            "build",
            "--release",
            "-p",
            "kni-agent",
            "-p",
            "knictl",
            "-p",
            "kni-integration",
        ]);
        build.args(["--bin", "kni-agent", "--bin", "knictl", "--bin", program]);
        run(build.env("KNI_EBPF_OBJECT", object))
    })
}
