//! `fresh`: runs a command on a machine with nothing, a new Debian root, to show which packages it does not install.

mod archive;
mod root;

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use self::root::Content;
use crate::{
    command::{find, run, run_logged},
    progress::Progress,
    workspace::{is_root, target},
};

/// Arguments of `fresh`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Give the root Go as well, with its caches
    #[arg(long)]
    go: bool,
    /// Use this checkout with what cargo has compiled, instead of a clone of its last commit
    #[arg(long)]
    built: bool,
    /// The command [default: cargo xtask demo]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
    /// Assemble the root from this archive; only in namespaces of its own
    #[arg(long, hide = true, value_name = "ARCHIVE")]
    inside: Option<PathBuf>,
}

/// The command without one of the user.
const DEFAULT: [&str; 3] = ["cargo", "xtask", "demo"];
/// What the gate runs, in one root: the demonstration, and a node with the programs that it has built.
const GATE: &str = "cargo xtask demo && cargo xtask node up && cargo xtask node down";
/// As the first process of the namespaces, a shell also waits for processes whose parents have ended.
const FIRST_PROCESS: &str = "\"$@\"; exit $?";

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let content = Content {
        go: args.go,
        built: args.built,
    };
    let mut command = args.command.clone();
    if command.is_empty() {
        command = DEFAULT.map(OsString::from).into();
    }
    if let Some(archive) = &args.inside {
        return root::run_in(archive, &content, &command);
    }
    check_machine()?;
    let archive = Progress::new(1).step("archive of a Debian root", || archive::provide(&logs()))?;
    run(&mut isolated(&archive.path, &content, &command)?)
}

/// Shows that the first commands of a newcomer work on a machine with nothing, as one step of `progress`. The programs
/// are those that cargo has compiled, the Kubernetes programs are linked again from Go's cache.
pub(crate) fn gate(progress: &mut Progress) -> Result<()> {
    progress.step("machine with nothing", || {
        check_machine()?;
        let archive = archive::provide(&logs())?;
        let content = Content { go: true, built: true };
        let command = ["sh", "-c", GATE].map(OsString::from);
        let log = logs().join("gate.log");
        if log.exists() {
            fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))?;
        }
        run_logged(&mut isolated(&archive.path, &content, &command)?, &log)
            .context("`cargo xtask demo`, `node up` or `node down` fails on a machine with nothing")
    })
}

fn logs() -> PathBuf {
    target().join("fresh")
}

fn check_machine() -> Result<()> {
    if !is_root() {
        bail!("`fresh` makes namespaces and mounts, which needs root");
    }
    for program in ["setpriv", "unshare", "pivot_root", "mount", "tar"] {
        if find(program).is_none() {
            bail!("`fresh` needs the program {program}, which is not in PATH");
        }
    }
    Ok(())
}

/// This program in namespaces for mounts and processes, which assembles the root there and runs `command`. When it or
/// this process ends, for any reason, the kernel ends every process of the namespaces, and the root is gone.
fn isolated(archive: &Path, content: &Content, command: &[OsString]) -> Result<Command> {
    let own = env::current_exe().context("path of this program")?;
    let mut isolated = Command::new("setpriv");
    isolated
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"])
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["sh", "-c", FIRST_PROCESS, "sh"])
        .arg(own)
        .args(["fresh", "--inside"])
        .arg(archive);
    if content.go {
        isolated.arg("--go");
    }
    if content.built {
        isolated.arg("--built");
    }
    isolated.arg("--").args(command);
    Ok(isolated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_reaches_the_root_as_it_was_given() {
        let content = Content { go: true, built: false };
        let command = ["cargo", "xtask", "node", "up", "--kni"].map(OsString::from);
        let isolated = isolated(Path::new("/cache/a.tar"), &content, &command).unwrap();
        let words: Vec<_> = isolated.get_args().map(|word| word.to_string_lossy()).collect();
        let (options, after) = words.split_at(words.iter().rposition(|word| word == "--").unwrap());
        assert_eq!(after[1..], ["cargo", "xtask", "node", "up", "--kni"]);
        assert!(options.ends_with(&["fresh".into(), "--inside".into(), "/cache/a.tar".into(), "--go".into()]));
    }

    #[test]
    fn the_gate_ends_with_the_first_failure() {
        assert_eq!(GATE.matches(" && ").count(), 2);
        assert!(!GATE.contains([';', '|']));
    }
}
