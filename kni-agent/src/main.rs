//! The kni-agent binary: arguments, privileges, runtime, exit code.

use std::process::ExitCode;

use clap::Parser as _;
use kni_agent::{
    agent,
    cli::{Cli, Command},
    privileges, telemetry,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let log = match &cli.command {
        Some(Command::Cleanup(paths)) => &paths.log,
        None => &cli.serve.paths.log,
    };
    match telemetry::init(log)
        .map_err(anyhow::Error::from)
        .and_then(|()| run(cli))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    // Before the runtime's threads start: capabilities belong to threads.
    if nix::unistd::geteuid().is_root() {
        privileges::drop_unneeded()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Some(Command::Cleanup(paths)) => agent::clean_up(&paths).await,
            None => agent::serve(cli.serve).await,
        }
    })
}
