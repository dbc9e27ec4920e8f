//! Runs the real agent binary in given namespaces, and collects its log for failed tests.

use std::{
    env,
    io::{BufRead as _, BufReader, Read, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Condvar, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use kni_local_node::spawn::spawn_tied;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

pub use crate::manifest::MANIFESTS;
use crate::{manifest::Manifest, namespaces::Namespaces, wait::eventually_sync};

/// The default socket of the agent.
pub const SOCKET: &str = "/run/kni/kni.sock";
/// The socket that the KNI kubelet of 2024 uses.
pub const KUBELET_SOCKET: &str = "/tmp/kni.sock";

const READY: &str = "kni-agent: serving on";
/// Loading the programs takes seconds of CPU time, which a busy machine shares among several agents.
const READY_TIMEOUT: Duration = Duration::from_mins(1);
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
const PAGE_TIMEOUT: Duration = Duration::from_mins(1);

/// An address for `--metrics-address`.
pub const METRICS: &str = "127.0.0.1:9630";

/// How to run the agent.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// Written to [`MANIFESTS`] before each start.
    pub manifests: Vec<Manifest>,
    /// Additional arguments, for example `["--warm-sandboxes", "0"]`.
    pub args: Vec<String>,
    /// Additional environment variables.
    pub env: Vec<(String, String)>,
    /// The binary to use instead of [`agent_binary`].
    pub binary: Option<PathBuf>,
    /// Use the eBPF programs embedded in the binary, regardless of `KNI_EBPF_OBJECT`.
    pub embedded_programs: bool,
    /// The cluster of the agent. Without one it is standalone and reads the manifests.
    pub cluster: Option<Membership>,
}

/// The agent's place in its cluster.
#[derive(Debug, Clone)]
pub struct Membership {
    /// The path of its kubeconfig, inside the node.
    pub kubeconfig: PathBuf,
    /// Its node's name.
    pub node_name: String,
}

impl AgentOptions {
    /// An agent that reads `manifests`, with additional arguments.
    pub fn new(manifests: Vec<Manifest>, args: &[&str]) -> Self {
        Self {
            manifests,
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            ..Self::default()
        }
    }
}

impl Default for AgentOptions {
    /// [`Manifest::overlapping`] and no additional arguments.
    fn default() -> Self {
        Self {
            manifests: Manifest::overlapping(),
            args: Vec::new(),
            env: Vec::new(),
            binary: None,
            embedded_programs: false,
            cluster: None,
        }
    }
}

/// A running agent. Dropping it kills the process; its state in the node remains, as after a crash.
#[derive(Debug)]
pub struct Agent {
    ns: Namespaces,
    options: AgentOptions,
    program: PathBuf,
    child: Child,
    log: Log,
}

impl Agent {
    /// Starts the agent inside `ns` and waits until it is ready.
    pub fn start(ns: &Namespaces, options: AgentOptions) -> Result<Self> {
        let agent = Self::start_unready(ns, options)?;
        agent.wait_ready(READY_TIMEOUT)?;
        Ok(agent)
    }

    /// Starts the agent inside `ns` without waiting until it is ready.
    pub fn start_unready(ns: &Namespaces, options: AgentOptions) -> Result<Self> {
        let binary = options.binary.clone().map_or_else(agent_binary, Ok)?;
        let program = ns.install(&binary)?;
        let log = Log::default();
        let child = spawn(ns, &options, &program, &log)?;
        Ok(Self {
            ns: ns.clone(),
            options,
            program,
            child,
            log,
        })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the log line that reports readiness since the latest start.
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        let ready = self.log.wait_for(READY, timeout);
        ensure!(
            ready,
            "the agent does not serve after {timeout:?}; its log:\n{}",
            self.log()
        );
        Ok(())
    }

    /// The output of the agent on stdout and stderr since the first start.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Waits until a line of the log contains `text`.
    pub fn wait_for_log(&self, text: &str, timeout: Duration) -> bool {
        self.log.wait_for(text, timeout)
    }

    /// Kills the agent as a crash would. The process has exited when this returns.
    pub fn kill9(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Stops the process where it is, until [`Self::resume`].
    pub fn pause(&self) -> Result<()> {
        kill(self.nix_pid()?, Signal::SIGSTOP).context("SIGSTOP to the agent")
    }

    /// Continues after [`Self::pause`].
    pub fn resume(&self) -> Result<()> {
        kill(self.nix_pid()?, Signal::SIGCONT).context("SIGCONT to the agent")
    }

    /// Asks the agent to stop and waits for its exit.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        kill(self.nix_pid()?, Signal::SIGTERM).context("SIGTERM to the agent")?;
        self.wait_exit(STOP_TIMEOUT)
    }

    /// Waits until the agent exits by itself.
    pub fn wait_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                self.log.wait_for_end(deadline);
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        bail!("the agent still runs after {timeout:?}; its log:\n{}", self.log())
    }

    /// Whether its process is running.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Starts the agent again after [`Self::kill9`] or [`Self::terminate`], and waits until it is ready.
    pub fn restart(&mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_some(), "the agent still runs");
        self.log.reset_ready();
        self.child = spawn(&self.ns, &self.options, &self.program, &self.log)?;
        self.wait_ready(READY_TIMEOUT)
    }

    /// Starts the agent again after [`Self::kill9`], and kills it some time after a condition of the node holds.
    pub fn start_and_kill(&mut self, when: fn() -> bool, after: Duration) -> Result<()> {
        ensure!(self.child.try_wait()?.is_some(), "the agent still runs");
        self.child = spawn(&self.ns, &self.options, &self.program, &self.log)?;
        let deadline = Instant::now() + READY_TIMEOUT;
        let holds = self.ns.enter(|| {
            while !when() && Instant::now() < deadline {
                thread::sleep(Duration::from_micros(200));
            }
            when()
        })?;
        thread::sleep(after);
        self.kill9()?;
        ensure!(holds, "it never held; the agent's log:\n{}", self.log());
        Ok(())
    }

    /// Starts another program after [`Self::kill9`] or [`Self::terminate`], with the same options, and waits until it
    /// is ready.
    pub fn replace(&mut self, program: &Path) -> Result<()> {
        self.options.embedded_programs = false;
        self.program = self.ns.install(program)?;
        self.restart()
    }

    /// Runs `kni-agent cleanup` to completion; the agent must not be running.
    pub fn cleanup(&self) -> Result<Output> {
        cleanup(&self.ns, &self.program)
    }

    fn nix_pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id())?))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // An agent that has already exited refuses the signal; there is nothing to stop then.
        drop(self.child.kill());
        drop(self.child.wait());
        if thread::panicking() {
            eprintln!("--- log of the agent in {} ---\n{}\n---", self.ns.name(), self.log());
        }
    }
}

