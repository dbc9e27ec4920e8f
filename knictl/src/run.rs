//! Runs one command line from its arguments to its exit code.

use std::{ffi::OsString, future::Future, io::ErrorKind};

use clap::Parser as _;

use crate::{
    cli::{Cli, Command},
    client,
    commands::{Outcome, doctor, drops, explain, flows, interfaces, maps, networks, policy, services, status},
    error::Error,
    kube,
    terminal::Terminal,
};

/// The command succeeded.
const SUCCESS: u8 = 0;
/// The command failed, `status` found the agent not ready, or `doctor` found something that does not work.
const FAILURE: u8 = 1;
/// The command line is not valid.
const USAGE: u8 = 2;

/// Runs the command line `args` (the first is the program's name) and returns its exit code. `stop` ends commands that
/// would otherwise never end; others never poll it. A reader that closes the output early is not an error.
pub(crate) async fn run<A>(args: A, terminal: &mut Terminal<'_>, stop: impl Future<Output = ()>) -> u8
where
    A: IntoIterator<Item = OsString>,
{
    let args: Vec<OsString> = args.into_iter().collect();
    let outcome = match kube::asked_for(&args) {
        Some(words) => match kube::Cli::try_parse_from(words) {
            Ok(cli) => kube::run(cli, terminal, stop).await,
            Err(error) => return usage(&error, terminal),
        },
        None => match Cli::try_parse_from(args) {
            Ok(cli) => dispatch(cli, terminal, stop).await,
            Err(error) => return usage(&error, terminal),
        },
    };
    match outcome {
        Ok(Outcome::Done) => SUCCESS,
        Ok(Outcome::NotReady) => FAILURE,
        Ok(Outcome::Ended(code)) => code,
        Err(Error::Usage(error)) => usage(&error, terminal),
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => SUCCESS,
        Err(error) => {
            terminal.note(&format!("knictl: {error}"));
            FAILURE
        }
    }
}

async fn dispatch(cli: Cli, terminal: &mut Terminal<'_>, stop: impl Future<Output = ()>) -> Result<Outcome, Error> {
    let mut agent = client::connect(&cli.socket).await?;
    match cli.command {
        Command::Status(args) => status::run(&args, &mut agent, terminal).await,
        Command::Doctor(args) => doctor::run(&args, &mut agent, terminal).await,
        Command::Networks(args) => networks::run(&args, &mut agent, terminal).await,
        Command::Interfaces(args) => interfaces::run(args, &mut agent, terminal).await,
        Command::Drops(args) if args.follow => drops::follow(&args, &mut agent, terminal, stop).await,
        Command::Drops(args) => drops::run(&args, &mut agent, terminal).await,
        Command::Flows(args) if args.follow => flows::follow(args, &mut agent, terminal, stop).await,
        Command::Flows(args) => flows::run(args, &mut agent, terminal).await,
        Command::Explain(args) => explain::run(args, &mut agent, terminal).await,
        Command::Policy(args) => policy::run(args, &mut agent, terminal).await,
        Command::Services(args) => services::run(&args, &mut agent, terminal).await,
        Command::Maps(args) => maps::run(&args, &mut agent, terminal).await,
    }
}

/// Prints clap's message: help and version are output, everything else is a usage error.
fn usage(error: &clap::Error, terminal: &mut Terminal<'_>) -> u8 {
    let text = error.render().to_string();
    if error.use_stderr() {
        text.lines().for_each(|line| terminal.note(line));
        return USAGE;
    }
    match terminal.text(&text) {
        Err(Error::Output(error)) if error.kind() != ErrorKind::BrokenPipe => FAILURE,
        _ => SUCCESS,
    }
}
