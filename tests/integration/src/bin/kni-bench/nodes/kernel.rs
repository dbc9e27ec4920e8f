//! Builds the paths between two nodes that the kernel forwards without programs.

use anyhow::Result;
use kni_integration::Namespaces;

use super::wire::{HOST_END, TUNNEL_MTU, WIRE, WIRE_MTU, address_pod, connect, mac, make_pod, node, other, pod};
use crate::path::Path;

const VXLAN: &str = "vxlan0";
const BRIDGE: &str = "bridge0";

/// Two nodes without programs.
struct Pair {
    nodes: [Namespaces; 2],
    /// None where the nodes themselves are the ends.
    pods: Vec<Namespaces>,
}

impl Pair {
    /// Connects two nodes, with a pod each whose interface has this MTU.
    fn new(name: &str, pod_mtu: Option<u32>) -> Result<Self> {
        let nodes = [
            Namespaces::fresh_net(&format!("{name}-node1"))?,
            Namespaces::fresh_net(&format!("{name}-node2"))?,
        ];
        connect(nodes.each_ref())?;
        let mut pods = Vec::new();
        if let Some(mtu) = pod_mtu {
            for (number, inside) in (1..=2).zip(&nodes) {
                pods.push(make_pod(inside, &format!("{name}-pod{number}"), mtu)?);
            }
        }
        Ok(Self { nodes, pods })
    }

    /// The numbers, nodes and pods.
    fn each(&self) -> impl Iterator<Item = (u8, &Namespaces, &Namespaces)> {
        let pods = self.nodes.iter().zip(&self.pods);
        (1..).zip(pods).map(|(number, (node, pod))| (number, node, pod))
    }

    fn path(self, key: &'static str, title: &'static str) -> Path {
        let [first, second] = &self.nodes;
        let (client, server, address) = match self.pods.as_slice() {
            [client, server] => (client, server, pod(2)),
            _ => (first, second, node(2)),
        };
        Path {
            key,
            title,
            client: client.clone(),
            server: server.clone(),
            address: address.into(),
            services: None,
            keep: vec![Box::new(self.nodes)],
        }
    }
}

/// The nodes themselves are the ends.
pub(super) fn bare() -> Result<Path> {
    Ok(Pair::new("bare", None)?.path("bare", "bare veth pair between the nodes"))
}

/// A pod's address is a route to the host end, as with ptp and with all that build on it.
fn route_to_pods(pair: &Pair) -> Result<()> {
    for (number, node, inside) in pair.each() {
        address_pod(inside, pod(number), &mac(node, HOST_END)?)?;
        node.ip(&[&format!("route add {}/32 dev {HOST_END}", pod(number))])?;
    }
    Ok(())
}

/// What leads to the pods of the other node.
fn block(number: u8) -> String {
    format!("10.244.{number}.0/24")
}

/// Routes to the pods and between the nodes, without a tunnel.
pub(super) fn routed() -> Result<Path> {
    let pair = Pair::new("routed", Some(WIRE_MTU))?;
    route_to_pods(&pair)?;
    for (number, inside, _) in pair.each() {
        let there = other(number);
        inside.ip(&[&format!("route add {} via {} dev {WIRE}", block(there), node(there))])?;
    }
    Ok(pair.path("routed", "routing, no tunnel"))
}

/// The MAC address of a node's VXLAN device.
fn vtep(number: u8) -> String {
    format!("02:00:00:00:99:{number:02}")
}

/// Makes the VXLAN device, with an entry for each node instead of learning.
fn add_vxlan(inside: &Namespaces, number: u8, more: &str) -> Result<()> {
    inside.ip(&[
        &format!(
            "link add {VXLAN} address {} mtu {TUNNEL_MTU} type vxlan id 1 local {} dev {WIRE} dstport 4789 {more}",
            vtep(number),
            node(number)
        ),
        &format!("link set {VXLAN} up"),
    ])
}

fn add_entry(inside: &Namespaces, mac: &str, number: u8) -> Result<()> {
    let there = node(number).to_string();
    let entry = ["fdb", "append", mac, "dev", VXLAN, "dst", &there];
    inside.run("bridge", &entry).map(drop)
}

/// The kernel routes to a VXLAN device, whose neighbour and forwarding entries are static.
pub(super) fn vxlan() -> Result<Path> {
    let pair = Pair::new("vxlan", Some(TUNNEL_MTU))?;
    route_to_pods(&pair)?;
    for (number, inside, _) in pair.each() {
        let there = other(number);
        add_vxlan(inside, number, "nolearning")?;
        add_entry(inside, &vtep(there), there)?;
        let gateway = format!("10.244.{there}.0");
        inside.ip(&[
            &format!("address add 10.244.{number}.0/32 dev {VXLAN}"),
            &format!(
                "neighbour add {gateway} lladdr {} dev {VXLAN} nud permanent",
                vtep(there)
            ),
            &format!("route add {} via {gateway} dev {VXLAN} onlink", block(there)),
        ])?;
    }
    Ok(pair.path("vxlan", "kernel VXLAN with routing"))
}

/// All pods are on one link, a bridge on each node with a VXLAN device as a port.
pub(super) fn bridge() -> Result<Path> {
    let pair = Pair::new("bridge", Some(TUNNEL_MTU))?;
    for (number, inside, in_pod) in pair.each() {
        add_vxlan(inside, number, "")?;
        add_entry(inside, "00:00:00:00:00:00", other(number))?;
        inside.ip(&[
            &format!("link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
            &format!("link set {BRIDGE} up"),
            &format!("link set {VXLAN} master {BRIDGE}"),
            &format!("link set {HOST_END} master {BRIDGE}"),
        ])?;
        in_pod.add_address("eth0", &format!("{}/16", pod(number)))?;
    }
    Ok(pair.path("bridge_vxlan", "bridge over VXLAN"))
}
