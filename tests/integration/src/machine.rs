//! Runs a node with a real container runtime, and optionally a real kubelet and its cluster.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_local_node::{Kni, LocalNode, Programs, StaticPrograms};
use nix::mount::{MsFlags, mount};

use crate::{
    agent::{Agent, AgentOptions, Membership, agent_binary, controller_binary, profile_folder, shim_binary},
    eventually_sync,
    manifest::Manifest,
    node::Node,
    snapshot::NodeSnapshot,
};

/// The folder `deploy` of this repository.
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

/// A node whose processes end before its namespaces when it is dropped.
#[derive(Debug)]
pub struct Machine {
    /// Its processes.
    pub local: LocalNode,
    /// Its namespaces.
    pub node: Node,
}

impl Machine {
    /// A node with containerd and the images of a local node, without a network configuration.
    pub fn with_containerd(name: &str) -> Result<Self> {
        let mut machine = Self::idle(name)?;
        machine.local.start_containerd()?;
        Ok(machine)
    }

    /// [`Self::with_cluster`] on a node whose pods get their networks by KNI, from the agent at its usual socket.
    pub fn with_kni(name: &str, kni: Kni) -> Result<Self> {
        let mut machine = Self::with_kni_runtime(name, kni)?;
        machine.local.start_cluster("https://127.0.0.1:6443")?;
        Ok(machine)
    }

    /// [`Self::with_containerd`] with a containerd that leaves networks to the kubelet.
    pub fn with_kni_runtime(name: &str, kni: Kni) -> Result<Self> {
        let mut machine = Self::idle(name)?;
        machine.local.use_kni(kni)?;
        machine.local.start_containerd()?;
        Ok(machine)
    }

    /// Mounts a namespace of the node, "net" or another kind of /proc/self/ns, at a path inside.
    pub fn mount_namespace(&self, kind: &str, at: &str) -> Result<()> {
        self.node.enter(|| -> Result<()> {
            std::fs::write(at, "").with_context(|| format!("create {at}"))?;
            let source = format!("/proc/thread-self/ns/{kind}");
            let none = None::<&str>;
            mount(Some(source.as_str()), at, none, MsFlags::MS_BIND, none)
                .with_context(|| format!("mount a namespace at {at}"))
        })?
    }

    /// [`Self::with_containerd`] and the cluster: registered at its API server, but not ready without a network.
    pub fn with_cluster(name: &str) -> Result<Self> {
        let mut machine = Self::with_containerd(name)?;
        machine.local.start_cluster("https://127.0.0.1:6443")?;
        Ok(machine)
    }

    /// Starts an agent on the node as the network of the container runtime. It prewarms no interfaces, so that a node
    /// without pods always looks the same.
    pub fn start_agent(&self, manifests: Vec<Manifest>) -> Result<Agent> {
        let agent = Agent::start(&self.node, Self::agent_options(manifests))?;
        self.install_cni()?;
        Ok(agent)
    }

    /// [`Self::start_agent`] with an agent that watches the API server, to which the objects of `deploy/` are applied
    /// first, and kni-controller.
    pub fn start_member(&mut self) -> Result<Agent> {
        let agent = self.start_member_by_kni()?;
        self.install_cni()?;
        Ok(agent)
    }

    /// [`Self::start_member`] without files of CNI.
    pub fn start_member_by_kni(&mut self) -> Result<Agent> {
        self.local.apply_deployment(Path::new(DEPLOY))?;
        let cluster = Membership {
            kubeconfig: LocalNode::agent_kubeconfig().into(),
            node_name: LocalNode::NAME.into(),
        };
        let options = AgentOptions {
            cluster: Some(cluster),
            ..Self::agent_options(Vec::new())
        };
        let agent = Agent::start(&self.node, options)?;
        let controller = self.node.install(&controller_binary()?)?;
        self.local.start_controller(&controller)?;
        Ok(agent)
    }

    /// The options of [`Self::start_agent`].
    pub fn agent_options(manifests: Vec<Manifest>) -> AgentOptions {
        AgentOptions {
            manifests,
            args: vec!["--warm-sandboxes".into(), "0".into()],
            ..AgentOptions::default()
        }
    }

