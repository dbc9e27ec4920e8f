//! Provides the setup of these tests: a node with an agent, a router and a server outside, and a capture of the uplink.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{AgentOptions, LeakWatch, Manifest, Node, Outside, Stage, eventually, traffic::Servers};
use kni_proto::runtime::{ListDropsRequest, Uplink};

use super::PORT;

pub(crate) use kni_integration::patience;

/// Time until a change of objects or of the node's network is applied.
pub(crate) const APPLIED: Duration = Duration::from_secs(30);
/// Every subnet of the networks of [`masquerading`].
const PODS: [&str; 4] = ["10.244.0.0/16", "fd00:244::/64", "10.10.0.0/16", "fd10::/64"];

/// A node with an uplink to a router, and the related parts. The capture is dropped first.
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

/// A pool whose addresses policies of one namespace may use.
pub(crate) fn pool(name: &str, ranges: &[&str], namespace: &str) -> Manifest {
    let labels = format!("{{kubernetes.io/metadata.name: {namespace}}}");
    let access = format!("{{namespaces: {{from: Selected, selector: {{matchLabels: {labels}}}}}}}");
    Manifest::file(
        &format!("pool-{name}.yaml"),
        format!(
            "apiVersion: kni.dev/v1alpha1\nkind: EgressAddressPool\nmetadata: {{name: {name}}}\nspec:\n  ranges: {ranges:?}\n  access: {access}\n"
        ),
    )
}

impl World {
    pub(crate) async fn start(name: &str, manifests: Vec<Manifest>, args: &[&str]) -> Result<Self> {
        let node = Node::new(name)?;
        let outside = Outside::new(&node)?;
        Self::on(node, outside, manifests, args).await
    }

    pub(crate) async fn on(node: Node, outside: Outside, manifests: Vec<Manifest>, args: &[&str]) -> Result<Self> {
        let stage = Stage::with(node, AgentOptions::new(manifests, args)).await?;
        Ok(Self { stage, outside })
    }

    pub(crate) fn watch(&self) -> Result<LeakWatch> {
        LeakWatch::start(&self.outside, &PODS)
    }

    pub(crate) fn serve(&self) -> Result<Servers> {
        Servers::start(&self.outside.server, "server", PORT)
    }

    /// Drops by direction and reason, of all pods and of packets without a pod.
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
        self.stage.status().await?.uplink.context("no uplink in the status")
    }

    /// Waits until the status shows an uplink that `wanted` accepts.
    pub(crate) async fn wait_for_uplink(&self, wanted: impl Fn(&Uplink) -> bool) -> Result<Uplink> {
        eventually(APPLIED, async || {
            let uplink = self.uplink().await?;
            ensure!(wanted(&uplink), "the uplink stays {uplink:?}");
            Ok(uplink)
        })
        .await
        .with_context(|| format!("the agent's log:\n{}", self.stage.agent.log()))
    }
}

/// The server's socket.
pub(crate) fn server(v4: bool) -> SocketAddr {
    SocketAddr::new(Outside::server_address(v4), PORT)
}
