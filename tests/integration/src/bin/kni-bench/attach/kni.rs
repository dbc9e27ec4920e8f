//! Attaches pods through the agent with the calls of the kubelet.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Manifest, Namespaces, Node, agent::SOCKET, eventually_sync, kubelet::Sandbox,
};
use kni_proto::runtime::GetStatusRequest;
use tokio::runtime::Runtime;

use super::{
    Pattern,
    timing::{Timings, milliseconds, timed},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// A node with an agent.
pub(super) struct Kni {
    runtime: Runtime,
    kubelet: Kubelet,
    warm: u32,
    _agent: Agent,
    node: Node,
}

struct Attached {
    sandbox: Sandbox,
    netns: String,
    /// Duration of `CreateNetwork` in milliseconds.
    create: f64,
}

impl Kni {
    /// An agent with `warm` prewarmed sandboxes.
    pub(super) fn start(agent: &Path, warm: u32) -> Result<Self> {
        let node = Node::new("attach")?;
        let options = AgentOptions {
            manifests: vec![Manifest::default_network(
                "default",
                &["10.244.0.0/16", "fd00:244::/64"],
            )],
            args: vec!["--warm-sandboxes".into(), warm.to_string()],
            binary: Some(agent.to_owned()),
            ..AgentOptions::default()
        };
        let agent = Agent::start(&node, options)?;
        let runtime = Runtime::new()?;
        let kubelet = runtime.block_on(Kubelet::connect(&node, SOCKET))?;
        Ok(Self {
            runtime,
            kubelet,
            warm,
            _agent: agent,
            node,
        })
    }

    pub(super) fn run(&self, pattern: Pattern) -> Result<Timings> {
        self.wait_idle()?;
        let names = (0..pattern.pods()).map(|pod| format!("pod-{pod}")).collect();
        let (pods, attach, all_attached) = timed(pattern, names, |name: String| self.attach(&name))?;
        // The sandbox process holds a pod's namespace until the runtime has removed it.
        let held: Vec<Namespaces> = pods
            .iter()
            .map(|pod| self.node.net_at(&pod.sandbox.name, Path::new(&pod.netns)))
            .collect::<Result<_>>()?;
        self.wait_idle()?;
        let create = pods.iter().map(|pod| pod.create).collect();
        let ids = pods.into_iter().map(|pod| pod.sandbox.id).collect();
        let ((), detach, all_detached) = timed(pattern, ids, |id: String| self.detach(&id))
            .map(|(results, times, all)| (results.into_iter().collect(), times, all))?;
        drop(held);
        Ok(Timings {
            create,
            attach,
            all_attached,
            detach,
            all_detached,
        })
    }

    fn attach(&self, name: &str) -> Result<Attached> {
        self.runtime.block_on(async {
            let start = Instant::now();
            let netns = self.kubelet.create_network("bench", name).await?;
            let create = milliseconds(start.elapsed());
            let sandbox = Sandbox::new("bench", name, &netns);
            self.kubelet.attach(&sandbox).await?;
            Ok(Attached { sandbox, netns, create })
        })
    }

    fn detach(&self, id: &str) -> Result<()> {
        self.runtime.block_on(async {
            self.kubelet.detach(id).await?;
            self.kubelet.delete_network(id).await?;
            Ok(())
        })
    }

    /// Waits until the background work of the agent is finished.
    fn wait_idle(&self) -> Result<()> {
        eventually_sync(PATIENCE, || {
            let mut client = self.kubelet.runtime();
            let status = self.runtime.block_on(client.get_status(GetStatusRequest {}))?;
            let status = status.into_inner();
            let (warm, pending) = (status.warm_sandboxes, status.pending_removals);
            ensure!(
                warm >= self.warm && pending == 0,
                "the agent does not come to rest: {warm} sandboxes prewarmed, {pending} removals pending"
            );
            Ok(())
        })
    }
}