    /// The snapshot of the node after the removal of all pods, part of which happens in the background.
    pub fn at_rest(&self) -> Result<NodeSnapshot> {
        eventually_sync(Duration::from_mins(1), || {
            let snapshot = NodeSnapshot::take(&self.node)?;
            let links = snapshot.section("link").iter().filter(|link| link.starts_with("kni"));
            // The names of interface pins start with the number of the endpoint.
            let pins = snapshot.section("bpffs").iter().filter(|pin| {
                let name = pin.split_once("/links/").map(|(_, name)| name);
                name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()))
            });
            let left: Vec<&String> = links.chain(pins).collect();
            // Duplicate address detection of the uplink's link-local address takes one or two seconds. The anycast
            // address of a router comes last.
            let mut routes = snapshot.section("route").iter();
            let settled = routes.any(|route| route.starts_with("anycast fe80:: dev uplink0 "));
            ensure!(
                left.is_empty() && settled,
                "the node does not come to rest; left: {left:?}"
            );
            Ok(snapshot)
        })
    }

    /// Installs the CNI plugin and its configuration in the folders that containerd reads.
    pub fn install_cni(&self) -> Result<()> {
        let agent = self.node.install(&agent_binary()?)?;
        let shim = self.node.install(&shim_binary()?)?;
        let [bin, conf] = LocalNode::cni_folders();
        let mut install = self.local.command(agent);
        install.arg("install-cni").arg("--shim").arg(shim);
        install.arg("--bin-dir").arg(bin).arg("--conf-dir").arg(conf);
        let done = install.output().context("run kni-agent install-cni")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "kni-agent install-cni: {said}");
        Ok(())
    }

    fn idle(name: &str) -> Result<Self> {
        let programs = programs()?;
        let statics = static_programs()?;
        let node = Node::whole(name)?;
        let logs = tools()?.join("logs").join(format!("{}-{name}", std::process::id()));
        let local = LocalNode::new(&node, &programs, &statics, &logs)?;
        Ok(Self { local, node })
    }
}

/// The programs of a node; missing ones are built, which takes minutes, so `cargo xtask test` builds them in advance.
pub fn programs() -> Result<Programs> {
    Programs::build(&tools()?, &mut |line| eprintln!("{line}"))
}

/// The kubelet and the containerd that speak KNI; built like [`programs`].
pub fn kni() -> Result<Kni> {
    Programs::build_kni(&tools()?.join("kni"), &mut |line| eprintln!("{line}")).map(Kni::new)
}

/// A command that executes the Go tests of packages of [`kni`]. Flags of `go test` are before the packages.
pub fn kni_tests(arguments: &[&str]) -> Result<std::process::Command> {
    kni()?;
    Programs::kni_tests(&tools()?.join("kni"), arguments)
}

/// Helm, the program `helm` of the folder; built like [`programs`].
pub fn helm() -> Result<Programs> {
    Programs::build_helm(&tools()?, &mut |line| eprintln!("{line}"))
}

/// Upstream's end-to-end tests, `e2e.test`, and the programs of their images; built like [`programs`].
pub fn e2e() -> Result<Programs> {
    Programs::build_e2e(&tools()?, &mut |line| eprintln!("{line}"))
}

/// The static programs of the images, built once per process.
pub fn static_programs() -> Result<StaticPrograms> {
    static BUILT: OnceLock<StaticPrograms> = OnceLock::new();
    if let Some(built) = BUILT.get() {
        return Ok(built.clone());
    }
    let built = StaticPrograms::build(&tools()?.join("static"))?;
    Ok(BUILT.get_or_init(|| built).clone())
}

/// `target/tools/node`, the folder that `cargo xtask` uses.
pub(crate) fn tools() -> Result<PathBuf> {
    if let Some(named) = env::var_os("KNI_NODE_TOOLS") {
        return Ok(named.into());
    }
    let profile = profile_folder()?;
    let target: &Path = profile.parent().context("no target folder")?;
    Ok(target.join("tools/node"))
}
