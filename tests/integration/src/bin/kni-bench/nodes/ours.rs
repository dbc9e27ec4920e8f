//! Builds KNI's paths between two nodes, through the tunnel and without, with policies at both pods.

use std::{collections::BTreeMap, fs, path::Path as FilePath};

use anyhow::{Context as _, Result, ensure};
use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use ipnet::IpNet;
use kni_common::{
    IFINDEX_BASE, Verdict,
    address::from_ip,
    policy::{IDENTITY_ANY, IdentityData, IdentityKey, PORTS_ALL, PORTS_NONE, PolicyKey, PolicyValue},
    route::FULL_PREFIX,
};
use kni_dataplane::{
    CountingRuns, Dataplane, EndpointConfig, EventStream, FabricRows, Hop, NetworkFabric, NodeConfig, TunnelEnds, Way,
};
use kni_integration::{Namespaces, Node, frames::parse_mac, programs};
use kni_model::{EndpointId, Enforcement, MacAddr, NetworkId, PolicyStep};
use kni_netlink::{Netlink, own::OVERLAY_NAME};
use nix::net::if_::if_nametoindex;
use tokio::runtime::Runtime;

use super::wire::{HOST_END, TUNNEL_MTU, WIRE, WIRE_MTU, address_pod, connect, mac, node as wire_address, other, pod};
use crate::{path::Path, program::options};

const NETWORK: u32 = 70_000;
/// The network's number in the cluster.
const NUMBER: u32 = 8_000_000;
const ENDPOINT: u32 = 1;
/// The policy set of both pods, and the identity of the pods that it allows.
const ONLY_FRIENDS: u32 = 20;
const FRIEND: u32 = 40;
const PORT: u16 = 4789;

/// The programs of a node's interfaces.
fn attached(overlay: bool) -> Result<Vec<ProgramInfo>> {
    let mut all = Vec::new();
    for link in [HOST_END, WIRE].into_iter().chain(overlay.then_some(OVERLAY_NAME)) {
        for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
            let (_, programs) = SchedClassifier::query_tcx(link, hook).with_context(|| link.to_owned())?;
            all.extend(programs);
        }
    }
    Ok(all)
}

/// A node with a pod. The dataplane's files are in the node's own mounts.
struct Member {
    // Dropped in this order.
    dataplane: Dataplane,
    _events: EventStream,
    pod: Namespaces,
    node: Node,
}

/// Two nodes with KNI's programs.
pub(super) struct Ours {
    members: [Box<Member>; 2],
    overlay: bool,
    _runtime: Runtime,
}

impl Ours {
    /// Starts the dataplanes of two nodes whose pods reach each other through the tunnel, or by routing.
    pub(super) fn start(overlay: bool, object: Option<&FilePath>) -> Result<Self> {
        let object = object.map_or_else(
            || kni_object::embedded().map_err(Into::into),
            |path| fs::read(path).with_context(|| path.display().to_string()),
        )?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let name = if overlay { "overlay" } else { "native" };
        let nodes = [1, 2].map(|number| Node::new(&format!("{name}-node{number}")));
        let [one, two] = nodes;
        let nodes = [one?, two?];
        connect([&nodes[0], &nodes[1]])?;
        let [one, two] = nodes;
        let members = [
            Box::new(Member::start(one, 1, overlay, &object, &runtime)?),
            Box::new(Member::start(two, 2, overlay, &object, &runtime)?),
        ];
        Ok(Self {
            members,
            overlay,
            _runtime: runtime,
        })
    }

    pub(super) fn path(&self) -> Path {
        let [client, server] = &self.members;
        let (key, title) = if self.overlay {
            ("overlay", "KNI overlay, policies")
        } else {
            ("native", "KNI native, policies")
        };
        Path {
            key,
            title,
            client: client.pod.clone(),
            server: server.pod.clone(),
            address: pod(2).into(),
            services: None,
            keep: Vec::new(),
        }
    }

    /// The kernel counts the runs of all programs while the value lives.
    pub(super) fn count_runs(&self) -> Result<CountingRuns> {
        let [member, _] = &self.members;
        Ok(member.dataplane.count_program_runs()?)
    }

    /// Runs and nanoseconds of the programs at all interfaces of both nodes, by name, since they were loaded.
    pub(super) fn statistics(&self) -> Result<BTreeMap<String, (u64, u64)>> {
        let mut all = BTreeMap::<String, (u64, u64)>::new();
        for member in &self.members {
            for info in member.node.enter(|| attached(self.overlay))?? {
                let name = info.name_as_str().context("a program without a name")?;
                let sum = all.entry(name.to_owned()).or_default();
                sum.0 += info.run_count();
                sum.1 += u64::try_from(info.run_time().as_nanos())?;
            }
        }
        Ok(all)
    }

    /// What the programs dropped, for messages.
    pub(super) fn drops(&self) -> String {
        let drops = self.members.each_ref().map(|member| member.dataplane.drops());
        format!("drops at {}: {drops:?}", self.path().title)
    }

    /// Checks that the pods' packets took the path to be measured, and that none was dropped.
    pub(super) fn check(&self) -> Result<()> {
        let wanted = if self.overlay {
            Verdict::Tunnelled
        } else {
            Verdict::Routed
        };
        for (number, member) in (1..).zip(&self.members) {
            let forwarded = member.dataplane.forwarded(EndpointId(ENDPOINT))?;
            let sent = forwarded.iter().filter(|(_, verdict, _)| *verdict == wanted);
            let sent: u64 = sent.map(|(_, _, count)| count.packets).sum();
            let dropped = member.dataplane.drops()?;
            ensure!(
                sent > 1000,
                "node {number}: only {sent} packets were {}",
                wanted.as_str()
            );
            ensure!(
                dropped.iter().map(|drop| drop.count.packets).sum::<u64>() < 100,
                "node {number}: packets were dropped: {dropped:?}"
            );
        }
        Ok(())
    }
}

