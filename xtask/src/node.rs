//! `node`: prepares the machine, builds the programs and executes the program `kni-node`.

use std::{ffi::OsString, os::unix::process::CommandExt as _, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    announce::announce,
    build_ebpf, cold,
    command::relay,
    goal::{self, Build, Goal},
    place,
    programs::{Profile, programs},
    progress::Progress,
    setup,
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
    Up(Up),
    /// End the node and everything in it
    Down,
    /// Show what runs
    Status,
}

#[derive(clap::Args)]
struct Up {
    /// Give the agent a folder of manifests in place of the API server
    #[arg(long)]
    standalone: bool,
    /// Let the kubelet make the networks of pods by KNI
    #[arg(long)]
    kni: bool,
}

impl Up {
    /// The same options for `kni-node up`.
    fn options(&self) -> impl Iterator<Item = &'static str> {
        let options = [("--standalone", self.standalone), ("--kni", self.kni)];
        options
            .into_iter()
            .filter_map(|(option, is_set)| is_set.then_some(option))
    }
}

/// Number of steps of [`prepare`].
pub(crate) const STEPS: usize = setup::STEPS + 3;

/// Runs the command; returns only when it has failed or there is nothing to do.
pub(crate) fn command(args: &Args) -> Result<()> {
    let folder = target().join("node");
    match &args.action {
        Action::Up(up) => {
            require_root("node")?;
            start(&[])?;
            prepare(&mut Progress::new(STEPS))?;
            replace_by(kni_node(&folder).arg("up").args(up.options()))
        }
        Action::Down => end_or_show("node", &folder, "down"),
        Action::Status => end_or_show("node", &folder, "status"),
    }
}

/// Fails unless this process runs as root, which `command` needs.
pub(crate) fn require_root(command: &str) -> Result<()> {
    if !is_root() {
        bail!("`{command}` makes namespaces and runs a container runtime, which needs root");
    }
    Ok(())
}

/// Executes `kni-node down` or `kni-node status`, if it was ever built, for what `command` started in `folder`.
pub(crate) fn end_or_show(command: &str, folder: &Path, action: &str) -> Result<()> {
    require_root(command)?;
    if !PROFILE.program("kni-node").is_file() || !folder.exists() {
        println!("nothing is up; `cargo xtask {command} up` starts it");
        return Ok(());
    }
    replace_by(kni_node(folder).arg(action))
}

/// Executes a script that `up` wrote into `folder`.
pub(crate) fn shortcut(command: &str, folder: &Path, script: &str, arguments: &[OsString]) -> Result<()> {
    let script = folder.join(script);
    if !script.is_file() {
        bail!("nothing is up; `cargo xtask {command} up` starts it");
    }
    replace_by(Command::new(script).args(arguments))
}

/// Replaces this process, so that signals and the exit code are those of the program. Returns only on failure.
pub(crate) fn replace_by(program: &mut Command) -> Result<()> {
    let error = program.exec();
    Err(error).with_context(|| format!("cannot run {}", program.get_program().display()))
}

/// Fails if no node can run from this checkout; otherwise prints what [`prepare`] and `more` build.
pub(crate) fn start(more: &[Build]) -> Result<()> {
    place::usable(&target())?;
    announce(&[&[Build::Ebpf, Build::Programs, Build::NodePrograms], more].concat());
    Ok(())
}

/// Installs and builds everything that a node runs, as [`STEPS`] steps of `progress`.
pub(crate) fn prepare(progress: &mut Progress) -> Result<()> {
    setup::run(Goal::Node, progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("agent and tools", || programs(PROFILE, &PROGRAMS))?;
    build_programs(progress, &[])
}

/// Builds the missing programs of a node, including the Go programs, as one step of `progress`; `options` are those of
/// `kni-node build`.
pub(crate) fn build_programs(progress: &mut Progress, options: &[&str]) -> Result<()> {
    goal::declared(Build::NodePrograms)?;
    progress.step("programs of a node", || {
        programs(PROFILE, &["kni-node"])?;
        relay(kni_node(&target().join("node")).arg("build").args(options))
    })
}

/// The program `kni-node` with its folders as arguments; what it starts is described in `folder`.
pub(crate) fn kni_node(folder: &Path) -> Command {
    let mut node = Command::new(PROFILE.program("kni-node"));
    node.arg("--folder").arg(folder);
    // The tests use the same folder.
    node.arg("--tools").arg(target().join("tools/node"));
    node.arg("--programs").arg(PROFILE.folder());
    cold::pass_on(node.env("CARGO", cargo_path()));
    node
}
