//! Builds the paths that KNI is compared with.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use kni_integration::Namespaces;
use nix::net::if_::if_nametoindex;

use super::LIMIT;
use crate::bpf::{Attached, Program};
use crate::path::Path;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, 1);
const SERVER6: Ipv6Addr = Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, 2);
/// The gateway of pods with host routes.
const GATEWAY: &str = "169.254.1.1";
const GATEWAY6: &str = "fe80::1";
const CLIENT_MAC: &str = "02:00:00:00:88:01";
const SERVER_MAC: &str = "02:00:00:00:88:02";

/// The paths of both families without a decision.
pub(crate) fn limits() -> Result<Vec<Path>> {
    let v4 = redirect_peer().context("bare redirect_peer")?;
    for (pod, address, gateway) in [(&v4.client, CLIENT6, SERVER_MAC), (&v4.server, SERVER6, CLIENT_MAC)] {
        pod.add_address("eth0", &format!("{address}/128"))?;
        pod.ip(&[
            &format!("route add default via {GATEWAY6} dev eth0"),
            &format!("neighbour add {GATEWAY6} dev eth0 lladdr {gateway} nud permanent"),
        ])?;
    }
    let v6 = Path {
        key: "redirect_peer_v6",
        title: "bare redirect_peer, IPv6",
        client: v4.client.clone(),
        server: v4.server.clone(),
        address: SERVER6.into(),
        services: None,
        keep: Vec::new(),
    };
    Ok(vec![v4, v6])
}

/// All baseline paths.
pub(super) fn all() -> Result<Vec<Path>> {
    Ok(vec![
        loopback().context("loopback")?,
        veth().context("bare veth pair")?,
        bridge().context("bridge")?,
        routed().context("routed veth")?,
        redirect_peer().context("bare redirect_peer")?,
    ])
}

fn loopback() -> Result<Path> {
    let namespace = Namespaces::fresh_net("loopback")?;
    Ok(Path {
        key: "loopback",
        title: "loopback in one namespace",
        client: namespace.clone(),
        server: namespace,
        address: Ipv4Addr::LOCALHOST.into(),
        services: None,
        keep: Vec::new(),
    })
}

fn path(key: &'static str, title: &'static str, pods: Pods) -> Path {
    Path {
        key,
        title,
        client: pods.client,
        server: pods.server,
        address: SERVER.into(),
        services: None,
        keep: vec![Box::new(pods.host)],
    }
}

fn veth() -> Result<Path> {
    let client = Namespaces::fresh_net("veth-client")?;
    let server = Namespaces::fresh_net("veth-server")?;
    client.veth("eth0", &server, "eth0")?;
    client.add_address("eth0", &format!("{CLIENT}/24"))?;
    server.add_address("eth0", &format!("{SERVER}/24"))?;
    Ok(Path {
        key: "veth",
        title: "bare veth pair",
        client,
        server,
        address: SERVER.into(),
        services: None,
        keep: Vec::new(),
    })
}

/// A node's namespace with a veth to each of two pods: `host-client` and `host-server`.
struct Pods {
    host: Namespaces,
    client: Namespaces,
    server: Namespaces,
}

impl Pods {
    fn new(name: &str) -> Result<Self> {
        let pods = Self {
            host: Namespaces::fresh_net(&format!("{name}-node"))?,
            client: Namespaces::fresh_net(&format!("{name}-client"))?,
            server: Namespaces::fresh_net(&format!("{name}-server"))?,
        };
        pods.host.veth("host-client", &pods.client, "eth0")?;
        pods.host.veth("host-server", &pods.server, "eth0")?;
        Ok(pods)
    }

    /// Configures host routes through a gateway, as in KNI; each pod's gateway has the given MAC address.
    fn route(&self, client_gateway: &str, server_gateway: &str) -> Result<()> {
        for (pod, address, gateway) in [
            (&self.client, CLIENT, client_gateway),
            (&self.server, SERVER, server_gateway),
        ] {
            pod.add_address("eth0", &format!("{address}/32"))?;
            pod.ip(&[
                &format!("route add {GATEWAY} dev eth0 scope link"),
                &format!("route add default via {GATEWAY} dev eth0"),
                &format!("neighbour add {GATEWAY} dev eth0 lladdr {gateway} nud permanent"),
            ])?;
        }
        Ok(())
    }
}

fn bridge() -> Result<Path> {
    let pods = Pods::new("bridge")?;
    pods.host.ip(&[
        "link add bridge0 type bridge forward_delay 0",
        "link set bridge0 up",
        "link set host-client master bridge0",
        "link set host-server master bridge0",
    ])?;
    pods.client.add_address("eth0", &format!("{CLIENT}/24"))?;
    pods.server.add_address("eth0", &format!("{SERVER}/24"))?;
    Ok(path("bridge", "Linux bridge", pods))
}

fn routed() -> Result<Path> {
    let pods = Pods::new("routed")?;
    let mac = |link: &str| -> Result<String> {
        let shown = pods.host.run("ip", &["-o", "link", "show", "dev", link])?;
        let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
        Ok(mac.context("no MAC address")?.to_owned())
    };
    pods.route(&mac("host-client")?, &mac("host-server")?)?;
    // The entries of /proc/sys/net depend on the network namespace of the thread that opens them.
    pods.host
        .enter(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1"))??;
    pods.host.ip(&[
        &format!("route add {CLIENT}/32 dev host-client"),
        &format!("route add {SERVER}/32 dev host-server"),
    ])?;
    Ok(path("routed", "routed veth (ptp)", pods))
}

fn redirect_peer() -> Result<Path> {
    let pods = Pods::new("redirect-peer")?;
    pods.client.ip(&[&format!("link set eth0 address {CLIENT_MAC}")])?;
    pods.server.ip(&[&format!("link set eth0 address {SERVER_MAC}")])?;
    // No program rewrites MAC addresses here: each pod uses the other one as its gateway.
    pods.route(SERVER_MAC, CLIENT_MAC)?;
    let links = pods.host.enter(|| -> Result<[Attached; 2]> {
        let (client, server) = (if_nametoindex("host-client")?, if_nametoindex("host-server")?);
        Ok([
            Program::redirect_peer(server)?.attach_ingress(client)?,
            Program::redirect_peer(client)?.attach_ingress(server)?,
        ])
    })??;
    let mut path = path(LIMIT, "bare redirect_peer", pods);
    path.keep.push(Box::new(links));
    Ok(path)
}
