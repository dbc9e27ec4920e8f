//! Starts, checks and ends one process of a node.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{namespaces::shown, spawn::spawn_tied};

/// How long a part may take to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(20);
/// Lines of a log that an error quotes.
const QUOTED: usize = 20;

/// A running process and its log.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `command`, with both of its outputs appended to the file `log`.
    pub(crate) fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("open {}", log.display()))?;
        let errors = file.try_clone().context("share a log")?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let shown = shown(&command);
        Ok(Self {
            child: spawn_tied(command).with_context(|| format!("start {shown}"))?,
            log,
        })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails, with the end of its log, if the process has ended by itself.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "ended by itself ({status}); the end of {}:\n{}",
                self.log.display(),
                tail(&self.log)
            );
        }
        Ok(())
    }

    /// Terminates the process and waits for its end; kills it if that takes too long.
    pub(crate) fn stop(mut self) -> Result<()> {
        // Fails if the process has ended already.
        drop(kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).map_err(std::io::Error::from));
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.kill()
    }

    /// Kills the process and waits for its end.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop).context("wait for a killed process")
    }
}

/// The last lines of a log, or the error of reading it.
pub(crate) fn tail(log: &Path) -> String {
    match std::fs::read(log) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let skipped = text.lines().count().saturating_sub(QUOTED);
            text.lines().skip(skipped).collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("(unreadable: {error})"),
    }
}
