//! Runs replicas of kni-controller.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Stdio},
    thread,
};

use anyhow::{Context as _, Result};
use kni_local_node::spawn::spawn_tied;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{agent::controller_binary, namespaces::Namespaces};

/// The service account.
pub(super) const ACCOUNT: &str = "kni-controller";

/// A running replica. It is killed when the value is dropped.
#[derive(Debug)]
pub struct Controller {
    /// Its name in the Lease, before the random suffix.
    pub name: String,
    child: Child,
    /// Its kubeconfig and its log.
    folder: TempDir,
}

impl Controller {
    pub(super) fn start(ns: &Namespaces, name: &str, kubeconfig: &str, args: &[&str]) -> Result<Self> {
        let program = ns.install(&controller_binary()?)?;
        let folder = tempfile::Builder::new().prefix("kni-controller-").tempdir()?;
        // Inside, /tmp may be another folder.
        let inside = PathBuf::from(format!("/run/{name}.conf"));
        ns.enter(|| fs::write(&inside, kubeconfig))?
            .with_context(|| inside.display().to_string())?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = ns.command(&program);
        command.args(["--name", name, "--namespace", "kni-system"]);
        command.arg("--kubeconfig").arg(&inside).args(args);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = spawn_tied(command).with_context(|| format!("start {}", program.display()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            folder,
        })
    }

    /// Its output until now.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal; SIGSTOP makes it hang, SIGCONT continues it.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        kill(pid, signal).with_context(|| format!("{signal} to {}", self.name))
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // The signal fails for a process that has already exited.
        drop(self.child.kill());
        drop(self.child.wait());
        if thread::panicking() {
            eprintln!("--- log of {} ---\n{}\n---", self.name, self.log());
        }
    }
}
