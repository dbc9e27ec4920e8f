//! Tests that a masqueraded flow keeps its port whatever a host outside sends, and sends nothing from a port that is
//! another flow's.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_common::layout::LAYOUT_VERSION;
use kni_integration::{
    Namespaces,
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags, parse_mac},
    node::{NODE_V4, NODE_V6},
    programs::Masqueraded,
    require,
};

use super::{
    FAMILIES, PORT,
    world::{PATIENCE, World, masquerading, server},
};

const SHORT: Duration = Duration::from_millis(20);
/// A flow checks its port about once a second.
const CHECKED: Duration = Duration::from_millis(2500);
const UDP: u8 = 17;

/// A socket of a pod that is connected to the server.
fn socket(pod: &Namespaces, v4: bool) -> Result<UdpSocket> {
    let any: IpAddr = if v4 { "0.0.0.0" } else { "::" }.parse()?;
    let socket = pod.enter(|| {
        let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
        socket.connect(server(v4))?;
        socket.set_read_timeout(Some(SHORT))?;
        std::io::Result::Ok(socket)
    })?;
    Ok(socket?)
}

/// Names that the server received, by port.
type ByPort = BTreeMap<u16, Vec<String>>;
/// Answers, by the pod that received them.
type ByPod = BTreeMap<String, Vec<String>>;

