//! Provides the setup of most tests: a node with a running agent and a connected kubelet, and the operators' view of
//! it.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_common::layout::LAYOUT_VERSION;
use kni_proto::runtime::{GetStatusRequest, GetStatusResponse, Interface, ListDropsRequest, ListInterfacesRequest};

use crate::{
    agent::{Agent, AgentOptions, KUBELET_SOCKET, knictl_binary},
    eventually,
    frames::{Mac, parse_mac},
    kubelet::{Kubelet, Pod},
    manifest::Manifest,
    node::{FABRIC_V6, NODE_V4, NODE_V6, Node},
    patience, programs,
    traffic::{Servers, new_token},
};

/// A node with an agent. The agent is dropped before the node.
#[derive(Debug)]
pub struct Stage {
    /// The agent; it can be killed and started again.
    pub agent: Agent,
    /// Connected to the socket that the KNI kubelet uses.
    pub kubelet: Kubelet,
    /// The node.
    pub node: Node,
}

impl Stage {
    /// A fresh node whose agent has read `manifests`.
    pub async fn start(name: &str, manifests: Vec<Manifest>) -> Result<Self> {
        Self::on(Node::new(name)?, manifests).await
    }

    /// Starts the agent on an existing node.
    pub async fn on(node: Node, manifests: Vec<Manifest>) -> Result<Self> {
        Self::with(node, AgentOptions::new(manifests, &[])).await
    }

    /// [`Self::on`] with the given options of the agent.
    pub async fn with(node: Node, options: AgentOptions) -> Result<Self> {
        let agent = Agent::start(&node, options)?;
        let kubelet = Kubelet::connect(&node, KUBELET_SOCKET).await?;
        Ok(Self { agent, kubelet, node })
    }

    /// A pod of the default network.
    pub async fn pod(&self, name: &str) -> Result<Pod> {
        self.pod_with(name, &[]).await
    }

    /// A pod of `network` with these addresses.
    pub async fn pod_in(&self, network: &str, name: &str, ips: &str) -> Result<Pod> {
        self.pod_with(name, &[("kni.dev/network", network), ("kni.dev/ips", ips)])
            .await
    }

    /// A pod with these annotations.
    pub async fn pod_with(&self, name: &str, annotations: &[(&str, &str)]) -> Result<Pod> {
        let pod = self.kubelet.run_pod("team", name, annotations).await;
        pod.with_context(|| format!("run pod {name}"))
    }

    /// The status that the agent reports.
    pub async fn status(&self) -> Result<GetStatusResponse> {
        let status = self.kubelet.runtime().get_status(GetStatusRequest {}).await?;
        Ok(status.into_inner())
    }

    /// All interfaces that the agent lists.
    pub async fn interfaces(&self) -> Result<Vec<Interface>> {
        let all = ListInterfacesRequest::default();
        let listed = self.kubelet.runtime().list_interfaces(all).await?;
        Ok(listed.into_inner().interfaces)
    }

    /// The listed interface of a pod.
    pub async fn interface(&self, pod: &Pod, ifname: &str) -> Result<Interface> {
        let request = ListInterfacesRequest {
            sandbox_id: pod.id.clone(),
            ..Default::default()
        };
        let listed = self.kubelet.runtime().list_interfaces(request).await?.into_inner();
        let found = listed.interfaces.into_iter().find(|i| i.ifname == ifname);
        found.with_context(|| format!("{ifname} of {} is not listed", pod.name))
    }

    /// The MAC addresses of an interface's two ends: the pod's, then the gateway's.
    pub async fn macs(&self, pod: &Pod, ifname: &str) -> Result<[Mac; 2]> {
        let interface = self.interface(pod, ifname).await?;
        let mac = |text: &str| parse_mac(text).with_context(|| format!("not a MAC address: {text:?}"));
        Ok([mac(&interface.mac)?, mac(&interface.host_mac)?])
    }

