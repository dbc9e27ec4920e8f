//! Starts and ends the process that owns the nodes, and shows what runs.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use kni_local_node::{StaticPrograms, cgroup};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    Folders, Start, advice, keep, shortcuts,
    state::{self, Kind, State},
};

/// How long everything may take to end.
const PATIENCE: Duration = Duration::from_mins(1);
/// Lines of a log that an error quotes.
const QUOTED_LINES: usize = 25;
/// Output of the owner that is no progress.
const OWNER_LOG: &str = "keep.log";
/// What the parts of nodes write.
const LOGS: &str = "logs";
/// Other folders and files of `up`, besides those of [`shortcuts`]. Manifests of a standalone agent are the user's.
const FILES: [&str; 4] = ["deploy", "networks", state::FILE, keep::LOCK];

/// Starts everything, or nothing.
pub(crate) fn up(folders: &Folders, start: &Start) -> Result<()> {
    let folder = &folders.folder;
    if let Some(state) = State::read(folder)? {
        if state.is_running() {
            ensure!(
                state.is_complete(),
                "process {} is still starting; `down` ends it",
                state.keeper
            );
            println!("already up");
            println!("{}", advice::text(folder, state.kind));
            return Ok(());
        }
        end(&state, folders)?;
    }
    folders.build(&mut |line| println!("    {line}"))?;
    if start.kni {
        folders.build_kni(&mut |line| println!("    {line}"))?;
    }
    let began = Instant::now();
    if let Err(error) = start_owner(folders, start) {
        if let Some(state) = State::read(folder)? {
            end(&state, folders).context(format!("{error:#}"))?;
            remove_files(folder)?;
        }
        return Err(error).context(format!("nothing stays up; logs are in {}", folder.join(LOGS).display()));
    }
    println!("    up in {:.0} s", began.elapsed().as_secs_f32());
    println!("\n{}", advice::text(folder, Kind::of(start)));
    Ok(())
}

/// Starts the process that owns the nodes, and waits until they are ready.
fn start_owner(folders: &Folders, start: &Start) -> Result<()> {
    let folder = &folders.folder;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let log = folder.join(OWNER_LOG);
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
        .args(start.options())
        // It ends when this process ends too early.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(errors)
        // Outside the job of the terminal: it outlives this process.
        .process_group(0)
        .spawn()
        .context("start the owner of the nodes")?;
    let stdout = keeper.stdout.take().context("no stdout")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("output of the owner of the nodes")?;
        if line == keep::READY {
            return Ok(());
        }
        println!("    {line}");
    }
    let status = keeper.wait().context("wait for the owner of the nodes")?;
    bail!("the nodes do not start ({status}):\n{}", tail(&log))
}

/// Ends everything, also what is left after a crash.
pub(crate) fn down(folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let state = State::read(folder)?;
    if let Some(state) = &state {
        end(state, folders)?;
    }
    remove_files(folder)?;
    for name in [OWNER_LOG, LOGS] {
        remove(&folder.join(name))?;
    }
    // Refused if there are manifests of the user.
    drop(fs::remove_dir(folder));
    match state {
        Some(_ended) => println!(
            "everything is removed: nodes, pods, networks and mounts; built programs stay in {}",
            folders.tools.display()
        ),
        None => println!("nothing is up"),
    }
    Ok(())
}

/// Ends the owner of the nodes, and waits until their processes and control groups are gone. Their namespaces, links
/// and mounts live as long as their processes.
fn end(state: &State, folders: &Folders) -> Result<()> {
    let keeper = Pid::from_raw(state.keeper.cast_signed());
    if state.is_running() {
        kill(keeper, Signal::SIGTERM).with_context(|| format!("end process {keeper}"))?;
    }
    let deadline = Instant::now() + PATIENCE;
    while state.is_running() {
        ensure!(Instant::now() < deadline, "process {keeper} still exists");
        thread::sleep(Duration::from_millis(20));
    }
    if state::is_alive(state.keeper) {
        // Another program has its number now, so that groups of that number are not ours.
        return Ok(());
    }
    let janitor = StaticPrograms::find(&folders.statics())?.janitor();
    // The janitors of the owner do the same, unless they were killed as well.
    let mut janitors = Vec::new();
    for group in cgroup::of_process(state.keeper)? {
        let mut command = Command::new(&janitor);
        command.arg(group).stdin(Stdio::null());
        let started = command.spawn();
        janitors.push(started.with_context(|| format!("start {}", janitor.display()))?);
    }
    for mut janitor in janitors {
        janitor.wait().context("wait for a janitor")?;
    }
    let left = cgroup::of_process(state.keeper)?;
    ensure!(left.is_empty(), "control groups {left:?} still exist");
    Ok(())
}

/// Removes every file of `up` but the logs.
fn remove_files(folder: &Path) -> Result<()> {
    let mut names = FILES.iter().chain(&shortcuts::FILES);
    names.try_for_each(|name| remove(&folder.join(name)))
}

fn remove(path: &Path) -> Result<()> {
    let Ok(kind) = path.symlink_metadata() else {
        return Ok(());
    };
    let removed = if kind.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.with_context(|| format!("remove {}", path.display()))
}

/// Shows processes, nodes and pods.
pub(crate) fn status(folders: &Folders) -> Result<()> {
    let folder = &folders.folder;
    let Some(state) = State::read(folder)?.filter(State::is_running) else {
        println!("nothing is up");
        return Ok(());
    };
    for (name, pid) in &state.processes {
        let alive = if state::is_alive(*pid) { "runs" } else { "ended" };
        println!("{name:40} {alive} (process {pid})");
    }
    println!();
    let own = match state.kind {
        Kind::Cluster => ("kubectl", vec!["kni", "status"]),
        Kind::Node | Kind::Standalone => ("knictl", vec!["status"]),
    };
    for (program, arguments) in [("kubectl", vec!["get", "nodes,pods", "-A", "-o", "wide"]), own] {
        println!("$ {program} {}", arguments.join(" "));
        // On failure that program prints its own message.
        drop(Command::new(folder.join(program)).args(arguments).status());
        println!();
    }
    println!("{}", advice::text(folder, state.kind));
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
