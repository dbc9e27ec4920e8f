//! Entry point of knictl: passes the process's arguments, streams and signals to the commands.

#![forbid(unsafe_code)]

mod cli;
mod client;
mod commands;
mod decision;
mod doctor;
mod document;
mod error;
mod escape;
mod event;
#[cfg(test)]
mod fake;
mod human;
mod interrupt;
mod kube;
mod packet;
mod run;
mod table;
mod terminal;
#[cfg(test)]
mod tests;

use std::{env, io, process::ExitCode};

use crate::terminal::Terminal;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut out = io::stdout().lock();
    let mut err = io::stderr().lock();
    let mut terminal = Terminal::new(&mut out, &mut err).on_screen(columns());
    ExitCode::from(run::run(env::args_os(), &mut terminal, interrupt::interrupted()).await)
}

/// The number of columns of the terminal to which standard output goes.
fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}