    /// Packets of a pod that were dropped in `direction` for `reason`, summed over its interfaces.
    pub async fn drops(&self, pod: &Pod, direction: &str, reason: &str) -> Result<u64> {
        let listed = self.kubelet.runtime().list_drops(ListDropsRequest {}).await?;
        let listed = listed.into_inner().drops;
        Ok(listed
            .iter()
            .filter(|drop| drop.pod_name == pod.name && drop.direction == direction && drop.reason == reason)
            .filter_map(|drop| drop.count.as_ref())
            .map(|count| count.packets)
            .sum())
    }

    /// Waits until at least `count` such drops are counted, and returns how many: of packets that their sender repeats,
    /// such as those of TCP, there may be more.
    pub async fn wait_for_drops_from(&self, pod: &Pod, direction: &str, reason: &str, count: u64) -> Result<u64> {
        eventually(patience(), async || {
            let counted = self.drops(pod, direction, reason).await?;
            ensure!(counted >= count, "{counted} are counted");
            Ok(counted)
        })
        .await
    }

    /// Waits until exactly `count` such drops are counted.
    pub async fn wait_for_drops(&self, pod: &Pod, direction: &str, reason: &str, count: u64) -> Result<()> {
        let counted = self.wait_for_drops_from(pod, direction, reason, count).await;
        ensure!(
            counted.as_ref().is_ok_and(|counted| *counted == count),
            "{counted:?} drops of {} {direction} for {reason}, not {count}; all drops:\n{}",
            pod.name,
            self.knictl(&["drops"])?
        );
        Ok(())
    }

    /// Whether a datagram of `from` arrives at the server of `to`: proved by the server, or by the counter of packets
    /// that the policies of `to` refuse, and never by silence.
    pub async fn enters(&self, from: &Pod, to: &Pod, server: &Servers, port: u16) -> Result<bool> {
        const REFUSED: &str = "policy_ingress";
        let before = self.drops(from, "from_pod", REFUSED).await?;
        let (word, at) = (new_token(), SocketAddr::new(address(to, true), port));
        from.enter(|| UdpSocket::bind("0.0.0.0:0")?.send_to(word.as_bytes(), at))??;
        eventually(patience(), async || {
            if server.saw(&word) {
                return Ok(true);
            }
            let refused = self.drops(from, "from_pod", REFUSED).await? > before;
            ensure!(refused, "a datagram of {} is neither received nor refused", from.name);
            Ok(false)
        })
        .await
    }

    /// Makes `time` pass for every flow, fragment and affinity.
    pub fn age(&self, time: Duration) -> Result<()> {
        let folder = format!("/sys/fs/bpf/kni/v{LAYOUT_VERSION}");
        self.node.enter(|| programs::age(Path::new(&folder), time))?
    }

    /// The output of knictl.
    pub fn knictl(&self, args: &[&str]) -> Result<String> {
        let program = self.node.install(&knictl_binary()?)?;
        self.node.run(program.to_str().context("not UTF-8")?, args)
    }
}

/// Makes the node, which forwards, a router for the fabric: gives the fabric routes to the pods of the default network
/// of [`Manifest::overlapping`].
pub fn forwarding(node: &Node) -> Result<()> {
    // The kernel resolves neighbours of forwarded packets from its link-local address, which a new link has only after
    // one or two seconds of duplicate address detection.
    for (ns, link, other, there, neighbour) in [
        (&**node, "uplink0", node.fabric(), "fabric0", FABRIC_V6),
        (node.fabric(), "fabric0", &**node, "uplink0", NODE_V6),
    ] {
        let shown: serde_json::Value = serde_json::from_str(&other.run("ip", &["-j", "link", "show", "dev", there])?)?;
        let mac = shown[0]["address"].as_str().context("no MAC address")?;
        ns.ip(&[&format!(
            "neighbour replace {neighbour} lladdr {mac} dev {link} nud permanent"
        )])?;
    }
    node.fabric().ip(&[
        &format!("route add 10.244.0.0/16 via {NODE_V4}"),
        &format!("route add fd00:244::/64 via {NODE_V6}"),
    ])
}

/// The address of `eth0` of a family.
///
/// # Panics
/// If the pod has none.
#[track_caller]
pub fn address(pod: &Pod, v4: bool) -> IpAddr {
    pod.ip(v4)
        .unwrap_or_else(|| panic!("{} has no address of the family: {:?}", pod.name, pod.interfaces))
}
