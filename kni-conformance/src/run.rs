//! Runs the selected cases one after another, each with a time limit and a cleanup.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::errno::Errno;
use tokio::{net::UnixStream, runtime::Builder, time::timeout};
use tonic::Code;

use crate::{
    cases::{Case, Level, cases},
    error::{Error, Failure},
    limits::{multiplied, scaled},
    report::{CaseResult, Outcome, Report},
    session::Session,
};

/// Limit of a case, which is longer than that of any call.
const CASE_LIMIT: Duration = Duration::from_mins(2);
/// Limit of the cleanup after a case.
const CLEAN_UP_LIMIT: Duration = Duration::from_mins(2);

/// What to run, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The server's socket.
    pub socket: PathBuf,
    /// The levels; empty for all.
    pub levels: Vec<Level>,
    /// The names of cases; empty for all.
    pub only: Vec<String>,
    /// Multiplies all time limits, from 1: for a machine that is busy with other work.
    pub limit_factor: f64,
}

impl Options {
    /// All cases, for the server at a socket.
    pub fn all(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            levels: Vec::new(),
            only: Vec::new(),
            limit_factor: 1.0,
        }
    }

    /// The cases that these options select.
    pub fn selected(&self) -> Result<Vec<&'static Case>, Error> {
        for name in &self.only {
            if !cases().any(|case| case.name == name) {
                return Err(Error::UnknownCase(name.clone()));
            }
        }
        let is_selected = |case: &&Case| {
            let level = self.levels.is_empty() || self.levels.contains(&case.level);
            level && (self.only.is_empty() || self.only.iter().any(|name| name == case.name))
        };
        let selected: Vec<_> = cases().filter(is_selected).collect();
        // A run without a case would be a success.
        if selected.is_empty() {
            return Err(Error::NoCase);
        }
        Ok(selected)
    }
}

/// Runs the cases and passes each result to `report`. Everything happens in the network and mount namespaces of the
/// calling thread, which must not be in an asynchronous runtime.
pub fn run(options: &Options, mut report: impl FnMut(&CaseResult)) -> Result<Report, Error> {
    let selected = options.selected()?;
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::Machine {
        what: "start a runtime",
        source,
    })?;
    let factor = options.limit_factor.max(1.0);
    runtime.block_on(multiplied(factor, async {
        check_socket(&options.socket).await?;
        let mut results = Vec::new();
        for case in selected {
            let started = Instant::now();
            let outcome = run_case(case, &options.socket).await;
            let result = CaseResult {
                level: case.level,
                name: case.name,
                outcome,
                seconds: started.elapsed().as_secs_f64(),
            };
            report(&result);
            results.push(result);
        }
        Ok(Report { results })
    }))
}

async fn check_socket(socket: &Path) -> Result<(), Error> {
    let connect = timeout(scaled(Duration::from_secs(5)), UnixStream::connect(socket)).await;
    let result = connect.unwrap_or_else(|_elapsed| Err(Errno::ETIMEDOUT.into()));
    result.map(drop).map_err(|source| Error::Connect {
        socket: socket.to_owned(),
        source,
    })
}

async fn run_case(case: &Case, socket: &Path) -> Outcome {
    let session = match Session::open(socket).await {
        Ok(session) => session,
        Err(failure) => return to_outcome(case.level, &failure),
    };
    let checked = timeout(scaled(CASE_LIMIT), (case.check)(&session)).await;
    // What a case leaves must not affect the next one; a server that does not answer keeps it.
    timeout(scaled(CLEAN_UP_LIMIT), session.clean_up()).await.ok();
    match checked {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(failure)) => to_outcome(case.level, &failure),
        Err(_elapsed) => Outcome::Failed(format!("the case does not end within {:?}", scaled(CASE_LIMIT))),
    }
}

/// Methods and features of level core are not optional.
fn to_outcome(level: Level, failure: &Failure) -> Outcome {
    let is_absent = matches!(failure, Failure::NotOffered(_)) || failure.code() == Some(Code::Unimplemented);
    let reason = failure.to_string();
    if is_absent && level == Level::Extended {
        Outcome::NotOffered(reason)
    } else {
        Outcome::Failed(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_selected_by_level_and_name() {
        let mut options = Options::all("/absent");
        assert_eq!(options.selected().unwrap().len(), cases().count());
        options.levels = vec![Level::Core];
        assert!(options.selected().unwrap().iter().all(|case| case.level == Level::Core));
        options.only = vec!["delete".to_owned()];
        assert_eq!(options.selected().unwrap().len(), 1);
        options.levels = vec![Level::Extended];
        assert!(matches!(options.selected(), Err(Error::NoCase)));
        options.only = vec!["absent".to_owned()];
        assert!(matches!(options.selected(), Err(Error::UnknownCase(name)) if name == "absent"));
    }

    #[test]
    fn an_absent_server_is_an_error() {
        let result = run(&Options::all("/absent/kni.sock"), |_| {});
        assert!(matches!(result, Err(Error::Connect { .. })), "{result:?}");
    }

    #[test]
    fn only_extended_methods_are_optional() {
        let failure = || Failure::Call {
            method: "SetupNodeNetwork",
            code: Code::Unimplemented,
            message: String::new(),
        };
        assert!(matches!(
            to_outcome(Level::Extended, &failure()),
            Outcome::NotOffered(_)
        ));
        assert!(matches!(to_outcome(Level::Core, &failure()), Outcome::Failed(_)));
    }
}
