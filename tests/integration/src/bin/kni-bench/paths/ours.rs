//! Our own path: two pods of one network, attached by the real agent.

use std::{net::IpAddr, path::Path as FilePath};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, AgentOptions, Kubelet, Manifest, Node, Pod, agent::SOCKET};
use kni_proto::runtime::ListInterfacesRequest;
use tokio::runtime::Runtime;

use super::{OURS, Path};

/// A node with an agent and two pods.
pub(super) struct Ours {
    // Dropped in this order: the agent must not outlive its node.
    runtime: Runtime,
    kubelet: Kubelet,
    pods: [Pod; 2],
    _agent: Agent,
    _node: Node,
}

impl Ours {
    pub(super) fn start(agent: &FilePath) -> Result<Self> {
        let node = Node::new("kni")?;
        let options = AgentOptions {
            manifests: vec![Manifest::default_network(
                "default",
                &["10.244.0.0/16", "fd00:244::/64"],
            )],
            binary: Some(agent.to_owned()),
            ..AgentOptions::default()
        };
        let agent = Agent::start(&node, options)?;
        let runtime = Runtime::new()?;
        let (kubelet, pods) = runtime.block_on(async {
            let kubelet = Kubelet::connect(&node, SOCKET).await?;
            let pods = [
                kubelet.run_pod("bench", "client", &[]).await?,
                kubelet.run_pod("bench", "server", &[]).await?,
            ];
            anyhow::Ok((kubelet, pods))
        })?;
        Ok(Self {
            runtime,
            kubelet,
            pods,
            _agent: agent,
            _node: node,
        })
    }

    pub(super) fn paths(&self) -> Result<Vec<Path>> {
        let [client, server] = &self.pods;
        let path = |key, title, address: Option<IpAddr>| -> Result<Path> {
            Ok(Path {
                key,
                title,
                client: client.inside.clone(),
                server: server.inside.clone(),
                address: address.with_context(|| format!("{title}: no address"))?,
                keep: Vec::new(),
            })
        };
        Ok(vec![
            path(OURS, "KNI", server.ip(true))?,
            path("kni_v6", "KNI, IPv6", server.ip(false))?,
        ])
    }
    /// That the packets which were counted on the way really went through our programs, and none was dropped.
    pub(super) fn check(&self) -> Result<()> {
        let mut client = self.kubelet.runtime();
        let request = client.list_interfaces(ListInterfacesRequest::default());
        let answer = self.runtime.block_on(request)?;
        for interface in answer.into_inner().interfaces {
            let pod = &interface.pod_name;
            let sent = interface.from_pod.unwrap_or_default().packets;
            let dropped = interface.dropped.unwrap_or_default().packets;
            ensure!(sent > 1000, "pod {pod}: only {sent} packets went through from_pod");
            ensure!(dropped < 100, "pod {pod}: {dropped} packets were dropped");
            ensure!(interface.healthy, "pod {pod}: {}", interface.problems.join(", "));
        }
        Ok(())
    }
}
