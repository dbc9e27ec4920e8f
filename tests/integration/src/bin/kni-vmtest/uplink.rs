//! Checks egress and host ports: masquerading, ports of the node, refused sources, and VLANs beside them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_common::{Direction, Verdict};
use kni_dataplane::{
    Dataplane, EgressRow, EgressSource, HostPort, NetworkRoutes, NodeRoutes, RouteEgress, XdpChoice, host_port_key,
};
use kni_integration::{
    Namespaces, eventually_sync,
    frames::{Ip, Link, Mac, PacketSocket, Payload},
    programs,
    traffic::{Servers, new_token, tcp_get_to, udp_ask_to},
};
use kni_model::{EndpointId, MacAddr, NetworkId};
use kni_netlink::{Netlink, VethSpec, netns};

use super::{
    checks::PATIENCE,
    pods::{PORT, Pod, Pods, run, subnets},
};

const UPLINK: &str = "uplink0";
const OUTSIDE: &str = "/run/kni-vmtest/outside";
const NODE_MAC: Mac = [2, 0, 0, 0, 9, 1];
const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 9, 2];
/// Addresses of the node and of the machine outside: at the uplink, and in VLAN 100 of it.
const NODE: [&str; 2] = ["192.0.2.2/24", "2001:db8:2::2/64"];
const PEER: [&str; 2] = ["192.0.2.9/24", "2001:db8:2::9/64"];
const NODE_VLAN: [&str; 2] = ["192.0.3.2/24", "2001:db8:3::2/64"];
const PEER_VLAN: [&str; 2] = ["192.0.3.9/24", "2001:db8:3::9/64"];
/// The pod that leaves the node, and that a port of the node leads to.
const INSIDE: &str = "blue-2";
/// Port of the node that leads to the pod.
const HOST_PORT: u16 = 30_080;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The control information of a tag without a VLAN: priority 5.
const PRIORITY: u16 = 5 << 13;

/// Makes an uplink, runs the checks, and removes it again.
pub(crate) async fn check(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    let host = Netlink::new()?;
    let path = Path::new(OUTSIDE);
    netns::create(path).await?;
    let result = with_namespace(dataplane, pods, &host, path).await;
    let removed = async {
        dataplane.detach_uplink(Some(UPLINK))?;
        if let Some(link) = host.get_link(UPLINK).await? {
            dataplane.set_uplink_xdp(UPLINK, link.ifindex, XdpChoice::Off)?;
            host.delete_link(link.ifindex, UPLINK).await?;
        }
        netns::remove(path).await?;
        dataplane.set_uplink(None)?;
        let pod = pods.named(INSIDE)?;
        dataplane.set_masquerade(EndpointId(pod.id), &EgressRow::None)?;
        dataplane.set_routes(NetworkId::try_from(pod.network)?, &programs::routes(&subnets(), false))?;
        anyhow::Ok(())
    };
    let removed = removed.await;
    result?;
    removed
}

async fn with_namespace(dataplane: &Dataplane, pods: &Pods, host: &Netlink, path: &Path) -> Result<()> {
    let spec = VethSpec {
        host_name: UPLINK.parse()?,
        host_ifindex: None,
        host_mac: MacAddr(NODE_MAC),
        alias: "the uplink of the test".to_owned(),
        pod_name: "eth0".parse()?,
        pod_mac: MacAddr(OUTSIDE_MAC),
        mtu: 1500,
    };
    let indexes = host.create_veth(&spec, &netns::open(path)?).await?;
    let outside = pods.node.net_at("outside", path)?;
    address(UPLINK, &NODE)?;
    vlan(UPLINK, &NODE_VLAN)?;
    outside.enter(|| -> Result<()> {
        run("ip", &["link", "set", "lo", "up"])?;
        address("eth0", &PEER)?;
        vlan("eth0", &PEER_VLAN)
    })??;
    host.wait_for_carrier(indexes.host).await?;
    dataplane.attach_uplink(UPLINK, indexes.host)?;
    dataplane.set_uplink_xdp(UPLINK, indexes.host, XdpChoice::Generic)?;
    dataplane.set_uplink(Some(indexes.host))?;
    let pod = pods.named(INSIDE)?;
    masquerade(dataplane, pod, &outside)?;
    host_ports(dataplane, pod, &outside)?;
    sources(dataplane, pod, &outside)?;
    vlans(dataplane, pods, pod, &outside)
}

fn address(interface: &str, addresses: &[&str]) -> Result<()> {
    for address in addresses {
        // Duplicate address detection would delay the first packets.
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/accept_dad"), "0")?;
        run("ip", &["address", "add", address, "dev", interface])?;
    }
    run("ip", &["link", "set", interface, "up"])
}

fn vlan(interface: &str, addresses: &[&str]) -> Result<()> {
    let name = format!("{interface}.100");
    run(
        "ip",
        &[
            "link", "add", "link", interface, "name", &name, "type", "vlan", "id", "100",
        ],
    )?;
    address(&name, addresses)
}

fn ip(address: &str) -> Result<IpAddr> {
    Ok(address.parse::<IpNet>()?.addr())
}

