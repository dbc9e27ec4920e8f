//! Tests that pods reach external hosts with the node's address and a port of the range, and receive their own answers.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Namespaces,
    echo::{tcp_echo, udp_echo},
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags, crc32c},
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::{NoAnswer, Servers, new_token, ping, tcp_get, udp_ask},
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

fn is_nodes(client: SocketAddr, v4: bool) -> bool {
    let node = if v4 { NODE_V4 } else { NODE_V6 };
    client.ip().to_string() == node && (61_000..=65_535).contains(&client.port())
}

#[tokio::test(flavor = "multi_thread")]
async fn tcp_udp_and_echo_leave_with_the_nodes_address() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("leave", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let servers = world.serve()?;
    let pods = [
        world.stage.pod("leave-1").await?,
        world.stage.pod_in("blue", "leave-blue", "10.10.0.11,fd10::11").await?,
    ];
    for v4 in FAMILIES {
        for pod in &pods {
            let to = server(v4);
            for answer in [
                tcp_get(&pod.inside, to.ip(), PORT, patience()),
                udp_ask(&pod.inside, to.ip(), PORT, patience()),
            ] {
                let answer = answer.with_context(|| format!("{} to {to}", pod.name))?;
                assert_eq!(answer.identity, "server");
                assert!(is_nodes(answer.client, v4), "the server saw {}", answer.client);
            }
            let token = new_token();
            ping(&pod.inside, to.ip(), &token, patience()).with_context(|| format!("{} pings {to}", pod.name))?;
            assert!(servers.saw_within(&token, patience()), "nobody saw the echo request");
            tcp_echo(
                &pod.inside,
                SocketAddr::new(to.ip(), 7),
                &world.outside.server,
                7,
                4 << 20,
            )?;
            // A fragmented datagram.
            udp_echo(&pod.inside, SocketAddr::new(to.ip(), 7), &world.outside.server, 7, 9000)?;
        }
    }
    watch.assert_clean();
    Ok(())
}

/// A UDP socket of a pod with the given port.
fn bound(pod: &Namespaces, from: SocketAddr, to: SocketAddr) -> Result<UdpSocket> {
    let socket = pod.enter(|| {
        let socket = UdpSocket::bind(from)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(patience()))?;
        std::io::Result::Ok(socket)
    })?;
    Ok(socket?)
}

