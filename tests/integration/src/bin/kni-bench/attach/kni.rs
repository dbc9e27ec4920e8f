//! Attaches pods through the agent with the calls of the kubelet.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Manifest, Namespaces, Node, agent::SOCKET, eventually_sync, kubelet::Sandbox,
};
use kni_proto::runtime::GetStatusRequest;
use tokio::runtime::Runtime;
use tonic::Code;

use super::{
    Pattern,
    timing::{Timings, milliseconds, timed},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// How long the background work of an agent must have ended.
const REST: Duration = Duration::from_millis(300);

/// A server of KNI.
pub(super) struct Kni {
    runtime: Runtime,
    kubelet: Kubelet,
    /// Where the paths of namespaces are seen.
    namespaces: Namespaces,
    _agent: Option<(Agent, Node)>,
}

struct Attached {
    sandbox: Sandbox,
    netns: String,
    /// Duration of `CreateNetwork` in milliseconds.
    create: f64,
}

impl Kni {
    /// An agent on a node of its own, with `warm` prewarmed sandboxes, or its own choice.
    pub(super) fn start(agent: &Path, warm: Option<u32>) -> Result<Self> {
        let node = Node::new("attach")?;
        let warm = warm.map(|warm| ["--warm-sandboxes".to_owned(), warm.to_string()]);
        let options = AgentOptions {
            manifests: vec![Manifest::default_network(
                "default",
                &["10.244.0.0/16", "fd00:244::/64"],
            )],
            args: warm.into_iter().flatten().collect(),
            binary: Some(agent.to_owned()),
            ..AgentOptions::default()
        };
        let agent = Agent::start(&node, options)?;
        let runtime = Runtime::new()?;
        let kubelet = runtime.block_on(Kubelet::connect(&node, SOCKET))?;
        Ok(Self {
            runtime,
            kubelet,
            namespaces: Namespaces::clone(&node),
            _agent: Some((agent, node)),
        })
    }

    /// The server that listens on a socket of this machine.
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let namespaces = Namespaces::current("this machine")?;
        let runtime = Runtime::new()?;
        let socket = socket.to_str().context("the socket's path is not UTF-8")?;
        let kubelet = runtime.block_on(Kubelet::connect(&namespaces, socket))?;
        Ok(Self {
            runtime,
            kubelet,
            namespaces,
            _agent: None,
        })
    }

    pub(super) fn run(&self, pattern: Pattern) -> Result<Timings> {
        self.wait_idle()?;
        let names = (0..pattern.pods()).map(|pod| format!("pod-{pod}")).collect();
        let (pods, attach, all_attached) = timed(pattern, names, |name: String| self.attach(&name))?;
        // The sandbox process holds a pod's namespace until the runtime has removed it.
        let held: Vec<Namespaces> = pods
            .iter()
            .map(|pod| self.namespaces.net_at(&pod.sandbox.name, Path::new(&pod.netns)))
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

    /// Waits until the background work of the agent is finished: nothing is removed, completed or prewarmed any more. A server
    /// that does not report it has a second.
    fn wait_idle(&self) -> Result<()> {
        let mut known = None;
        let mut since = Instant::now();
        eventually_sync(PATIENCE, || {
            let mut client = self.kubelet.runtime();
            let status = match self.runtime.block_on(client.get_status(GetStatusRequest {})) {
                Err(status) if status.code() == Code::Unimplemented => {
                    thread::sleep(Duration::from_secs(1));
                    return Ok(());
                }
                answer => answer?.into_inner(),
            };
            let (warm, pending) = (status.warm_sandboxes, status.pending_removals + status.pending_links);
            if known != Some(warm) || pending > 0 {
                known = Some(warm);
                since = Instant::now();
            }
            ensure!(
                since.elapsed() >= REST,
                "the agent does not come to rest: {warm} sandboxes prewarmed, {pending} interfaces pending"
            );
            Ok(())
        })
    }
}
