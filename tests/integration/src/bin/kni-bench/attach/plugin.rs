//! Attaches pods through a CNI plugin, executed as a container runtime does: the bridge plugin with host-local
//! addresses, and the plugin of KNI with an agent.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, AgentOptions, Manifest, Namespaces, Node, kubelet::random_hex};

use super::{
    Pattern,
    timing::{Timings, timed},
};

/// Debian's folder of the plugins.
pub(super) const PLUGINS: &str = "/usr/lib/cni";

const BRIDGE: &str = r#"{
  "cniVersion": "0.4.0", "name": "bench", "type": "bridge", "bridge": "cni0", "isGateway": true,
  "ipam": {
    "type": "host-local", "dataDir": "/run/cni/networks", "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
    "ranges": [[{ "subnet": "10.245.0.0/16" }], [{ "subnet": "fd00:245::/64" }]]
  }
}"#;

const KNI: &str = r#"{ "cniVersion": "1.1.0", "name": "kni", "type": "kni-cni", "socket": "/run/kni/kni.sock" }"#;

/// A node whose pods are attached by a plugin.
pub(super) struct Plugin {
    program: PathBuf,
    config: &'static str,
    /// The agent behind the plugin of KNI.
    agent: Option<Agent>,
    node: Node,
}

struct Pod {
    id: String,
    namespace: Namespaces,
}

impl Plugin {
    /// A node for the bridge plugin, if it is installed.
    pub(super) fn bridge() -> Result<Option<Self>> {
        let program = Path::new(PLUGINS).join("bridge");
        if !program.exists() {
            return Ok(None);
        }
        Ok(Some(Self {
            program,
            config: BRIDGE,
            agent: None,
            node: Node::new("bridge")?,
        }))
    }

    /// A node for the plugin of KNI. The runtime creates the namespaces, so prewarmed sandboxes of the agent are not
    /// used.
    pub(super) fn kni(program: &Path, agent: &Path) -> Result<Self> {
        let node = Node::new("shim")?;
        let subnets = ["10.244.0.0/16", "fd00:244::/64"];
        let options = AgentOptions {
            manifests: vec![Manifest::default_network("default", &subnets)],
            args: vec!["--warm-sandboxes".into(), "0".into()],
            binary: Some(agent.to_owned()),
            ..AgentOptions::default()
        };
        Ok(Self {
            // The node has a different working folder.
            program: program.canonicalize()?,
            config: KNI,
            agent: Some(Agent::start(&node, options)?),
            node,
        })
    }

    /// Peak memory of the agent behind the plugin, in bytes.
    pub(super) fn peak_memory(&self) -> Result<Option<u64>> {
        self.agent.as_ref().map(peak_memory).transpose()
    }

    pub(super) fn run(&self, pattern: Pattern) -> Result<Timings> {
        let pods: Vec<Pod> = (0..pattern.pods())
            .map(|pod| {
                Ok(Pod {
                    id: random_hex(32),
                    namespace: Namespaces::fresh_net(&format!("pod-{pod}"))?,
                })
            })
            .collect::<Result<_>>()?;
        let (_, attach, all_attached) = timed(pattern, pods.iter().collect(), |pod| self.plugin("ADD", pod))?;
        let (_, detach, all_detached) = timed(pattern, pods.iter().collect(), |pod| self.plugin("DEL", pod))?;
        Ok(Timings {
            create: Vec::new(),
            attach,
            all_attached,
            delete: Vec::new(),
            detach,
            all_detached,
            idle_call: Vec::new(),
        })
    }

    fn plugin(&self, command: &str, pod: &Pod) -> Result<()> {
        self.node.enter(|| {
            // Without a hook between fork and exec, which would make the fork expensive in this measurement: the child
            // inherits the namespaces of this thread.
            let mut child = Command::new(&self.program)
                .env_clear()
                .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
                .env("CNI_COMMAND", command)
                .env("CNI_CONTAINERID", &pod.id)
                .env("CNI_NETNS", pod.namespace.net_path())
                .env("CNI_IFNAME", "eth0")
                .env("CNI_PATH", PLUGINS)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .with_context(|| format!("start {}", self.program.display()))?;
            child
                .stdin
                .take()
                .context("no stdin")?
                .write_all(self.config.as_bytes())?;
            let output = child.wait_with_output()?;
            ensure!(
                output.status.success(),
                "{}, {command}: {}: {}{}",
                self.program.display(),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            Ok(())
        })?
    }
}

/// `VmHWM` of the agent.
fn peak_memory(agent: &Agent) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line
        .and_then(|rest| rest.split_whitespace().next())
        .context("no VmHWM")?;
    Ok(kib.parse::<u64>()? * 1024)
}
