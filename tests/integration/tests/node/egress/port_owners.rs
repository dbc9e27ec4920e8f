//! Tests that a masqueraded flow keeps its port whatever a host outside sends, and sends nothing from a port that is
//! another flow's.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_common::layout::LAYOUT_VERSION;
use kni_integration::{
    Namespaces, eventually_sync,
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags, parse_mac},
    node::{NODE_V4, NODE_V6},
    on_one_cpu, patience,
    programs::Masqueraded,
    require,
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, server},
};

/// How long a round of questions waits for what may not come.
const SHORT: Duration = Duration::from_millis(20);
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
type ByPort = BTreeMap<u16, BTreeSet<String>>;
/// Names in the answers, by the pod that received them.
type ByPod = BTreeMap<String, BTreeSet<String>>;

/// What was received in some rounds.
#[derive(Debug, Default)]
struct Received {
    ports: ByPort,
    answers: ByPod,
    /// How many of its own questions each pod was answered in the round that sent them.
    answered: BTreeMap<String, u32>,
}

/// A server, and pods that ask it.
struct Exchange<'a> {
    server: &'a UdpSocket,
    pods: &'a [(&'a str, &'a UdpSocket)],
    /// Rounds so far: each question names its own.
    round: u32,
}

impl Exchange<'_> {
    /// One question of each pod, and the answers.
    fn round(&mut self, received: &mut Received) -> Result<()> {
        self.round += 1;
        let mut buffer = [0; 64];
        let name_of = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        for (name, pod) in self.pods {
            pod.send(format!("{name} {}", self.round).as_bytes())?;
        }
        let last = self.pods.last().map(|(name, _)| format!("{name} {}", self.round));
        while let Ok((length, from)) = self.server.recv_from(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            self.server.send_to(text.as_bytes(), from)?;
            received.ports.entry(from.port()).or_default().insert(name_of(&text));
            if Some(text) == last {
                break;
            }
        }
        for (name, pod) in self.pods {
            let own = format!("{name} {}", self.round);
            while let Ok(length) = pod.recv(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let answers = received.answers.entry((*name).to_owned()).or_default();
                answers.insert(name_of(&text));
                if text == own {
                    *received.answered.entry((*name).to_owned()).or_default() += 1;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Rounds until the last of the pods, whose questions are sent after those of the others, was answered so often.
    /// Everything that the others sent before has then arrived, too, or was dropped.
    fn until_answered(&mut self, times: u32) -> Result<Received> {
        let mut received = Received::default();
        let (last, _) = self.pods.last().context("a pod")?;
        on_one_cpu(|| {
            eventually_sync(patience(), || {
                self.round(&mut received)?;
                let answered = received.answered.get(*last).copied().unwrap_or(0);
                ensure!(answered >= times, "{last} was answered {answered} times: {received:?}");
                Ok(())
            })
        })?;
        Ok(received)
    }
}

/// One name at one port.
fn only(port: u16, name: &str) -> ByPort {
    [(port, [name.to_owned()].into())].into()
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
    let pods = [("blue", &first), ("red", &second)];
    let mut exchange = Exchange {
        server: &there,
        pods: &pods[..1],
        round: 0,
    };
    let alone = exchange.until_answered(3)?;
    ensure!(alone.ports == only(61_000, "blue"), "{alone:?}");
    let node: Ipv4Addr = NODE_V4.parse()?;
    let IpAddr::V4(from) = server(true).ip() else {
        anyhow::bail!("an IPv6 server")
    };
    let lost = world.stage.node.enter(|| -> Result<bool> {
        let mut rows = Masqueraded::open(&maps())?;
        Ok(rows.lose((from, PORT, node, 61_000), UDP))
    })??;
    ensure!(lost, "no row holds the port");
    exchange.pods = &pods[1..];
    let other = exchange.until_answered(3)?;
    ensure!(other.ports == only(61_000, "red"), "{other:?}");
    // Both send from now on. The first flow checks its port about once a second: then it learns that the port is
    // another one's, and there is no second port.
    exchange.pods = &pods;
    let deadline = Instant::now() + patience();
    while world.stage.drops(&blue, "from_pod", "masquerade_ports").await? == 0 {
        let mut unheeded = Received::default();
        exchange.round(&mut unheeded)?;
        ensure!(
            Instant::now() < deadline,
            "the flow without a port is not refused: {unheeded:?}"
        );
    }
    // Answers of before.
    exchange.until_answered(1)?;
    let before = world.stage.drops(&blue, "from_pod", "masquerade_ports").await?;
    let both = exchange.until_answered(50)?;
    ensure!(
        both.ports == only(61_000, "red"),
        "the server receives on each port from {both:?}"
    );
    ensure!(
        both.answers == [("red".to_owned(), ["red".to_owned()].into())].into(),
        "the pods receive {both:?}"
    );
    let refused = world.stage.drops(&blue, "from_pod", "masquerade_ports").await?;
    ensure!(
        refused >= before + 50,
        "of 50 questions only {} are counted as refused",
        refused - before
    );
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
    let mut exchange = Exchange {
        server: &there,
        pods: &[("pod", &first)],
        round: 0,
    };
    let before = exchange.until_answered(3)?;
    let (port, _) = before.ports.first_key_value().context("the server received nothing")?;
    let node: Ipv4Addr = NODE_V4.parse()?;
    let IpAddr::V4(from) = server(true).ip() else {
        anyhow::bail!("an IPv6 server")
    };
    let lost = world.stage.node.enter(|| -> Result<bool> {
        let mut rows = Masqueraded::open(&maps())?;
        Ok(rows.lose((from, PORT, node, *port), UDP))
    })??;
    ensure!(lost, "no row holds port {port}");
    // It checks its port about once a second. Until then no answer finds the pod.
    let after = exchange.until_answered(50)?;
    ensure!(after.ports == only(*port, "pod"), "{after:?}, not {port}");
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
    let client = pod.enter(|| TcpStream::connect_timeout(&server(v4), patience()))??;
    let (accepted, from) = listener.accept()?;
    for stream in [&client, &accepted] {
        stream.set_read_timeout(Some(patience()))?;
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
