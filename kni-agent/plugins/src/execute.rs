//! Runs one plugin once: its environment and input, limits of time and output, its result.

use std::{
    io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout_at,
};

use super::{
    CniError, RunError,
    cache::{Entry, Lock},
    configuration::{Configuration, Plugin},
};

/// Limit of a plugin's output, in bytes.
const MAX_OUTPUT: u64 = 1 << 20;
/// Limit of its error stream, in bytes.
const MAX_STDERR: u64 = 16 << 10;
/// Characters of the error stream in an error message.
const QUOTED: usize = 512;
/// `PATH` of the programs that plugins run.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Retries of a program that cannot be executed while it is being replaced.
const BUSY_TRIES: u32 = 40;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// A CNI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Check,
    Del,
}

impl Verb {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
        }
    }
}

/// One run of one plugin.
#[derive(Debug)]
pub(super) struct Invocation<'a> {
    entry: &'a Entry,
    plugin: &'a Plugin,
    verb: Verb,
    netns: Option<&'a Path>,
}

/// The error object of the specification.
#[derive(Deserialize)]
struct ErrorObject {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// The status and output of a process.
struct Finished {
    status: ExitStatus,
    output: Vec<u8>,
    stderr: Vec<u8>,
}

/// The program of a plugin, in the first folder that has it.
pub(super) fn locate(bin_dirs: &[PathBuf], configuration: &Configuration, kind: &str) -> Result<PathBuf, CniError> {
    let found = bin_dirs.iter().map(|dir| dir.join(kind)).find(|path| path.is_file());
    found.ok_or_else(|| CniError::NoPlugin {
        configuration: configuration.name().to_owned(),
        plugin: kind.to_owned(),
        dirs: bin_dirs
            .iter()
            .map(|dir| dir.display().to_string())
            .collect::<Vec<_>>()
            .join(", "),
    })
}

impl<'a> Invocation<'a> {
    pub(super) fn new(entry: &'a Entry, plugin: &'a Plugin, verb: Verb, netns: Option<&'a Path>) -> Self {
        Self {
            entry,
            plugin,
            verb,
            netns,
        }
    }

    /// Runs the plugin with the result of the previous one, until `deadline`. Returns its result, null for none.
    pub(super) async fn run(&self, previous: &Value, lock: &Lock, deadline: Instant) -> Result<Value, CniError> {
        let configuration = self.entry.configuration()?;
        let program = locate(&self.entry.bin_dirs, &configuration, self.plugin.kind())?;
        let input = self.input(&configuration, previous);
        let finished = self
            .execute(&program, input.as_bytes(), lock, deadline)
            .await
            .map_err(|error| self.failed(&configuration, error))?;
        if !finished.status.success() {
            return Err(self.refused(&configuration, &finished));
        }
        if finished.output.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&finished.output).map_err(|error| self.failed(&configuration, RunError::NotJson(error)))
    }

    /// The plugin's part of the configuration with the fields that libcni adds.
    fn input(&self, configuration: &Configuration, previous: &Value) -> String {
        let mut fields = self.plugin.fields().clone();
        fields.insert("name".to_owned(), configuration.name().into());
        fields.insert("cniVersion".to_owned(), configuration.version().into());
        let declared: Map<String, Value> = self
            .entry
            .capabilities
            .iter()
            .filter(|(capability, _)| self.plugin.declares(capability))
            .map(|(capability, value)| (capability.clone(), value.clone()))
            .collect();
        if !declared.is_empty() {
            fields.insert("runtimeConfig".to_owned(), Value::Object(declared));
        }
        if !previous.is_null() {
            fields.insert("prevResult".to_owned(), previous.clone());
        }
        Value::Object(fields).to_string()
    }

