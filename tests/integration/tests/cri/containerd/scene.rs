//! Provides a node with containerd and an agent, and sandboxes with server and client containers.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kni_integration::{Agent, Machine, Manifest, NodeSnapshot, eventually};
use kni_local_node::cri::{Cri, Sandbox};

/// The port of a pod's servers, TCP and UDP.
pub(crate) const PORT: u16 = 7000;
/// Maximum number of concurrent calls.
const AT_ONCE: usize = 8;
/// Timeout for the node to return to its initial state.
pub(crate) const REST: Duration = Duration::from_secs(30);

/// The node of a test. The agent is dropped before the machine.
pub(crate) struct Scene {
    pub(crate) agent: Agent,
    pub(crate) cri: Cri,
    pub(crate) machine: Machine,
}

/// A running sandbox with a server container and a client container.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) sandbox: Sandbox,
    pub(crate) id: String,
    pub(crate) addresses: Vec<IpAddr>,
    /// The container for executing programs.
    pub(crate) asks: String,
}

impl Scene {
    /// A node that has already run a pod, so that permanent leftovers of a first pod exist.
    pub(crate) async fn start(name: &str, manifests: Vec<Manifest>) -> Result<Self> {
        let machine = Machine::with_containerd(name)?;
        let agent = machine.start_agent(manifests)?;
        let cri = machine.local.cri().await?;
        let scene = Self { agent, cri, machine };
        scene.wait_for_network(true).await?;
        let first = scene.run(pod("first", &[])).await?;
        scene.cri.remove_sandbox(&first.id).await?;
        Ok(scene)
    }

    /// Waits for the runtime's network condition; returns its reason and message.
    pub(crate) async fn wait_for_network(&self, ready: bool) -> Result<(String, String)> {
        eventually(REST, async || {
            let condition = self.cri.network_ready().await?;
            let (is_ready, message) = (condition.status, condition.message);
            ensure!(is_ready == ready, "NetworkReady stays {is_ready}: {message}");
            Ok((condition.reason, message))
        })
        .await
    }

    /// Runs a sandbox with two containers.
    pub(crate) async fn run(&self, sandbox: Sandbox) -> Result<Running> {
        let id = self.cri.run_sandbox(&sandbox).await;
        let id = id.with_context(|| format!("run sandbox {}", sandbox.name))?;
        let addresses = self.cri.addresses(&id).await?;
        let port = PORT.to_string();
        let serve = ["serve", "--tcp", &port, "--udp", &port, "--name", &sandbox.name];
        self.cri.run_container(&id, &sandbox, "serves", &serve).await?;
        let asks = self.cri.run_container(&id, &sandbox, "asks", &["sleep"]).await?;
        Ok(Running {
            sandbox,
            id,
            addresses,
            asks,
        })
    }

    /// [`Self::run`] for many sandboxes.
    pub(crate) async fn run_all(&self, sandboxes: Vec<Sandbox>) -> Result<Vec<Running>> {
        let runs = stream::iter(sandboxes).map(|sandbox| self.run(sandbox));
        runs.buffered(AT_ONCE).try_collect().await
    }

    /// Stops and removes sandboxes concurrently.
    pub(crate) async fn remove_all(&self, running: &[Running]) -> Result<()> {
        let removals = running.iter().map(|pod| async {
            let removed = self.cri.remove_sandbox(&pod.id).await;
            removed.with_context(|| format!("remove sandbox {}", pod.sandbox.name))
        });
        futures::future::try_join_all(removals).await.map(drop)
    }

    /// The first word of the answer from `address` to `from`: the name of the server. An error without an answer.
    pub(crate) async fn ask(&self, from: &Running, address: IpAddr, protocol: &str) -> Result<String> {
        let (address, port) = (address.to_string(), PORT.to_string());
        let command = ["/kni-probe", "ask", &address, &port, "--protocol", protocol];
        let (code, said) = self.cri.exec(&from.asks, &command).await?;
        ensure!(code == 0, "{} asks {address} by {protocol}: {said}", from.sandbox.name);
        Ok(said.split(' ').next().unwrap_or_default().to_owned())
    }

    /// Panics unless the node returns to its earlier state.
    #[track_caller]
    pub(crate) fn assert_as_before(&self, before: &NodeSnapshot) {
        before.assert_unchanged(&self.machine.node, REST);
    }
}

/// A pod with annotations.
pub(crate) fn pod(name: &str, annotations: &[(&str, &str)]) -> Sandbox {
    Sandbox {
        name: name.into(),
        namespace: "team".into(),
        annotations: annotations.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        ..Sandbox::default()
    }
}
