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
use tokio::runtime::{Builder, Runtime};
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
    client: Client,
    socket: String,
    /// Where the paths of namespaces are seen.
    namespaces: Namespaces,
    _agent: Option<(Agent, Node)>,
}

/// A connection, and the threads that serve it.
struct Client {
    runtime: Runtime,
    kubelet: Kubelet,
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
        Ok(Self {
            client: Client::connect(Runtime::new()?, &node, SOCKET)?,
            socket: SOCKET.to_owned(),
            namespaces: Namespaces::clone(&node),
            _agent: Some((agent, node)),
        })
    }

    /// The server that listens on a socket of this machine.
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let namespaces = Namespaces::current("this machine")?;
        let socket = socket.to_str().context("the socket's path is not UTF-8")?;
        Ok(Self {
            client: Client::connect(Runtime::new()?, &namespaces, socket)?,
            socket: socket.to_owned(),
            namespaces,
            _agent: None,
        })
    }

    pub(super) fn run(&self, pattern: Pattern) -> Result<Timings> {
        self.wait_idle()?;
        let names = (0..pattern.pods()).map(|pod| format!("pod-{pod}")).collect();
        // One call after the other needs no second thread, whose wake-ups would count.
        let alone = match pattern {
            Pattern::Burst(_) => None,
            Pattern::Sequence(_) | Pattern::Spaced(..) => {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                Some(Client::connect(runtime, &self.namespaces, &self.socket)?)
            }
        };
        let client = alone.as_ref().unwrap_or(&self.client);
        let (pods, attach, all_attached) = timed(pattern, names, |name: String| client.attach(&name))?;
        // The sandbox process holds a pod's namespace until the runtime has removed it.
        let held: Vec<Namespaces> = pods
            .iter()
            .map(|pod| self.namespaces.net_at(&pod.sandbox.name, Path::new(&pod.netns)))
            .collect::<Result<_>>()?;
        self.wait_idle()?;
        let create = pods.iter().map(|pod| pod.create).collect();
        let ids = pods.into_iter().map(|pod| pod.sandbox.id).collect();
        let (delete, detach, all_detached) = timed(pattern, ids, |id: String| client.detach(&id))?;
        drop(held);
        self.wait_idle()?;
        let idle_call = match &alone {
            Some(alone) => {
                let ids = (0..pattern.pods()).map(|pod| format!("unknown-{pod}")).collect();
                timed(pattern, ids, |id: String| alone.query(&id))?.1
            }
            None => Vec::new(),
        };
        Ok(Timings {
            create,
            attach,
            all_attached,
            delete,
            detach,
            all_detached,
            idle_call,
        })
    }

    /// Waits until the background work of the agent is finished: nothing is removed, completed or prewarmed any more. A
    /// server that does not report it has a second.
    fn wait_idle(&self) -> Result<()> {
        let mut known = None;
        let mut since = Instant::now();
        eventually_sync(PATIENCE, || {
            let mut client = self.client.kubelet.runtime();
            let status = match self.client.runtime.block_on(client.get_status(GetStatusRequest {})) {
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

impl Client {
    fn connect(runtime: Runtime, namespaces: &Namespaces, socket: &str) -> Result<Self> {
        let kubelet = runtime.block_on(Kubelet::connect(namespaces, socket))?;
        Ok(Self { runtime, kubelet })
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

    /// A call about a pod that the server does not know, which it may refuse.
    fn query(&self, id: &str) -> Result<()> {
        match self.runtime.block_on(self.kubelet.query(id)) {
            Err(status) if status.code() == Code::Unavailable => Err(status.into()),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Returns the duration of `DeleteNetwork` in milliseconds.
    fn detach(&self, id: &str) -> Result<f64> {
        self.runtime.block_on(async {
            self.kubelet.detach(id).await?;
            let start = Instant::now();
            self.kubelet.delete_network(id).await?;
            Ok(milliseconds(start.elapsed()))
        })
    }
}
