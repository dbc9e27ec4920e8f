//! Owns the processes of a running node, each of which can be stopped and started separately.

mod containerd;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    cgroup::Cgroup,
    config::{self, CNI_BIN, CNI_CONF, FOLDER, NODE_NAME},
    daemon::{Daemon, tail},
    hidden,
    kni::Kni,
    namespaces::{Namespaces, shown},
    node::Node,
    programs::Programs,
    static_programs::StaticPrograms,
};

/// How long to wait for steps that usually take seconds.
const PATIENCE: Duration = Duration::from_mins(1);

/// A process of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The container runtime.
    Containerd,
    /// The store behind the API server.
    Etcd,
    /// The API server.
    ApiServer,
    /// The controllers.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// The kubelet.
    Kubelet,
    /// kube-proxy.
    KubeProxy,
}

impl Part {
    /// Its program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        }
    }
}

/// Between two looks whether something has happened. Many looks start a process, which slows down what they wait for.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// The processes of a node in its own namespaces.
///
/// They live until the value is dropped or this process ends, for any reason: then every process of the node is killed,
/// those of pods included, and their mounts disappear with the node's namespaces. A panic prints the ends of the logs.
#[derive(Debug)]
pub struct LocalNode {
    inside: Namespaces,
    name: String,
    addresses: [String; 2],
    group: Cgroup,
    programs: Programs,
    kni: Option<Kni>,
    /// Whether the API server writes an audit log.
    audited: bool,
    statics: StaticPrograms,
    logs: PathBuf,
    daemons: BTreeMap<String, Daemon>,
    /// Ends the node when the pipe to its standard input is closed.
    janitor: Child,
}

impl LocalNode {
    /// The name of a cluster's only node.
    pub const NAME: &'static str = NODE_NAME;

    /// Prepares the only node of a cluster in namespaces of [`Node::whole`] without starting a process. Logs go to the
    /// folder `logs`, which is emptied.
    pub fn new(node: &Node, programs: &Programs, statics: &StaticPrograms, logs: &Path) -> Result<Self> {
        Self::named(NODE_NAME, node, programs, statics, logs)
    }

    /// [`Self::new`] for a node called `name` in its cluster.
    pub fn named(name: &str, node: &Node, programs: &Programs, statics: &StaticPrograms, logs: &Path) -> Result<Self> {
        let inside: &Namespaces = node;
        let there = inside.enter(|| programs.path("containerd").exists())?;
        let folder = programs.folder();
        ensure!(
            there,
            "{} cannot be seen inside the node, where {} is its own; build elsewhere",
            folder.display(),
            hidden::hides(folder).unwrap_or("another folder")
        );
        if logs.exists() {
            fs::remove_dir_all(logs).with_context(|| format!("empty {}", logs.display()))?;
        }
        fs::create_dir_all(logs).with_context(|| format!("create {}", logs.display()))?;
        let group = Cgroup::create()?;
        let janitor = janitor(statics, group.name())?;
        let local = Self {
            inside: inside.clone(),
            name: name.to_owned(),
            addresses: node.addresses().map(str::to_owned),
            group,
            programs: programs.clone(),
            kni: None,
            audited: false,
            statics: statics.clone(),
            logs: logs.to_owned(),
            daemons: BTreeMap::new(),
            janitor,
        };
        local.write_texts(&local.texts()?)?;
        Ok(local)
    }

    /// Makes the API server of this node write an audit log, for [`Self::audit_log`]. Before the cluster is started.
    pub fn keep_audit_log(&mut self) -> Result<()> {
        self.audited = true;
        self.write_texts(&BTreeMap::from([(config::AUDIT_POLICY.into(), config::audit_policy())]))
    }

    /// The audit log of the node's API server: a line of JSON (`audit.k8s.io/v1`) per answered request.
    pub fn audit_log(&self) -> Result<String> {
        let bytes = self.inside.enter(|| fs::read(config::AUDIT_LOG))?;
        let bytes = bytes.with_context(|| format!("read {}", config::AUDIT_LOG))?;
        String::from_utf8(bytes).context("the audit log is not UTF-8")
    }

