//! Records the programs that processes and their children execute, with strace.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{eventually_sync, wait::patience};

/// strace attached to processes, until it is dropped.
#[derive(Debug)]
pub struct Trace {
    strace: Child,
    file: tempfile::NamedTempFile,
}

impl Trace {
    /// Attaches to every thread of the processes; threads and children that they start later are traced, too.
    pub fn start(processes: &[u32]) -> Result<Self> {
        let file = tempfile::NamedTempFile::new()?;
        let mut command = Command::new("strace");
        command.args(["--follow-forks", "--trace=execve,execveat", "--seccomp-bpf"]);
        command.args(["--string-limit=256", "--output"]).arg(file.path());
        for process in processes {
            command.args(["--attach", &process.to_string()]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let strace = command.spawn().context("strace")?;
        let trace = Self { strace, file };
        eventually_sync(patience(), || {
            for process in processes {
                ensure!(traced(*process)?, "strace does not attach to process {process}");
            }
            Ok(())
        })?;
        Ok(trace)
    }

    /// The lines about executed programs: the process, and the call with its path.
    pub fn finish(mut self) -> Result<Vec<String>> {
        kill(Pid::from_raw(self.strace.id().cast_signed()), Signal::SIGINT)?;
        self.strace.wait()?;
        let text = fs::read_to_string(self.file.path())?;
        Ok(text
            .lines()
            .filter(|line| line.contains("exec"))
            .map(str::to_owned)
            .collect())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // The process may have exited already.
        drop(self.strace.kill());
        drop(self.strace.wait());
    }
}

/// Whether every thread of a process is traced.
fn traced(process: u32) -> Result<bool> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        if tracer.is_none_or(|tracer| tracer.trim() == "0") {
            return Ok(false);
        }
    }
    Ok(true)
}
