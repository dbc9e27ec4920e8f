//! `demo`: prepares the machine, builds the programs and executes the program `kni-demo`.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    build_ebpf, node,
    programs::{Profile, programs},
    progress::Progress,
    setup::{self, Goal},
    workspace::is_root,
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
    // The profile of the tests and of `node`, so that one build serves all commands.
    let profile = Profile::Dev;
    prepare(Goal::Demo, profile, &["kni-demo", "kni-controller"])?;
    // The API server of the part with two nodes.
    let nodes = !args.keep && has_go();
    if nodes {
        node::build_programs(&mut Progress::new(1), &[])?;
    }
    let program = |name| profile.program(name);
    let mut demo = Command::new(program("kni-demo"));
    demo.arg("--agent").arg(program("kni-agent"));
    demo.arg("--knictl").arg(program("knictl"));
    if args.keep {
        demo.arg("--keep");
    }
    if nodes {
        demo.arg("--nodes");
    }
    // Replaces this process, so that signals and the exit code are those of the demonstration.
    Err(demo.exec()).with_context(|| format!("cannot run {}", program("kni-demo").display()))
}

/// Which version is needed is checked by what builds with it.
fn has_go() -> bool {
    Command::new("go")
        .arg("version")
        .output()
        .is_ok_and(|out| out.status.success())
}

/// Prepares the machine for `goal` and builds the agent, knictl and `others`.
pub(crate) fn prepare(goal: Goal, profile: Profile, others: &[&str]) -> Result<()> {
    if !is_root() {
        bail!("this makes network namespaces and loads eBPF programs, which needs root");
    }
    let mut progress = Progress::new(setup::STEPS + 2);
    setup::run(goal, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("agent and tools", || {
        programs(profile, &[&["kni-agent", "knictl"], others].concat())
    })
}