/// Runs `kni-agent cleanup` inside `ns`.
pub fn cleanup(ns: &Namespaces, program: &Path) -> Result<Output> {
    ns.command(program)
        .arg("cleanup")
        .output()
        .with_context(|| format!("{} cleanup", program.display()))
}

/// The page of metrics of the agent in `ns`, which serves it at this address. The address is opened independently of
/// the agent's sockets, possibly a moment later.
pub fn metrics(ns: &Namespaces, address: &str) -> Result<String> {
    ns.enter(|| {
        let mut stream = eventually_sync(PAGE_TIMEOUT, || Ok(TcpStream::connect(address)?))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    })?
}

/// The agent to test: `KNI_AGENT_BIN`, or the one beside the running test, built by cargo once per process.
pub fn agent_binary() -> Result<PathBuf> {
    built("kni-agent", "KNI_AGENT_BIN")
}

/// kni-controller: `KNI_CONTROLLER_BIN`, or the one beside the running test, built by cargo once per process.
pub fn controller_binary() -> Result<PathBuf> {
    built("kni-controller", "KNI_CONTROLLER_BIN")
}

/// The simulated nodes: `KNI_SIMULATED_NODES_BIN`, or the one beside the running test, built by cargo once per process.
pub fn simulated_nodes_binary() -> Result<PathBuf> {
    built("kni-simulated-nodes", "KNI_SIMULATED_NODES_BIN")
}

/// knictl: `KNI_KNICTL_BIN`, or the one beside the running test, built by cargo once per process.
pub fn knictl_binary() -> Result<PathBuf> {
    built("knictl", "KNI_KNICTL_BIN")
}

/// The CNI plugin: `KNI_CNI_BIN`, or the one beside the running test, built by cargo once per process.
pub fn shim_binary() -> Result<PathBuf> {
    built("kni-cni", "KNI_CNI_BIN")
}

