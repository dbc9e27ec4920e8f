//! Demonstrates the agent on this machine: isolated networks with equal addresses, and a complete cleanup.

mod nodes;
mod options;
mod outcome;
mod progress;
mod show;
mod spoof;
mod stage;

use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Parser as _;
use nix::unistd::geteuid;
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};

use crate::{options::Args, outcome::Outcome, stage::Stage};

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nkni-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        geteuid().is_root(),
        "must run as root: it makes namespaces and loads eBPF programs"
    );
    let runtime = Runtime::new()?;
    // Before any change: from here on an interrupt ends the demo, which then removes its changes.
    let mut interrupted = runtime.block_on(async { signals() })?;
    let mut stage = Stage::prepare(&args.agent, &args.knictl)?;
    let shown = stage.start_agent().and_then(|()| {
        runtime.block_on(async {
            tokio::select! {
                shown = show::show(&stage, args.keep) => shown,
                () = interrupted.wait() => bail!("interrupted"),
            }
        })
    });
    match shown {
        Ok(pods) if args.keep => {
            stage.leave(&pods);
            return Ok(());
        }
        Ok(_) => {}
        Err(ref error) => {
            progress::part("FAILED");
            progress::print_line(format!("{error:#}"));
            stage.print_log();
        }
    }
    // Both results count: the demo and the cleanup.
    let removed = stage.remove();
    let first = Outcome::of(shown.and(removed));
    let second = if first.is_failure() {
        Outcome::LeftOut("the first part failed".to_owned())
    } else if args.nodes {
        runtime.block_on(async {
            tokio::select! {
                shown = nodes::show() => Outcome::of(shown),
                () = interrupted.wait() => Outcome::Failed("interrupted".to_owned()),
            }
        })
    } else if let Some(reason) = &args.failed_nodes {
        Outcome::Failed(reason.clone())
    } else {
        let reason = args.leave_out_nodes.as_deref();
        Outcome::LeftOut(reason.unwrap_or("--nodes was not given").to_owned())
    };
    conclude(&[
        ("one node with two networks", first),
        ("two nodes of a cluster", second),
    ])
}

/// Prints the result of each part; fails, with the names of those that failed, if there are any.
fn conclude(parts: &[(&str, Outcome)]) -> Result<()> {
    progress::part("Results");
    for (name, outcome) in parts {
        progress::print_line(format!("{name}: {outcome}"));
    }
    let failed: Vec<&str> = parts
        .iter()
        .filter(|(_, outcome)| outcome.is_failure())
        .map(|(name, _)| *name)
        .collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

struct Signals([tokio::signal::unix::Signal; 2]);

fn signals() -> Result<Signals> {
    Ok(Signals([
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    ]))
}

impl Signals {
    async fn wait(&mut self) {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}
