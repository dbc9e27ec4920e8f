//! `node`: prepares the machine, builds the programs and executes the program `kni-node`.

use std::{ffi::OsString, os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    build_ebpf,
    command::relay,
    programs::{Profile, programs},
    progress::Progress,
    setup::{self, Goal},
    workspace::{cargo_path, is_root, target},
};

/// The programs of this project that a node runs, and the program that runs the node.
const PROGRAMS: [&str; 5] = ["kni-agent", "kni-cni", "kni-controller", "kni-node", "knictl"];

/// The profile of the tests and of `demo`, so that one build serves all commands.
const PROFILE: Profile = Profile::Dev;

/// Arguments of `node`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Build what is missing and start the node
    Up(Rest),
    /// End the node and everything in it
    Down(Rest),
    /// Show what runs
    Status(Rest),
}

#[derive(clap::Args)]
struct Rest {
    /// Passed on to kni-node
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the command; returns only when `kni-node` could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    if !is_root() {
        bail!("`node` makes namespaces and runs a container runtime, which needs root");
    }
    let (action, rest) = match &args.action {
        Action::Up(rest) => ("up", rest),
        Action::Down(rest) => ("down", rest),
        Action::Status(rest) => ("status", rest),
    };
    let program = PROFILE.program("kni-node");
    if action == "up" {
        prepare()?;
    } else if !program.is_file() {
        println!("the node is not up; `cargo xtask node up` starts it");
        return Ok(());
    }
    let mut node = kni_node();
    node.arg(action).args(&rest.arguments);
    // Replaces this process, so that signals and the exit code are those of the program.
    Err(node.exec()).with_context(|| format!("cannot run {}", program.display()))
}

fn prepare() -> Result<()> {
    let mut progress = Progress::new(setup::STEPS + 3);
    setup::run(Goal::Node, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("agent and tools", || programs(PROFILE, &PROGRAMS))?;
    build_programs(&mut progress, &[])
}

/// Builds the missing programs of a node, including the Go programs, as one step of `progress`; `options` are those of
/// `kni-node build`.
pub(crate) fn build_programs(progress: &mut Progress, options: &[&str]) -> Result<()> {
    progress.step("programs of a node", || {
        programs(PROFILE, &["kni-node"])?;
        relay(kni_node().arg("build").args(options))
    })
}

/// The program `kni-node` with its folders as arguments.
fn kni_node() -> Command {
    let mut node = Command::new(PROFILE.program("kni-node"));
    node.arg("--folder").arg(target().join("node"));
    // The tests use the same folder.
    node.arg("--tools").arg(target().join("tools/node"));
    node.arg("--programs").arg(PROFILE.folder());
    node.env("CARGO", cargo_path());
    node
}