    fn command(&self, program: &Path) -> Command {
        let Entry {
            bin_dirs,
            container,
            ifname,
            arguments,
            ..
        } = self.entry;
        let netns = self.netns.map(|path| path.display().to_string()).unwrap_or_default();
        let dirs: Vec<String> = bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", PATH)
            .env("CNI_COMMAND", self.verb.as_str())
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", ifname)
            .env("CNI_ARGS", arguments)
            .env("CNI_PATH", dirs.join(":"))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A separate process group, so that its children can be killed with it.
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    async fn execute(
        &self,
        program: &Path,
        input: &[u8],
        lock: &Lock,
        deadline: Instant,
    ) -> Result<Finished, RunError> {
        let mut child = self.spawn(program, lock).await.map_err(|source| RunError::Execute {
            program: program.to_owned(),
            source,
        })?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let finished = timeout_at(deadline.into(), exchange(&mut child, input)).await;
        let failure = match finished {
            Ok(Ok(finished)) => return Ok(finished),
            Ok(Err(error)) => error,
            Err(_elapsed) => RunError::TimedOut,
        };
        if let Some(group) = group
            && let Err(errno) = killpg(group, Signal::SIGKILL)
        {
            tracing::debug!(%errno, plugin = self.plugin.kind(), "cannot kill the plugin's processes");
        }
        if let Err(error) = child.wait().await {
            tracing::debug!(%error, plugin = self.plugin.kind(), "cannot wait for the plugin's end");
        }
        Err(failure)
    }

    async fn spawn(&self, program: &Path, lock: &Lock) -> io::Result<Child> {
        for _try in 1..BUSY_TRIES {
            match lock.inherited(|| self.command(program).spawn()) {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => tokio::time::sleep(BUSY_PAUSE).await,
                spawned => return spawned,
            }
        }
        lock.inherited(|| self.command(program).spawn())
    }

    fn failed(&self, configuration: &Configuration, source: RunError) -> CniError {
        CniError::Failed {
            configuration: configuration.name().to_owned(),
            plugin: self.plugin.kind().to_owned(),
            verb: self.verb.as_str(),
            source,
        }
    }

    fn refused(&self, configuration: &Configuration, finished: &Finished) -> CniError {
        let object = serde_json::from_slice::<ErrorObject>(&finished.output).ok();
        let (code, message) = match object {
            Some(ErrorObject { code, msg, details }) if details.is_empty() => (code, msg),
            Some(ErrorObject { code, msg, details }) => (code, format!("{msg}: {details}")),
            None => {
                let text = if finished.stderr.trim_ascii().is_empty() {
                    &finished.output
                } else {
                    &finished.stderr
                };
                let text: String = String::from_utf8_lossy(text).trim().chars().take(QUOTED).collect();
                (0, format!("{}: {text}", finished.status))
            }
        };
        CniError::Refused {
            configuration: configuration.name().to_owned(),
            plugin: self.plugin.kind().to_owned(),
            verb: self.verb.as_str(),
            code,
            message,
        }
    }
}

/// Writes and reads concurrently: a plugin may answer before it has read everything.
async fn exchange(child: &mut Child, input: &[u8]) -> Result<Finished, RunError> {
    let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut stdin), Some(stdout), Some(stderr)) = streams else {
        return Err(RunError::NoStreams);
    };
    let write = async move {
        // A plugin need not read its input.
        stdin.write_all(input).await.ok();
        drop(stdin);
        Ok(())
    };
    let read_stderr = async {
        let stderr = read(stderr, MAX_STDERR).await;
        Ok(stderr.unwrap_or_default())
    };
    let ((), output, stderr) = tokio::try_join!(write, answer(stdout), read_stderr)?;
    let status = child.wait().await.map_err(RunError::Wait)?;
    Ok(Finished { status, output, stderr })
}

async fn answer(stdout: impl AsyncRead + Unpin) -> Result<Vec<u8>, RunError> {
    let output = read(stdout, MAX_OUTPUT).await;
    let output = output.map_err(RunError::Read)?;
    if output.len() as u64 > MAX_OUTPUT {
        return Err(RunError::TooMuchOutput(MAX_OUTPUT));
    }
    Ok(output)
}

/// Reads one byte more than allowed, so that the caller can detect more; the rest is discarded with the stream.
async fn read(stream: impl AsyncRead + Unpin, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(most + 1).read_to_end(&mut bytes).await?;
    Ok(bytes)
}