    /// Gives the pods of this node their networks by KNI. Before its containerd and kubelet are started.
    pub fn use_kni(&mut self, kni: Kni) -> Result<()> {
        self.kni = Some(kni);
        self.write_texts(&self.texts()?)
    }

    fn texts(&self) -> Result<BTreeMap<PathBuf, String>> {
        let plugins = self
            .programs
            .folder()
            .to_str()
            .context("the programs' folder is not UTF-8")?;
        Ok([
            ("containerd.toml", config::containerd(plugins, self.kni.as_ref())),
            ("kubelet.yaml", config::kubelet(self.group.name(), self.kni.as_ref())),
            ("kube-proxy.yaml", config::kube_proxy(&self.name)),
        ]
        .map(|(name, text)| (Path::new(FOLDER).join(name), text))
        .into())
    }

    /// Writes files inside the node, and creates their folders.
    pub fn write_texts(&self, texts: &BTreeMap<PathBuf, String>) -> Result<()> {
        self.inside.enter(|| {
            for folder in [CNI_BIN, CNI_CONF, config::STATIC_PODS] {
                fs::create_dir_all(folder).with_context(|| format!("create {folder}"))?;
            }
            texts.iter().try_for_each(|(path, text)| {
                let folder = path.parent().unwrap_or(Path::new("/"));
                fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
                fs::write(path, text).with_context(|| format!("write {}", path.display()))
            })
        })?
    }

    /// The name of the node's control group. Every process of the node is a member.
    pub fn group(&self) -> &str {
        self.group.name()
    }

    /// The node's name in its cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's addresses, IPv4 first.
    pub fn addresses(&self) -> [&str; 2] {
        self.addresses.each_ref().map(String::as_str)
    }

    /// The node's namespaces.
    pub fn inside(&self) -> &Namespaces {
        &self.inside
    }

    /// The programs of the node.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Names and process ids of the started parts, without pods.
    pub fn processes(&self) -> impl Iterator<Item = (&str, u32)> {
        self.daemons.iter().map(|(name, daemon)| (name.as_str(), daemon.pid()))
    }

    /// The log of a part since its first start.
    pub fn log(&self, part: Part) -> String {
        fs::read(self.log_path(part.program())).map_or_else(
            |error| format!("(unreadable: {error})"),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    /// A command that runs inside as a process of the node, with the node's programs on its path.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.inside.command(program);
        let path = std::env::var("PATH").unwrap_or_default();
        let own = self.programs.folder().display();
        command.env("PATH", format!("{own}:{path}:/usr/local/sbin:/usr/sbin:/sbin"));
        self.group.adopt(&command)
    }

    /// Starts a part without waiting until it serves.
    pub fn start(&mut self, part: Part) -> Result<()> {
        self.start_with(part, self.arguments(part))
    }

    /// [`Self::start`] with other arguments than those of the only node of a cluster.
    pub(crate) fn start_with(&mut self, part: Part, arguments: Vec<String>) -> Result<()> {
        let mut command = self.command(self.program(part));
        command.args(arguments);
        // Pods would inherit the variable of the container runtime's shims.
        if part != Part::Containerd {
            command.env(config::COLLECTION.0, config::COLLECTION.1);
        }
        self.start_as(part.program(), command)
    }

    fn program(&self, part: Part) -> PathBuf {
        let by_kni = self.kni.as_ref().filter(|kni| match part {
            Part::Kubelet => kni.kubelet,
            Part::Containerd => kni.containerd,
            Part::Etcd | Part::ApiServer | Part::ControllerManager | Part::Scheduler | Part::KubeProxy => false,
        });
        let programs = by_kni.map_or(&self.programs, |kni| &kni.programs);
        programs.path(part.program())
    }

    fn arguments(&self, part: Part) -> Vec<String> {
        let [v4, v6] = &self.addresses;
        match part {
            Part::Containerd => vec!["--config".into(), format!("{FOLDER}/containerd.toml")],
            Part::Etcd => config::etcd(),
            Part::ApiServer => {
                let mut arguments = config::api_server(v4);
                if self.audited {
                    arguments.extend(config::audit());
                }
                arguments
            }
            Part::ControllerManager => config::controller_manager(),
            Part::Scheduler => config::scheduler(),
            Part::Kubelet => config::kubelet_arguments(&self.name, &format!("{v4},{v6}")),
            Part::KubeProxy => vec![format!("--config={FOLDER}/kube-proxy.yaml")],
        }
    }

    /// Starts a command of [`Self::command`] as an additional process.
    pub fn start_as(&mut self, name: &str, command: Command) -> Result<()> {
        ensure!(!self.daemons.contains_key(name), "{name} runs already");
        let daemon = Daemon::start(command, self.log_path(name))?;
        self.daemons.insert(name.into(), daemon);
        Ok(())
    }

    /// Terminates a part and waits for its end.
    pub fn stop(&mut self, part: Part) -> Result<()> {
        self.take(part)?.stop()
    }

    /// Kills a part, as a crash would.
    pub fn kill(&mut self, part: Part) -> Result<()> {
        self.take(part)?.kill()
    }

    fn take(&mut self, part: Part) -> Result<Daemon> {
        let daemon = self.daemons.remove(part.program());
        daemon.with_context(|| format!("{} does not run", part.program()))
    }

    /// The folder inside the node where the kubelet looks for manifests of static pods.
    pub fn static_pods() -> &'static Path {
        Path::new(config::STATIC_PODS)
    }

