//! Removes the processes and control groups of a node after its owner has ended.
//!
//! `kni-janitor NAME` waits for the end of its standard input, a pipe whose other end only the owner holds.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A process that ends takes its mounts and its memory along, which takes time.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let name = env::args().nth(1).unwrap_or_default();
    if !name.starts_with("kni-node-") || name.contains('/') {
        return ExitCode::FAILURE;
    }
    // An error of reading is an end as well.
    drop(io::copy(&mut io::stdin(), &mut io::sink()));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let groups: Vec<PathBuf> = hierarchies().into_iter().map(|root| root.join(&name)).collect();
        let left: Vec<&PathBuf> = groups.iter().filter(|group| group.is_dir()).collect();
        if left.is_empty() {
            return ExitCode::SUCCESS;
        }
        for group in &left {
            kill_below(group);
        }
        for group in &left {
            remove_below(group);
        }
        if Instant::now() > deadline {
            return ExitCode::FAILURE;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The root of every mounted hierarchy of control groups, of both versions.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let of_cgroups = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (at, kind) = (words.next()?, words.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(at))
    };
    mounts.lines().filter_map(of_cgroups).collect()
}

fn kill_below(group: &Path) {
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for member in members.lines().filter_map(|line| line.parse().ok()) {
        // Zero would be a process of another namespace of processes, and "my own group" to kill.
        if member > 0 {
            // One that has just ended refuses it; the next round sees.
            kill(Pid::from_raw(member), Signal::SIGKILL).unwrap_or_default();
        }
    }
    for child in children(group) {
        kill_below(&child);
    }
}

fn remove_below(group: &Path) {
    for child in children(group) {
        remove_below(&child);
    }
    // Refused while a process in it is not gone yet; the next round removes it.
    drop(fs::remove_dir(group));
}

fn children(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}
