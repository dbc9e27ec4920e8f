//! `demo`: prepares the machine, builds the programs and executes the program `kni-demo`.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    announce::announce,
    goal::{Build, Goal},
    node, place, prepare,
    programs::Profile,
    progress::{Progress, say},
    workspace::{is_root, target},
};

/// Arguments of `demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave the node running and print what to try
    #[arg(long)]
    keep: bool,
}

/// What becomes of the part with two nodes.
enum Nodes {
    /// It is shown.
    Shown,
    /// It is left out, which is no failure, for this reason.
    LeftOut(String),
    /// Its programs could not be built, for this reason.
    Failed(String),
}

/// Runs the command; returns only when the demonstration could not be started.
pub(crate) fn command(args: &Args) -> Result<()> {
    if !is_root() {
        bail!("this makes network namespaces and loads eBPF programs, which needs root");
    }
    // The profile of the tests and of `node`, so that one build serves all commands.
    let profile = Profile::Dev;
    let nodes = build(args, profile)?;
    let program = |name| profile.program(name);
    let mut demo = Command::new(program("kni-demo"));
    demo.arg("--agent").arg(program("kni-agent"));
    demo.arg("--knictl").arg(program("knictl"));
    if args.keep {
        demo.arg("--keep");
    }
    match nodes {
        Nodes::Shown => demo.arg("--nodes"),
        Nodes::LeftOut(reason) => demo.args(["--leave-out-nodes", &reason]),
        Nodes::Failed(reason) => demo.args(["--failed-nodes", &reason]),
    };
    // Replaces this process, so that signals and the exit code are those of the demonstration.
    Err(demo.exec()).with_context(|| format!("cannot run {}", program("kni-demo").display()))
}

/// Builds what is shown. A failure of what only the part with two nodes needs does not prevent the other part.
fn build(args: &Args, profile: Profile) -> Result<Nodes> {
    let left_out = left_out(args.keep);
    let mut builds = vec![Build::Ebpf, Build::Programs];
    let mut steps = prepare::STEPS;
    if let Some(reason) = &left_out {
        say(&format!("The part with two nodes is left out: {reason}."));
    } else {
        builds.push(Build::NodePrograms);
        steps += 1;
    }
    announce(&builds);
    let mut progress = Progress::new(steps);
    prepare::build(Goal::Demo, profile, &["kni-demo", "kni-controller"], &mut progress)?;
    if let Some(reason) = left_out {
        return Ok(Nodes::LeftOut(reason));
    }
    // The API server of the part with two nodes.
    Ok(match node::build_programs(&mut progress, &[]) {
        Ok(()) => Nodes::Shown,
        Err(error) => Nodes::Failed(format!("{error:#}")),
    })
}

/// The reason for which the part with two nodes cannot be shown, if any.
fn left_out(keep: bool) -> Option<String> {
    if keep {
        return Some("--keep leaves the first part running".to_owned());
    }
    if !has_go() {
        return Some(
            "its API server is built with Go, which is not installed; install Go 1.26 (https://go.dev/dl) and start again"
                .to_owned(),
        );
    }
    place::usable(&target()).err().map(|error| error.to_string())
}

/// Which version is needed is checked by what builds with it.
fn has_go() -> bool {
    Command::new("go")
        .arg("version")
        .output()
        .is_ok_and(|out| out.status.success())
}