/// Sends each pod's name, and returns the names that the server received, by port, and what the pods received.
fn exchange(server: &UdpSocket, pods: &[(&str, &UdpSocket)], time: Duration) -> Result<(ByPort, ByPod)> {
    let (mut ports, mut answers) = (ByPort::new(), ByPod::new());
    let begun = Instant::now();
    while begun.elapsed() < time {
        let mut buffer = [0; 64];
        for (name, pod) in pods {
            pod.send(name.as_bytes())?;
        }
        while let Ok((length, from)) = server.recv_from(&mut buffer) {
            let name = String::from_utf8_lossy(&buffer[..length]).into_owned();
            server.send_to(name.as_bytes(), from)?;
            let names = ports.entry(from.port()).or_default();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for (name, pod) in pods {
            while let Ok(length) = pod.recv(&mut buffer) {
                let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let known = answers.entry((*name).to_owned()).or_default();
                if !known.contains(&answer) {
                    known.push(answer);
                }
            }
        }
    }
    Ok((ports, answers))
}

/// The folder of the maps inside the node.
fn maps() -> PathBuf {
    PathBuf::from(format!("/sys/fs/bpf/kni/v{LAYOUT_VERSION}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flow_that_lost_its_port_sends_nothing_from_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("lost-port", masquerading(), &["--masquerade-ports", "61000-61000"]).await?;
    let watch = world.watch()?;
    let ips = "10.10.0.11,fd10::11";
    let blue = world.stage.pod_in("blue", "lost-blue", ips).await?;
    let red = world.stage.pod_in("red", "lost-red", ips).await?;
    let there = world.outside.server.enter(|| UdpSocket::bind(server(true)))??;
    there.set_read_timeout(Some(SHORT))?;
    let (first, second) = (socket(&blue.inside, true)?, socket(&red.inside, true)?);
    let (ports, answers) = exchange(&there, &[("blue", &first)], SHORT)?;
    ensure!(ports == [(61_000, vec!["blue".to_owned()])].into(), "{ports:?}");
    ensure!(answers.len() == 1, "{answers:?}");
    let node: Ipv4Addr = NODE_V4.parse()?;
    let IpAddr::V4(from) = server(true).ip() else {
        anyhow::bail!("an IPv6 server")
    };
    let lost = world.stage.node.enter(|| -> Result<bool> {
        let mut rows = Masqueraded::open(&maps())?;
        Ok(rows.lose((from, PORT, node, 61_000), UDP))
    })??;
    ensure!(lost, "no row holds the port");
    let (ports, _) = exchange(&there, &[("red", &second)], SHORT)?;
    ensure!(ports == [(61_000, vec!["red".to_owned()])].into(), "{ports:?}");
    // Both send from now on. The first flow learns that the port is another one's, and there is no second port.
    exchange(&there, &[("blue", &first), ("red", &second)], CHECKED)?;
    let (ports, answers) = exchange(&there, &[("blue", &first), ("red", &second)], CHECKED)?;
    ensure!(
        ports == [(61_000, vec!["red".to_owned()])].into(),
        "the server receives on each port from {ports:?}"
    );
    ensure!(
        answers == [("red".to_owned(), vec!["red".to_owned()])].into(),
        "the pods receive {answers:?}"
    );
    let refused = world.stage.drops(&blue, "from_pod", "masquerade_ports").await?;
    ensure!(refused > 0, "the flow without a port is not counted");
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flow_takes_its_lost_port_again() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("again-port", masquerading(), &[]).await?;
    let pod = world.stage.pod("again-port").await?;
    let there = world.outside.server.enter(|| UdpSocket::bind(server(true)))??;
    there.set_read_timeout(Some(SHORT))?;
    let first = socket(&pod.inside, true)?;
    let (ports, _) = exchange(&there, &[("pod", &first)], SHORT)?;
    let (port, _) = ports.first_key_value().context("the server received nothing")?;
    let node: Ipv4Addr = NODE_V4.parse()?;
    let IpAddr::V4(from) = server(true).ip() else {
        anyhow::bail!("an IPv6 server")
    };
    let lost = world.stage.node.enter(|| -> Result<bool> {
        let mut rows = Masqueraded::open(&maps())?;
        Ok(rows.lose((from, PORT, node, *port), UDP))
    })??;
    ensure!(lost, "no row holds port {port}");
    exchange(&there, &[("pod", &first)], CHECKED)?;
    let (ports, answers) = exchange(&there, &[("pod", &first)], CHECKED)?;
    ensure!(
        ports == [(*port, vec!["pod".to_owned()])].into(),
        "{ports:?}, not {port}"
    );
    ensure!(answers.len() == 1, "no answer reaches the pod");
    Ok(())
}

/// A connection of the pod to the server: the pod's end, the server's end, and the pod's address as the server sees it.
fn connect(
    world: &World,
    pod: &Namespaces,
    listener: &TcpListener,
    v4: bool,
) -> Result<(TcpStream, TcpStream, SocketAddr)> {
    let _ = world;
    let client = pod.enter(|| TcpStream::connect_timeout(&server(v4), PATIENCE))??;
    let (accepted, from) = listener.accept()?;
    for stream in [&client, &accepted] {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
    }
    Ok((client, accepted, from))
}

/// Passes a byte in each direction.
fn alive((client, accepted): (&mut TcpStream, &mut TcpStream)) -> std::io::Result<()> {
    let mut byte = [0];
    client.write_all(b"x")?;
    accepted.read_exact(&mut byte)?;
    accepted.write_all(b"y")?;
    client.read_exact(&mut byte)
}

/// The MAC address of a link.
fn mac(ns: &Namespaces, link: &str) -> Result<[u8; 6]> {
    let shown: serde_json::Value = serde_json::from_str(&ns.run("ip", &["-j", "link", "show", "dev", link])?)?;
    let text = shown[0]["address"].as_str().context("no MAC address")?;
    parse_mac(text).context("not a MAC address")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_reset_ends_no_connection() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("forged", masquerading(), &[]).await?;
    let pod = world.stage.pod("forged").await?;
    let link = Link::new(
        mac(&world.outside.server, "server0")?,
        mac(&world.outside.router, "inner0")?,
    );
    let wire = PacketSocket::open(&world.outside.server, "server0")?;
    for v4 in FAMILIES {
        let listener = world.outside.server.enter(|| TcpListener::bind(server(v4)))??;
        let (mut client, mut accepted, from) = connect(&world, &pod.inside, &listener, v4)?;
        alive((&mut client, &mut accepted))?;
        for round in 0..3_u32 {
            // The sender knows addresses and ports, not the sequence numbers: the pod ignores the segment (RFC 5961).
            let reset = Payload::Tcp {
                source_port: PORT,
                destination_port: from.port(),
                flags: TcpFlags::RST,
                sequence: fastrand::u32(..),
                data: Vec::new(),
            };
            let node: IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
            wire.send(&link.frame(&Ip::new(server(v4).ip(), node).packet(&reset)))?;
            thread::sleep(Duration::from_millis(100));
            alive((&mut client, &mut accepted))
                .with_context(|| format!("IPv{}: after forged reset {round}", if v4 { 4 } else { 6 }))?;
        }
        // A connection that is reset by no host ends as before: the port is free soon.
        drop((client, accepted));
    }
    Ok(())
}
