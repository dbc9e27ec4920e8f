//! Connects two nodes by a veth pair, and gives each a pod: the part that all paths between nodes have in common.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use kni_integration::Namespaces;

/// The interface of each node that leads to the other one.
pub(super) const WIRE: &str = "wire0";
/// The host end of the pod's interface.
pub(super) const HOST_END: &str = "pod0";
/// The gateway of pods.
const GATEWAY: &str = "169.254.1.1";
/// Bytes that a packet of IPv4 may have between the nodes.
pub(super) const WIRE_MTU: u32 = 1500;
/// The same inside a tunnel over IPv4: outer IP, UDP and VXLAN headers, inner Ethernet header.
pub(super) const TUNNEL_MTU: u32 = WIRE_MTU - 50;

/// A node's address on the wire; nodes have the numbers 1 and 2.
pub(super) const fn node(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113, number)
}

/// The address of the node's pod.
pub(super) const fn pod(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, number, 2)
}

/// The other node.
pub(super) const fn other(number: u8) -> u8 {
    3 - number
}

/// Connects both nodes and gives them their addresses.
pub(super) fn connect(nodes: [&Namespaces; 2]) -> Result<()> {
    let [one, two] = nodes;
    one.veth(WIRE, two, WIRE)?;
    for (number, inside) in (1..).zip(nodes) {
        inside.add_address(WIRE, &format!("{}/24", node(number)))?;
        inside.set_forwarding(true)?;
    }
    Ok(())
}

/// Makes a pod of the node, with an interface of this MTU and no address.
pub(super) fn make_pod(inside: &Namespaces, name: &str, mtu: u32) -> Result<Namespaces> {
    let pod = Namespaces::fresh_net(name)?;
    inside.veth(HOST_END, &pod, "eth0")?;
    pod.ip(&[&format!("link set eth0 mtu {mtu}")])?;
    Ok(pod)
}

/// Gives the pod its address, and a default route through the host end, as container network interfaces do.
pub(super) fn address_pod(pod: &Namespaces, address: Ipv4Addr, host_mac: &str) -> Result<()> {
    pod.add_address("eth0", &format!("{address}/32"))?;
    pod.ip(&[
        &format!("route add {GATEWAY} dev eth0 scope link"),
        &format!("route add default via {GATEWAY} dev eth0"),
        &format!("neighbour add {GATEWAY} dev eth0 lladdr {host_mac} nud permanent"),
    ])
}

/// The MAC address of an interface.
pub(super) fn mac(inside: &Namespaces, link: &str) -> Result<String> {
    let shown = inside.run("ip", &["-o", "link", "show", "dev", link])?;
    let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
    Ok(mac.context("no MAC address")?.to_owned())
}
