//! Entry point of `kni-node`: builds the programs of a node, starts one and ends it. `cargo xtask node` calls it.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool reports on its standard output")]

mod keep;
mod state;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use kni_local_node::{Programs, StaticPrograms};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use state::State;

/// How long the node may take to end.
const PATIENCE: Duration = Duration::from_mins(1);
/// Lines of a log that an error quotes.
const QUOTED_LINES: usize = 25;

/// Runs one real Kubernetes node with KNI as its network.
#[derive(Parser)]
#[command(name = "kni-node")]
struct Cli {
    #[command(flatten)]
    folders: Folders,
    #[command(subcommand)]
    action: Action,
}

/// Absolute folders that all commands share.
#[derive(clap::Args)]
struct Folders {
    /// Folder of everything about the running node: kubeconfig, manifests, logs, shortcuts
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Folder of the programs of a node, which are built once
    #[arg(long, value_name = "DIR")]
    tools: PathBuf,
    /// Folder of our own programs: kni-agent, kni-cni, kni-controller, knictl
    #[arg(long, value_name = "DIR")]
    programs: PathBuf,
}

#[derive(Subcommand)]
enum Action {
    /// Build the programs of a node that are missing
    Build {
        /// Also build Helm, which the tests of the chart use
        #[arg(long)]
        helm: bool,
    },
    /// Start the node
    Up {
        /// Give the agent a folder of manifests in place of the API server
        #[arg(long)]
        standalone: bool,
    },
    /// End the node and everything in it
    Down,
    /// Show the processes of the node
    Status,
    /// The process that owns the node and that `up` leaves running
    #[command(hide = true)]
    Keep {
        /// See `up`
        #[arg(long)]
        standalone: bool,
    },
}

impl Folders {
    /// The program `name` of ours.
    fn ours(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs.join(name);
        if !path.is_file() {
            bail!("{} is missing", path.display());
        }
        Ok(path)
    }

    /// Builds the programs of a node that are missing, and passes lines about the progress to `report`.
    fn build(&self, report: &mut dyn FnMut(&str)) -> Result<(Programs, StaticPrograms)> {
        let programs = Programs::build(&self.tools, report)?;
        let statics = StaticPrograms::build(&self.tools.join("static"))?;
        Ok((programs, statics))
    }

    /// [`Self::build`] with its progress on standard output, and Helm.
    fn build_all(&self, helm: bool) -> Result<()> {
        let mut report = |line: &str| println!("    {line}");
        self.build(&mut report)?;
        if helm {
            Programs::build_helm(&self.tools, &mut report)?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let folders = &cli.folders;
    let result = match cli.action {
        Action::Build { helm } => folders.build_all(helm),
        Action::Up { standalone } => up(folders, standalone),
        Action::Down => down(folders),
        Action::Status => status(folders),
        Action::Keep { standalone } => keep::command(folders, standalone),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // On standard output like all other output: a log that captures one stream still ends with the reason.
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn up(folders: &Folders, standalone: bool) -> Result<()> {
    let folder = &folders.folder;
    if let Some(state) = State::running(folder)? {
        println!("the node is already up");
        println!("{}", state::advice(folder, state.standalone));
        return Ok(());
    }
    folders.build(&mut |line| println!("    {line}"))?;
    start(folders, standalone)?;
    State::running(folder)?.context("the node has ended")?;
    println!("\n{}", state::advice(folder, standalone));
    Ok(())
}

/// Starts the process that owns the node, and waits until the node is ready.
fn start(folders: &Folders, standalone: bool) -> Result<()> {
    let folder = &folders.folder;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let log = folder.join("keep.log");
    let errors = fs::File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let own = std::env::current_exe().context("path of this program")?;
    let mut keeper = Command::new(own)
        .arg("--folder")
        .arg(folder)
        .arg("--tools")
        .arg(&folders.tools)
        .arg("--programs")
        .arg(&folders.programs)
        .arg("keep")
        .args(standalone.then_some("--standalone"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        // Outside the job of the terminal: it outlives this process.
        .process_group(0)
        .spawn()
        .context("start the node's owner")?;
    let stdout = keeper.stdout.take().context("no stdout")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("output of the node's owner")?;
        if line == keep::READY {
            return Ok(());
        }
        println!("    {line}");
    }
    let status = keeper.wait().context("wait for the node's owner")?;
    bail!("the node does not start ({status}):\n{}", tail(&log))
}

fn down(folders: &Folders) -> Result<()> {
    let Some(state) = State::running(&folders.folder)? else {
        state::remove(&folders.folder)?;
        println!("the node is not up");
        return Ok(());
    };
    let keeper = Pid::from_raw(state.keeper.cast_signed());
    kill(keeper, Signal::SIGTERM).with_context(|| format!("end process {keeper}"))?;
    let deadline = Instant::now() + PATIENCE;
    while state.is_left() {
        if Instant::now() > deadline {
            bail!("process {keeper} or control group {} still exists", state.group);
        }
        thread::sleep(Duration::from_millis(20));
    }
    state::remove(&folders.folder)?;
    println!(
        "the node is removed with its pods, networks and mounts; built programs stay in {}",
        folders.tools.display()
    );
    Ok(())
}

fn status(folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let Some(state) = State::running(folder)? else {
        println!("the node is not up; `cargo xtask node up` starts it");
        return Ok(());
    };
    for (name, pid) in &state.processes {
        let alive = if state::is_alive(*pid) { "runs" } else { "ended" };
        println!("{name:28} {alive} (process {pid})");
    }
    println!();
    for (program, arguments) in [
        ("kubectl", vec!["get", "nodes,pods", "-A", "-o", "wide"]),
        ("knictl", vec!["status"]),
    ] {
        println!("$ {program} {}", arguments.join(" "));
        // On failure that program prints its own message.
        drop(Command::new(folder.join(program)).args(arguments).status());
        println!();
    }
    println!("{}", state::advice(folder, state.standalone));
    Ok(())
}

/// The last lines of a text file, or the error of reading it.
fn tail(log: &Path) -> String {
    match fs::read(log) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            let skipped = lines.len().saturating_sub(QUOTED_LINES);
            lines.into_iter().skip(skipped).collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("(unreadable: {error})"),
    }
}
