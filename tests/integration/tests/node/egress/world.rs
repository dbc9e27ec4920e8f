//! Where these tests begin: a node with an agent, a router and a server outside, and a witness of what leaves.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Agent, AgentOptions, Kubelet, LeakWatch, Manifest, Node, Outside, Stage, agent::KUBELET_SOCKET, traffic::Servers,
};
use kni_proto::runtime::{GetStatusRequest, ListDropsRequest, Uplink};

use super::PORT;

pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// Every subnet of the networks of [`masquerading`].
const PODS: [&str; 4] = ["10.244.0.0/16", "fd00:244::/64", "10.10.0.0/16", "fd10::/64"];

/// A node with an uplink to a router, and what goes with it. The witness goes first, so that it outlives nothing.
pub(crate) struct World {
    pub(crate) stage: Stage,
    pub(crate) outside: Outside,
}

/// [`Manifest::overlapping`] with every network masquerading.
pub(crate) fn masquerading() -> Vec<Manifest> {
    let networks = Manifest::overlapping().into_iter();
    networks
        .map(|network| network.spec("egress: {mode: Masquerade}"))
        .collect()
}

impl World {
    pub(crate) async fn start(name: &str, manifests: Vec<Manifest>, args: &[&str]) -> Result<Self> {
        let node = Node::new(name)?;
        let outside = Outside::new(&node)?;
        Self::on(node, outside, manifests, args).await
    }

    pub(crate) async fn on(node: Node, outside: Outside, manifests: Vec<Manifest>, args: &[&str]) -> Result<Self> {
        let options = AgentOptions {
            manifests,
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            ..AgentOptions::default()
        };
        let agent = Agent::start(&node, options)?;
        let kubelet = Kubelet::connect(&node, KUBELET_SOCKET).await?;
        Ok(Self {
            stage: Stage { agent, kubelet, node },
            outside,
        })
    }

    pub(crate) fn watch(&self) -> Result<LeakWatch> {
        LeakWatch::start(&self.outside, &PODS)
    }

    pub(crate) fn serve(&self) -> Result<Servers> {
        Servers::start(&self.outside.server, "server", PORT)
    }

    /// Drops of nobody's packets, or of anybody's, by direction and reason.
    pub(crate) async fn drops(&self, direction: &str, reason: &str) -> Result<u64> {
        let listed = self.stage.kubelet.runtime().list_drops(ListDropsRequest {}).await?;
        let drops = listed.into_inner().drops.into_iter();
        Ok(drops
            .filter(|drop| drop.direction == direction && drop.reason == reason)
            .filter_map(|drop| drop.count)
            .map(|count| count.packets)
            .sum())
    }

    pub(crate) async fn uplink(&self) -> Result<Uplink> {
        let status = self.stage.kubelet.runtime().get_status(GetStatusRequest {}).await?;
        status.into_inner().uplink.context("no uplink in the status")
    }

    /// Waits until the status shows an uplink that `wanted` accepts.
    pub(crate) async fn wait_for_uplink(&self, wanted: impl Fn(&Uplink) -> bool) -> Result<Uplink> {
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        loop {
            let uplink = self.uplink().await?;
            if wanted(&uplink) {
                return Ok(uplink);
            }
            ensure!(
                std::time::Instant::now() < deadline,
                "the uplink stays {uplink:?}; the agent's log:\n{}",
                self.stage.agent.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The server's socket.
pub(crate) fn server(v4: bool) -> SocketAddr {
    SocketAddr::new(Outside::server_address(v4), PORT)
}