    /// The folders inside the node where containerd looks for CNI plugins first, and for their configurations.
    pub fn cni_folders() -> [&'static Path; 2] {
        [Path::new(CNI_BIN), Path::new(CNI_CONF)]
    }

    /// Whether a part of the node was started, and not ended since.
    pub(crate) fn runs(&self, part: Part) -> bool {
        self.daemons.contains_key(part.program())
    }

    /// Fails, with the end of its log, if a part of the node has ended by itself.
    pub(crate) fn check(&mut self) -> Result<()> {
        let mut parts = self.daemons.iter_mut();
        parts.try_for_each(|(name, daemon)| daemon.check().with_context(|| name.clone()))
    }

    /// Polls `done` until it returns true; fails when a part of the node ends meanwhile. After `patience` the error has
    /// the pods and warnings of the node's cluster, and the words by which tests recognise a wait that ran out.
    pub fn wait(&mut self, what: &str, patience: Duration, mut done: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut pause = SHORTEST_PAUSE;
        loop {
            let last = done(self);
            if matches!(last, Ok(true)) {
                return Ok(());
            }
            self.check()?;
            if Instant::now() > deadline {
                let why = last.err().map(|error| format!(": {error:#}")).unwrap_or_default();
                bail!("waited {patience:?} in vain until {what}{why}{}", self.pods());
            }
            thread::sleep(pause);
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }
}

impl Drop for LocalNode {
    fn drop(&mut self) {
        if thread::panicking() {
            for name in self.daemons.keys() {
                let log = self.log_path(name);
                #[expect(clippy::print_stderr, reason = "a failed test shows the logs of the node")]
                {
                    eprintln!("--- the end of {} ---\n{}", log.display(), tail(&log));
                }
            }
        }
        drop(self.janitor.stdin.take());
        // Its status is irrelevant: processes that it could not kill have at least lost their namespaces.
        drop(self.janitor.wait());
    }
}

fn janitor(statics: &StaticPrograms, group: &str) -> Result<Child> {
    use std::os::unix::process::CommandExt as _;
    let mut command = Command::new(statics.janitor());
    // A separate process group, so that an interrupt from the terminal does not end it.
    command.arg(group).process_group(0);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
        .spawn()
        .with_context(|| format!("start {}", statics.janitor().display()))
}

/// Runs a command to its end and returns its stdout; failure quotes its stderr.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| shown.clone())?;
    ensure!(
        output.status.success(),
        "{shown}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    String::from_utf8(output.stdout).with_context(|| format!("{shown}: not UTF-8"))
}
