//! Pods through the bridge plugin with host-local addresses, executed as a container runtime does.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, Node, kubelet::random_hex};

use super::{
    Pattern,
    timing::{Timings, timed},
};

/// Where Debian puts the plugins.
pub(super) const PLUGINS: &str = "/usr/lib/cni";

const CONFIG: &str = r#"{
  "cniVersion": "0.4.0", "name": "bench", "type": "bridge", "bridge": "cni0", "isGateway": true,
  "ipam": {
    "type": "host-local", "dataDir": "/run/cni/networks", "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
    "ranges": [[{ "subnet": "10.245.0.0/16" }], [{ "subnet": "fd00:245::/64" }]]
  }
}"#;

/// A node whose pods are attached by the plugin.
pub(super) struct Bridge {
    node: Node,
}

struct Pod {
    id: String,
    namespace: Namespaces,
}

impl Bridge {
    /// A node, if the plugin is installed.
    pub(super) fn find() -> Result<Option<Self>> {
        if !Path::new(PLUGINS).join("bridge").exists() {
            return Ok(None);
        }
        let node = Node::new("bridge")?;
        Ok(Some(Self { node }))
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
            detach,
            all_detached,
        })
    }

    fn plugin(&self, command: &str, pod: &Pod) -> Result<()> {
        self.node.enter(|| {
            // Without a hook between fork and exec, which would cost this way an expensive fork: the child inherits the
            // namespaces of this thread.
            let mut child = Command::new(Path::new(PLUGINS).join("bridge"))
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
                .context("start the bridge plugin")?;
            child.stdin.take().context("no stdin")?.write_all(CONFIG.as_bytes())?;
            let output = child.wait_with_output()?;
            ensure!(
                output.status.success(),
                "bridge plugin, {command}: {}: {}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            Ok(())
        })?
    }
}