impl Member {
    fn start(node: Node, number: u8, overlay: bool, object: &[u8], runtime: &Runtime) -> Result<Self> {
        let inside = Namespaces::fresh_net(&format!("{}-pod", node.name()))?;
        let index = IFINDEX_BASE + ENDPOINT;
        node.ip(&[
            &format!(
                "link add {HOST_END} index {index} type veth peer name eth0 netns {}",
                inside.net_path().display()
            ),
            &format!("link set {HOST_END} addrgenmode none up"),
        ])?;
        let mtu = if overlay { TUNNEL_MTU } else { WIRE_MTU };
        inside.ip(&[&format!("link set eth0 addrgenmode none mtu {mtu} up")])?;
        address_pod(&inside, pod(number), &mac(&node, HOST_END)?)?;
        let macs = [mac(&inside, "eth0")?, mac(&node, HOST_END)?];
        let handle = runtime.handle();
        let (dataplane, events) = node.enter(|| -> Result<_> {
            let _in_runtime = handle.enter();
            let opened = Dataplane::open(&options(object.to_owned()))?;
            configure(&opened.0, number, &macs)?;
            let tunnel = if overlay {
                let attach = async { anyhow::Ok(opened.0.attach_overlay(OVERLAY_NAME)?) };
                let made = async { Netlink::new()?.ensure_overlay(PORT, TUNNEL_MTU, attach).await };
                Some(handle.block_on(made)?)
            } else {
                None
            };
            opened.0.attach_uplink(WIRE, if_nametoindex(WIRE)?)?;
            lead(&opened.0, number, tunnel)?;
            Ok(opened)
        })??;
        Ok(Self {
            dataplane,
            _events: events,
            pod: inside,
            node,
        })
    }
}

/// Publishes the pod, whose policies allow the pod of the other node and no other.
fn configure(dataplane: &Dataplane, number: u8, macs: &[String; 2]) -> Result<()> {
    // The pods open more connections in a second than their share of the flow table.
    dataplane.configure(&NodeConfig {
        flows_per_endpoint: 0,
        ..NodeConfig::default()
    })?;
    let network = NetworkId::try_from(NETWORK)?;
    dataplane.set_routes(network, &programs::routes(&["10.244.0.0/16".parse()?], false))?;
    let row = |identity, direction, ports| {
        let key = PolicyKey {
            set: ONLY_FRIENDS,
            identity,
            direction,
        };
        (key, PolicyValue { ports, rule: 1 })
    };
    let rows = [0, 1].into_iter().flat_map(|direction| {
        [
            row(IDENTITY_ANY, direction, PORTS_NONE),
            row(FRIEND, direction, PORTS_ALL),
        ]
    });
    let identity = IdentityKey {
        prefix_length: FULL_PREFIX,
        data: IdentityData {
            network: NETWORK.to_be_bytes(),
            address: from_ip(pod(other(number)).into()),
        },
    };
    let enforcement = Enforcement {
        policy: ONLY_FRIENDS,
        identity4: FRIEND,
        identity6: FRIEND,
    };
    dataplane.apply_policy(&[
        PolicyStep::PutPolicy(rows.collect()),
        PolicyStep::PutIdentities(vec![(identity, FRIEND)]),
        PolicyStep::Enforce(vec![(EndpointId(ENDPOINT), enforcement)]),
    ])?;
    let [mac, host_mac] = macs.each_ref().map(|text| parse_mac(text).context("a MAC address"));
    dataplane.publish(&EndpointConfig {
        endpoint: EndpointId(ENDPOINT),
        network,
        ipv4: Some(pod(number)),
        ipv6: None,
        mac: MacAddr(mac?),
        host_mac: MacAddr(host_mac?),
        host_access: false,
        xdp: false,
        plugin: None,
        shaped: false,
    })?;
    Ok(dataplane.attach(HOST_END, EndpointId(ENDPOINT))?)
}

/// Leads to the pods of the other node, through this tunnel device or without one.
fn lead(dataplane: &Dataplane, number: u8, tunnel: Option<u32>) -> Result<()> {
    let there = other(number);
    let way = Way {
        underlay: wire_address(there).into(),
        overlay: tunnel.is_some(),
    };
    let hop = Hop {
        ifindex: Some(tunnel.map_or_else(|| if_nametoindex(WIRE), Ok)?),
        mtu: if tunnel.is_some() { TUNNEL_MTU } else { WIRE_MTU },
        stamp: 1,
    };
    let network = NetworkFabric {
        number: tunnel.map(|_| NUMBER),
        blocks: [(IpNet::new(pod(there).into(), 24)?.trunc(), way)].into(),
        exposed: tunnel.is_none(),
        ..NetworkFabric::default()
    };
    Ok(dataplane.set_fabric(&FabricRows {
        tunnel: tunnel.map(|_| TunnelEnds {
            ipv4: Some(wire_address(number)),
            ipv6: None,
            port: PORT,
            host_network: None,
        }),
        ways: [(way, hop)].into(),
        networks: [(NetworkId::try_from(NETWORK)?, network)].into(),
        egress: BTreeMap::new(),
    })?)
}