/// The program that starts nodes and clusters: `KNI_NODE_BIN`, or the one beside the running test, built by cargo once
/// per process.
pub fn node_binary() -> Result<PathBuf> {
    built("kni-node", "KNI_NODE_BIN")
}

fn built(package: &'static str, variable: &str) -> Result<PathBuf> {
    static BUILT: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    let path = profile_folder()?.join(package);
    // Releases are built by `cargo xtask`, which passes the paths of its programs.
    let is_release = path.parent().is_some_and(|folder| folder.ends_with("release"));
    // Also if the file exists: only cargo knows whether it is up to date.
    let mut built = BUILT.lock().map_err(|e| anyhow::anyhow!(e.to_string()))?;
    if !is_release && !built.contains(&package) {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // The whole workspace, as for the tests: another selection of packages would compile the dependencies again.
        cargo.args(["build", "--quiet", "--workspace", "--bin", package]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        // The variables that cargo set for this test: build scripts that read them would run again, here and in the
        // next build.
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "LD_LIBRARY_PATH" {
                cargo.env_remove(&*name);
            }
        }
        ensure!(cargo.status()?.success(), "cargo build of {package} failed");
        built.push(package);
    }
    ensure!(path.exists(), "no {}", path.display());
    Ok(path)
}

/// The folder `target/<profile>` of the running executable, which is there or in its `deps`.
pub(crate) fn profile_folder() -> Result<PathBuf> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    if let Some(folder) = FOLDER.get() {
        return Ok(folder.clone());
    }
    let exe = env::current_exe()?;
    let folder = exe.parent().context("executable has no folder")?;
    let folder = if folder.ends_with("deps") {
        folder.parent().context("no profile folder")?
    } else {
        folder
    };
    Ok(FOLDER.get_or_init(|| folder.to_owned()).clone())
}

fn spawn(ns: &Namespaces, options: &AgentOptions, program: &Path, log: &Log) -> Result<Child> {
    let mut command = ns.command(program);
    if let Some(cluster) = &options.cluster {
        command.arg("--kubeconfig").arg(&cluster.kubeconfig);
        command.args(["--node-name", &cluster.node_name]);
    } else {
        Manifest::apply(&options.manifests, ns)?;
        command.args(["--standalone", "--manifests", MANIFESTS]);
    }
    command.args(&options.args);
    if options.embedded_programs {
        command.env_remove("KNI_EBPF_OBJECT");
    }
    command.envs(options.env.iter().map(|(name, value)| (name, value)));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = spawn_tied(command).with_context(|| format!("start {}", program.display()))?;
    log.collect(child.stdout.take().context("no stdout")?);
    log.collect(child.stderr.take().context("no stderr")?);
    Ok(child)
}

/// The lines of both streams in the order of their arrival.
#[derive(Debug, Clone, Default)]
struct Log(Arc<(Mutex<Lines>, Condvar)>);

#[derive(Debug, Default)]
struct Lines {
    all: Vec<String>,
    /// Lines before this one belong to earlier processes.
    current: usize,
    /// Streams that are still open.
    open: usize,
}

impl Log {
    fn collect(&self, stream: impl Read + Send + 'static) {
        let log = self.clone();
        log.0.0.lock().expect("no writer panics").open += 1;
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                log.0.0.lock().expect("no writer panics").all.push(line);
                log.0.1.notify_all();
            }
            log.0.0.lock().expect("no writer panics").open -= 1;
            log.0.1.notify_all();
        });
    }

    /// Waits until the whole output of an exited process has been read.
    fn wait_for_end(&self, deadline: Instant) {
        let lines = self.0.0.lock().expect("no writer panics");
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.0.1.wait_timeout_while(lines, left, |lines| lines.open > 0);
        drop(ended.expect("no writer panics"));
    }

    fn wait_for(&self, text: &str, timeout: Duration) -> bool {
        let lines = self.0.0.lock().expect("no writer panics");
        let missing = |lines: &mut Lines| !lines.all.iter().skip(lines.current).any(|line| line.contains(text));
        let (_lines, result) = self
            .0
            .1
            .wait_timeout_while(lines, timeout, missing)
            .expect("no writer panics");
        !result.timed_out()
    }

    fn reset_ready(&self) {
        let mut lines = self.0.0.lock().expect("no writer panics");
        lines.current = lines.all.len();
    }

    fn text(&self) -> String {
        self.0.0.lock().expect("no writer panics").all.join("\n")
    }
}
