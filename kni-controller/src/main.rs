//! Runs kni-controller: the part of the network that concerns no single node. Of several replicas one acts, the holder
//! of a Lease; agents attach pods whether or not one runs.

mod cli;
mod controllers;
mod election;
mod endpoint;
mod events;
mod fence;
mod health;
mod metrics;
mod readiness;
mod run;

use std::{io::IsTerminal as _, process::ExitCode};

use anyhow::Result;
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::cli::Args;

fn main() -> ExitCode {
    match start(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> Result<()> {
    let filter = EnvFilter::try_new(&args.log)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    // The election must not wait for a controller that computes, even on a node with one core.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(run::THREADS)
        .enable_all()
        .build()?;
    runtime.block_on(run::serve(args))
}
