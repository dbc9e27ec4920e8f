//! Demonstrates the agent on this machine: isolated networks with equal addresses, and a complete cleanup.

mod nodes;
mod progress;
mod show;
mod spoof;
mod stage;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Result, bail, ensure};
use clap::Parser;
use nix::unistd::geteuid;
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};

use crate::stage::Stage;

/// What to run, and what to leave.
#[derive(Debug, Parser)]
#[command(name = "kni-demo", about)]
struct Args {
    /// The kni-agent binary.
    #[arg(long)]
    agent: PathBuf,
    /// The knictl binary.
    #[arg(long)]
    knictl: PathBuf,
    /// Show two nodes of a cluster as well, which needs the Kubernetes programs.
    #[arg(long)]
    nodes: bool,
    /// Leave the agent and the pods running, and print what to try.
    #[arg(long)]
    keep: bool,
}

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
    shown.and(removed)?;
    if args.nodes {
        runtime.block_on(async {
            tokio::select! {
                shown = nodes::show() => shown,
                () = interrupted.wait() => bail!("interrupted"),
            }
        })?;
    } else {
        progress::part(
            "Two nodes of a cluster are left out: their API server is built with Go, which is not installed",
        );
    }
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
