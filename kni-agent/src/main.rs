//! Runs kni-agent: arguments, privileges, runtime, exit code.

use std::{process::ExitCode, time::Duration};

use kni_agent::{
    agent, allocator,
    cli::{Cli, Command},
    cni_install, config_file, container, privileges, telemetry,
};

/// How long blocking work may delay the end of the process.
const SHUTDOWN: Duration = Duration::from_secs(5);
/// After this time without work a thread for blocking work ends. Tokio gives work to its idle threads in turn: with its
/// default of 10 s, the periodic work (some calls each second) would keep all threads of a burst.
const IDLE_THREAD: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    allocator::bound();
    let cli = match config_file::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // The terminal may be closed; then the message has no reader.
            error.print().ok();
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    let log = match &cli.command {
        Some(Command::Cleanup(paths)) => &paths.log,
        Some(Command::InstallCni(args) | Command::UninstallCni(args)) => &args.log,
        Some(Command::Uninstall(args)) => &args.log,
        Some(Command::Rest(args)) => &args.log,
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
    // With all of root's privileges: the folders may belong to another user.
    match &cli.command {
        Some(Command::InstallCni(args)) => return cni_install::install(args),
        Some(Command::UninstallCni(args)) => return cni_install::uninstall(args),
        Some(Command::Cleanup(_) | Command::Uninstall(_) | Command::Rest(_)) => {}
        None => cni_install::ensure(&cli.serve)?,
    }
    // Before the runtime's threads start: capabilities belong to threads.
    if nix::unistd::geteuid().is_root() {
        if cli.command.is_none() {
            container::check_bpffs()?;
            container::make_sysctls_writable()?;
        }
        // A cleanup runs the deletes of an earlier agent's plugins.
        privileges::drop_unneeded(cli.command.is_some() || cli.serve.plugins.cni_backend)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_keep_alive(IDLE_THREAD)
        .build()?;
    let done = runtime.block_on(async {
        match cli.command {
            Some(Command::Cleanup(paths)) => agent::clean_up(&paths).await,
            Some(Command::Uninstall(args)) => agent::uninstall(&args).await,
            Some(Command::Rest(_)) => agent::rest().await,
            // The other subcommands have returned.
            Some(Command::InstallCni(_) | Command::UninstallCni(_)) => Ok(()),
            None => Box::pin(agent::serve(cli.serve)).await,
        }
    });
    // Blocking work that hangs must not keep the process.
    runtime.shutdown_timeout(SHUTDOWN);
    done
}
