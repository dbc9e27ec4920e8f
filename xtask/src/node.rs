//! `node`: one real Kubernetes node to try KNI on, in namespaces of its own.

mod keep;
mod state;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use kni_local_node::{Programs, StaticPrograms};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use state::State;

use crate::{
    build_ebpf,
    command::{run, tail},
    progress::Progress,
    setup::{self, Goal},
    workspace::{cargo, is_root, release_program, target},
};

/// How long the node may take to end.
const PATIENCE: Duration = Duration::from_mins(1);

/// Arguments of `node`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Build what is missing and start the node
    Up,
    /// End the node and everything in it
    Down,
    /// Tell what runs
    Status,
    /// What `up` leaves running: owns the node until it ends itself
    #[command(hide = true)]
    Keep,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    if !is_root() {
        bail!("`node` makes namespaces and runs a container runtime, which needs root");
    }
    match args.action {
        Action::Up => up(),
        Action::Down => down(),
        Action::Status => status(),
        Action::Keep => keep::command(),
    }
}

/// The folder of the node's programs, which the tests know as well.
pub(crate) fn tools() -> PathBuf {
    target().join("tools/node")
}

/// Builds the programs of a node that are missing, as one step of `progress`.
pub(crate) fn build_programs(progress: &mut Progress) -> Result<(Programs, StaticPrograms)> {
    let missing = Programs::missing_in(&tools()).len();
    let name = match missing {
        0 => "programs of a node".to_owned(),
        _ => format!("programs of a node ({missing} to build)"),
    };
    progress.loud(&name, || {
        let programs = Programs::build(&tools(), &mut |line| println!("    {line}"))?;
        let statics = StaticPrograms::build(&tools().join("static"))?;
        Ok((programs, statics))
    })
}

fn up() -> Result<()> {
    if State::running()?.is_some() {
        println!("the node is already up");
        println!("{}", state::advice());
        return Ok(());
    }
    let mut progress = Progress::new(setup::STEPS + 4);
    setup::run(Goal::Node, &mut progress)?;
    let object = progress.loud("eBPF programs", || build_ebpf::build(false))?;
    build_programs(&mut progress)?;
    progress.loud("agent and tools", || {
        let mut build = cargo();
        build.args(["build", "--release", "-p", "kni-agent", "-p", "knictl", "-p", "kni-cni"]);
        run(build.env("KNI_EBPF_OBJECT", object))
    })?;
    progress.loud("node", start)?;
    State::running()?.context("the node has ended again")?;
    println!("\n{}", state::advice());
    Ok(())
}

/// Starts the process that owns the node, and waits until the node is ready.
fn start() -> Result<()> {
    let folder = state::folder();
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let log = folder.join("keep.log");
    let errors = fs::File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let own = std::env::current_exe().context("path of this program")?;
    let mut keeper = Command::new(own)
        .args(["node", "keep"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        // Not of our terminal's job: it is to outlive us.
        .process_group(0)
        .spawn()
        .context("start the node's owner")?;
    let told = keeper.stdout.take().context("no stdout")?;
    for line in BufReader::new(told).lines() {
        let line = line.context("what the node's owner says")?;
        if line == keep::READY {
            return Ok(());
        }
        println!("    {line}");
    }
    let status = keeper.wait().context("wait for the node's owner")?;
    bail!("the node does not start ({status}):\n{}", tail(&log))
}

fn down() -> Result<()> {
    let Some(state) = State::running()? else {
        state::forget()?;
        println!("the node is not up");
        return Ok(());
    };
    let keeper = Pid::from_raw(state.keeper.cast_signed());
    kill(keeper, Signal::SIGTERM).with_context(|| format!("end process {keeper}"))?;
    let deadline = Instant::now() + PATIENCE;
    while state.is_left() {
        if Instant::now() > deadline {
            bail!("process {keeper} or control group {} is still there", state.group);
        }
        thread::sleep(Duration::from_millis(20));
    }
    state::forget()?;
    println!(
        "the node is gone, with its pods, networks and mounts; built programs stay in {}",
        tools().display()
    );
    Ok(())
}

fn status() -> Result<()> {
    let Some(state) = State::running()? else {
        println!("the node is not up; `cargo xtask node up` starts it");
        return Ok(());
    };
    for (name, pid) in &state.processes {
        let alive = if state::is_alive(*pid) { "runs" } else { "has ended" };
        println!("{name:28} {alive} (process {pid})");
    }
    println!();
    // What cannot be asked shows as that program's own message.
    for (program, arguments) in [
        ("kubectl", vec!["get", "nodes,pods", "-A", "-o", "wide"]),
        ("knictl", vec!["status"]),
    ] {
        println!("$ {program} {}", arguments.join(" "));
        drop(run(Command::new(state::folder().join(program)).args(arguments)));
        println!();
    }
    println!("{}", state::advice());
    Ok(())
}

/// The program `name` of the release build, as the node's owner needs it.
fn ours(name: &str) -> Result<PathBuf> {
    let path = release_program(name);
    if !path.is_file() {
        bail!("{} is missing", path.display());
    }
    Ok(path)
}
