//! Runs one plugin once: its environment and input, a bound on its time and on its output, its answer.

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
    CniError,
    cache::{Entry, Lock},
    configuration::{Configuration, Plugin},
};

/// Most that a plugin may answer, in bytes.
const MAX_OUTPUT: u64 = 1 << 20;
/// Most of its error stream that is kept, in bytes.
const MAX_COMPLAINT: u64 = 16 << 10;
/// How much of that is told.
const TOLD: usize = 512;
/// Where plugins find what they call themselves.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// A plugin that is being replaced cannot be executed for a moment.
const BUSY_TRIES: u32 = 40;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// What a plugin is asked to do.
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

/// An error as plugins tell it.
#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// What a process left.
struct Finished {
    status: ExitStatus,
    output: Vec<u8>,
    complaint: Vec<u8>,
}

/// The program of a plugin: the first of the folders that has one.
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

    /// Runs the plugin with what the one before it answered, until `deadline`. Returns its own answer, null for none.
    pub(super) async fn run(&self, previous: &Value, lock: &Lock, deadline: Instant) -> Result<Value, CniError> {
        let configuration = self.entry.configuration()?;
        let program = locate(&self.entry.bin_dirs, &configuration, self.plugin.kind())?;
        let input = self.input(&configuration, previous);
        let finished = self
            .execute(&program, input.as_bytes(), lock, deadline)
            .await
            .map_err(|reason| self.failed(&configuration, reason))?;
        if !finished.status.success() {
            return Err(self.refused(&configuration, &finished));
        }
        if finished.output.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&finished.output)
            .map_err(|error| self.failed(&configuration, format!("its answer is not JSON: {error}")))
    }

    /// The plugin's part of the configuration with what libcni adds to it.
    fn input(&self, configuration: &Configuration, previous: &Value) -> String {
        let mut fields = self.plugin.fields().clone();
        fields.insert("name".to_owned(), configuration.name().into());
        fields.insert("cniVersion".to_owned(), configuration.version().into());
        let wanted: Map<String, Value> = self
            .entry
            .capabilities
            .iter()
            .filter(|(capability, _)| self.plugin.wants(capability))
            .map(|(capability, value)| (capability.clone(), value.clone()))
            .collect();
        if !wanted.is_empty() {
            fields.insert("runtimeConfig".to_owned(), Value::Object(wanted));
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
            // A group of its own, so that whatever it starts ends with it.
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    async fn execute(&self, program: &Path, input: &[u8], lock: &Lock, deadline: Instant) -> Result<Finished, String> {
        let mut child = self
            .spawn(program, lock)
            .await
            .map_err(|error| format!("cannot execute {}: {error}", program.display()))?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let finished = timeout_at(deadline.into(), converse(&mut child, input)).await;
        let reason = match finished {
            Ok(Ok(finished)) => return Ok(finished),
            Ok(Err(reason)) => reason,
            Err(_elapsed) => "took too long and was killed".to_owned(),
        };
        if let Some(group) = group
            && let Err(errno) = killpg(group, Signal::SIGKILL)
        {
            tracing::debug!(%errno, plugin = self.plugin.kind(), "cannot kill the plugin's processes");
        }
        if let Err(error) = child.wait().await {
            tracing::debug!(%error, plugin = self.plugin.kind(), "cannot wait for the plugin's end");
        }
        Err(reason)
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

    fn failed(&self, configuration: &Configuration, reason: String) -> CniError {
        CniError::Failed {
            configuration: configuration.name().to_owned(),
            plugin: self.plugin.kind().to_owned(),
            verb: self.verb.as_str(),
            reason,
        }
    }

    fn refused(&self, configuration: &Configuration, finished: &Finished) -> CniError {
        let told = serde_json::from_slice::<Refusal>(&finished.output).ok();
        let (code, message) = match told {
            Some(Refusal { code, msg, details }) if details.is_empty() => (code, msg),
            Some(Refusal { code, msg, details }) => (code, format!("{msg}: {details}")),
            None => {
                let said = if finished.complaint.trim_ascii().is_empty() {
                    &finished.output
                } else {
                    &finished.complaint
                };
                let said: String = String::from_utf8_lossy(said).trim().chars().take(TOLD).collect();
                (0, format!("{}: {said}", finished.status))
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

/// Writes and reads at once: a plugin may answer before it has read everything.
async fn converse(child: &mut Child, input: &[u8]) -> Result<Finished, String> {
    let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut stdin), Some(stdout), Some(stderr)) = streams else {
        return Err("has no streams".to_owned());
    };
    let write = async move {
        // One that does not read its input has its reasons.
        stdin.write_all(input).await.ok();
        drop(stdin);
        Ok(())
    };
    let listen = async {
        let complaint = read(stderr, MAX_COMPLAINT).await;
        Ok(complaint.unwrap_or_default())
    };
    let ((), output, complaint) = tokio::try_join!(write, answer(stdout), listen)?;
    let status = child
        .wait()
        .await
        .map_err(|error| format!("cannot wait for its end: {error}"))?;
    Ok(Finished {
        status,
        output,
        complaint,
    })
}

async fn answer(stdout: impl AsyncRead + Unpin) -> Result<Vec<u8>, String> {
    let output = read(stdout, MAX_OUTPUT).await;
    let output = output.map_err(|error| format!("cannot read its answer: {error}"))?;
    if output.len() as u64 > MAX_OUTPUT {
        return Err(format!("answered more than {MAX_OUTPUT} bytes"));
    }
    Ok(output)
}

/// One byte more than may be, so that the length tells; what comes after that is closed in the writer's face.
async fn read(stream: impl AsyncRead + Unpin, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(most + 1).read_to_end(&mut bytes).await?;
    Ok(bytes)
}