/// Checks that a pod reaches a server outside, which sees an address of the node.
fn masquerade(dataplane: &Dataplane, pod: &Pod, outside: &Namespaces) -> Result<()> {
    let network = NetworkId::try_from(pod.network)?;
    let egress = NetworkRoutes {
        egress: RouteEgress::Masquerade { host_access: false },
        ..programs::routes(&subnets(), false)
    };
    dataplane.set_routes(network, &egress)?;
    dataplane.set_node_routes(NodeRoutes {
        own: NODE.iter().map(|one| ip(one)).collect::<Result<_>>()?,
        ..NodeRoutes::default()
    })?;
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (ip(NODE[0])?, ip(NODE[1])?) else {
        unreachable!("one address of each family")
    };
    let source = EgressSource {
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        first: 61_000,
        last: 65_535,
        shared_v4: false,
        shared_v6: false,
    };
    dataplane.set_masquerade(EndpointId(pod.id), &EgressRow::From(source))?;
    let _servers = Servers::start(outside, "outside", PORT)?;
    for (peer, own) in PEER.iter().zip(&NODE) {
        let at = SocketAddr::new(ip(peer)?, PORT);
        for (what, answer) in [
            ("TCP", tcp_get_to(&pod.inside, at, &new_token(), PATIENCE)),
            ("UDP", udp_ask_to(&pod.inside, at, &new_token(), PATIENCE)),
        ] {
            let answer = answer.map_err(|error| anyhow::anyhow!("{what} to {at}: {error}"))?;
            ensure!(
                answer.identity == "outside" && answer.client.ip() == ip(own)? && answer.client.port() >= 61_000,
                "{what} to {at}: {answer:?}"
            );
        }
    }
    println!("a pod leaves the node with the node's address and gets its answers");
    Ok(())
}

/// Checks that a port of the node leads to the pod.
fn host_ports(dataplane: &Dataplane, pod: &Pod, outside: &Namespaces) -> Result<()> {
    let mut ports = BTreeMap::new();
    // A host port is one at all addresses of the node, those in VLANs included.
    for address in NODE.iter().chain(&NODE_VLAN) {
        for protocol in [TCP, UDP] {
            let target = HostPort {
                endpoint: EndpointId(pod.id),
                port: PORT,
            };
            ports.insert(host_port_key(ip(address)?, protocol, HOST_PORT), target);
        }
    }
    dataplane.set_host_ports(&ports)?;
    for address in NODE {
        asked(outside, ip(address)?, &pod.name)?;
    }
    println!("a port of the node leads to its pod");
    Ok(())
}

/// Asks a host port by TCP and UDP.
fn asked(outside: &Namespaces, address: IpAddr, expected: &str) -> Result<()> {
    let at = SocketAddr::new(address, HOST_PORT);
    for (what, answer) in [
        ("TCP", tcp_get_to(outside, at, &new_token(), PATIENCE)),
        ("UDP", udp_ask_to(outside, at, &new_token(), PATIENCE)),
    ] {
        let identity = answer.map(|answer| answer.identity);
        ensure!(
            identity.as_deref() == Ok(expected),
            "{what} to {at}: {identity:?}, not {expected}"
        );
    }
    Ok(())
}

/// Checks that a tag without a VLAN neither hides a refused source nor keeps another packet from its pod.
fn sources(dataplane: &Dataplane, pod: &Pod, outside: &Namespaces) -> Result<()> {
    dataplane.set_sources(&BTreeMap::from([
        ("172.16.0.0/12".parse()?, Verdict::BogonSource),
        ("fd00:bad::/32".parse()?, Verdict::BogonSource),
    ]))?;
    let dropped = || -> Result<u64> {
        let all = dataplane.drops()?;
        let found = all
            .iter()
            .find(|drop| drop.direction == Direction::FromUplink && drop.reason == Verdict::BogonSource);
        Ok(found.map_or(0, |drop| drop.count.packets))
    };
    let socket = PacketSocket::open(outside, "eth0")?;
    let link = Link::new(OUTSIDE_MAC, NODE_MAC);
    for (own, peer, bogon) in [(NODE[0], PEER[0], "172.16.0.9"), (NODE[1], PEER[1], "fd00:bad::9")] {
        for (what, link) in [
            ("no tag", link.clone()),
            ("a priority tag", link.clone().vlan(PRIORITY)),
        ] {
            let frame = |from: IpAddr, token: &str| -> Result<Vec<u8>> {
                let text = format!("{token}\n");
                Ok(link.frame(&Ip::new(from, ip(own)?).packet(&Payload::udp(4000, HOST_PORT, text.as_bytes()))))
            };
            let (before, token) = (dropped()?, new_token());
            socket.send(&frame(bogon.parse()?, &token)?)?;
            eventually_sync(PATIENCE, || {
                ensure!(dropped()? > before, "{bogon} with {what}: no drop for bogon_source");
                Ok(())
            })?;
            ensure!(!pod.servers.saw(&token), "{bogon} with {what} reached the pod");
            let token = new_token();
            socket.send(&frame(ip(peer)?, &token)?)?;
            let saw = pod.servers.saw_within(&token, PATIENCE);
            ensure!(saw, "{peer} with {what} did not reach the pod");
        }
    }
    println!("a priority tag hides no refused source and keeps no other packet from its pod");
    Ok(())
}

/// Checks that packets in a VLAN of the uplink are left to the stack, whatever their destination is at the uplink.
fn vlans(dataplane: &Dataplane, pods: &Pods, pod: &Pod, outside: &Namespaces) -> Result<()> {
    let _servers = Servers::start(&pods.node, "node", HOST_PORT)?;
    for address in NODE_VLAN {
        asked(outside, ip(address)?, "node").context("in the VLAN")?;
    }
    for address in NODE {
        asked(outside, ip(address)?, &pod.name).context("beside the VLAN")?;
    }
    dataplane.set_host_ports(&BTreeMap::new())?;
    dataplane.set_sources(&BTreeMap::new())?;
    println!("packets in a VLAN are left to the stack");
    Ok(())
}