fn ask(socket: &UdpSocket, question: &str) -> Result<String> {
    socket.send(question.as_bytes())?;
    let mut buffer = [0; 512];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_address_and_port_in_two_networks_get_their_own_answers() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("twins", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let ips = "10.10.0.11,fd10::11";
    let pods = [
        world.stage.pod_in("blue", "twin-blue", ips).await?,
        world.stage.pod_in("red", "twin-red", ips).await?,
    ];
    for v4 in FAMILIES {
        let sockets = [0, 1].map(|at| {
            bound(
                &pods[at].inside,
                SocketAddr::new(address(&pods[at], v4), 4000),
                server(v4),
            )
        });
        let [blue, red] = sockets;
        let (blue, red) = (blue?, red?);
        let mut clients = std::collections::BTreeSet::new();
        for round in 0..200 {
            for (socket, name) in [(&blue, "blue"), (&red, "red")] {
                let question = format!("{name}-{round}");
                let answer = ask(socket, &question).with_context(|| question.clone())?;
                assert!(answer.ends_with(&format!(" {question}")), "{name} got {answer}");
                clients.insert(answer.split(' ').nth(1).unwrap_or_default().to_owned());
            }
        }
        assert_eq!(clients.len(), 2, "each keeps a port of its own: {clients:?}");
    }
    watch.assert_clean();
    Ok(())
}

const TCP: u8 = 6;
const SCTP: u8 = 132;

/// The transport header of a frame with its payload, if it is of this family and protocol.
fn transport(frame: &[u8], v4: bool, protocol: u8) -> Option<&[u8]> {
    let (at, header) = if v4 { (9, 20) } else { (6, 40) };
    let ip = frame.get(14..)?;
    (ip.first()? >> 4 == if v4 { 4 } else { 6 } && *ip.get(at)? == protocol).then(|| ip.get(header..))?
}

fn port_at(segment: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([segment[at], segment[at + 1]])
}

#[tokio::test(flavor = "multi_thread")]
async fn sctp_leaves_and_is_answered_with_right_checksums() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("sctp", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let pod = world.stage.pod("sctp").await?;
    let [own, gateway] = world.stage.macs(&pod, "eth0").await?;
    let inside = PacketSocket::open(&pod.inside, "eth0")?;
    let server_side = PacketSocket::open(&world.outside.server, "server0")?;
    for v4 in FAMILIES {
        let asked = Ip::new(address(&pod, v4), server(v4).ip()).packet(&Payload::sctp_init(4000, PORT));
        inside.send(&Link::new(own, gateway).frame(&asked))?;
        let is_init = |frame: &[u8]| transport(frame, v4, SCTP).is_some_and(|packet| port_at(packet, 2) == PORT);
        let seen = server_side
            .receive(patience(), is_init)?
            .context("the server saw nothing")?;
        let mut packet = transport(&seen, v4, SCTP).context("not SCTP")?.to_vec();
        let port = port_at(&packet, 0);
        assert!((61_000..=65_535).contains(&port), "{port}");
        let sum = u32::from_le_bytes(packet[8..12].try_into()?);
        packet[8..12].fill(0);
        assert_eq!(crc32c(&packet), sum, "the checksum covers the new port");
        // An answer sent at the server's interface, because its kernel has no SCTP.
        let node: std::net::IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let answer = Ip::new(server(v4).ip(), node).packet(&Payload::sctp_init(PORT, port));
        let back = Link::new(seen[..6].try_into()?, seen[6..12].try_into()?);
        server_side.send(&back.frame(&answer))?;
        let is_answer = |frame: &[u8]| transport(frame, v4, SCTP).is_some_and(|packet| port_at(packet, 2) == 4000);
        let seen = inside
            .receive(patience(), is_answer)?
            .context("the pod saw no answer")?;
        let mut packet = transport(&seen, v4, SCTP).context("not SCTP")?.to_vec();
        let sum = u32::from_le_bytes(packet[8..12].try_into()?);
        packet[8..12].fill(0);
        assert_eq!((port_at(&packet, 0), crc32c(&packet)), (PORT, sum));
    }
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_syn_keeps_its_port() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let world = World::start("again", masquerading(), &[]).await?;
    let watch = world.watch()?;
    // No host has this address.
    let silence = format!(
        "add table inet silence\nadd chain inet silence input {{ type filter hook input priority 0; }}\nadd rule inet silence input tcp dport {PORT} drop\n"
    );
    world.outside.server.nft(&silence)?;
    let pod = world.stage.pod("again").await?;
    let [own, gateway] = world.stage.macs(&pod, "eth0").await?;
    let inside = PacketSocket::open(&pod.inside, "eth0")?;
    let server_side = PacketSocket::open(&world.outside.server, "server0")?;
    for v4 in FAMILIES {
        let mut ports = Vec::new();
        for source in [4000, 4000, 4001, 4000, 4001] {
            let asked = Ip::new(address(&pod, v4), server(v4).ip()).packet(&Payload::tcp(source, PORT, TcpFlags::SYN));
            inside.send(&Link::new(own, gateway).frame(&asked))?;
            let is_syn = |frame: &[u8]| transport(frame, v4, TCP).is_some_and(|segment| port_at(segment, 2) == PORT);
            let seen = server_side
                .receive(patience(), is_syn)?
                .context("the server saw nothing")?;
            ports.push(port_at(transport(&seen, v4, TCP).context("not TCP")?, 0));
        }
        let [first, again, other, at_last, other_again] = ports[..] else {
            anyhow::bail!("{ports:?}")
        };
        assert_eq!((again, at_last, other_again), (first, first, other), "{ports:?}");
        assert_ne!(first, other, "another connection has a port of its own");
    }
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_is_reached_by_pods_of_the_default_network_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("inward", masquerading(), &[]).await?;
    let watch = world.watch()?;
    // A subnet on a second interface, with its own host.
    let beside = Namespaces::fresh_net("inward-beside")?;
    world.stage.node.veth("side0", &beside, "host0")?;
    for (ns, link, addresses) in [
        (&*world.stage.node, "side0", ["172.30.0.1/24", "fd30::1/64"]),
        (&beside, "host0", ["172.30.0.2/24", "fd30::2/64"]),
    ] {
        for address in addresses {
            ns.add_address(link, address)?;
        }
    }
    beside.ip(&["route add default via 172.30.0.1", "route add default via fd30::1"])?;
    kni_integration::stage::forwarding(&world.stage.node)?;
    // The agent has detected the change by the time of the next answer.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let _on_node = Servers::start(&world.stage.node, "node", PORT)?;
    let _on_side = Servers::start(&beside, "side", PORT)?;
    let pod = world.stage.pod("inward").await?;
    let blue = world.stage.pod_in("blue", "inward-blue", "10.10.0.11,fd10::11").await?;
    for v4 in FAMILIES {
        let node = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let side = if v4 { "172.30.0.2" } else { "fd30::2" }.parse()?;
        for (to, identity) in [(node, "node"), (side, "side")] {
            let answer = tcp_get(&pod.inside, to, PORT, patience()).with_context(|| format!("to {to}"))?;
            assert_eq!(answer.identity, identity);
            assert_eq!(
                answer.client.ip(),
                address(&pod, v4),
                "the stack has the pod's own address"
            );
        }
        let before = world.stage.drops(&blue, "from_pod", "no_route").await?;
        let asked = udp_ask(&blue.inside, node, PORT, Duration::from_millis(300));
        assert_eq!(asked, Err(NoAnswer::Timeout));
        world
            .stage
            .wait_for_drops(&blue, "from_pod", "no_route", before + 1)
            .await?;
    }
    watch.finish()?;
    Ok(())
}
