//! Tests whole command lines against a fake agent.

mod answers;
mod documents;
mod failures;
mod flows;
mod follow;
mod tables;

use std::{ffi::OsString, future::pending, path::Path};

use crate::{fake::Agent, run, terminal::Terminal};

/// The result of a command line.
#[derive(Debug, PartialEq, Eq)]
struct Ran {
    code: u8,
    out: String,
    err: String,
}

/// Runs `knictl ARGS --socket SOCKET`.
async fn knictl_on(socket: &Path, args: &[&str], stop: impl Future<Output = ()>) -> Ran {
    let mut line: Vec<OsString> = vec!["knictl".into()];
    line.extend(args.iter().map(OsString::from));
    line.extend(["--socket".into(), socket.into()]);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = run::run(line, &mut Terminal::new(&mut out, &mut err), stop).await;
    Ran {
        code,
        out: String::from_utf8(out).unwrap(),
        err: String::from_utf8(err).unwrap(),
    }
}

/// Runs `knictl ARGS` against `agent` until it ends by itself.
async fn knictl(agent: &Agent, args: &[&str]) -> Ran {
    knictl_on(&agent.socket(), args, pending()).await
}
