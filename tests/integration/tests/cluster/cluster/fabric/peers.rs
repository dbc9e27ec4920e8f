//! Tests network policies during changes of a peer on another node: labels that change, and pods that replace others.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces,
    cluster::wire::ip_packet,
    frames::PacketSocket,
    oracle::Labels,
    patience, require,
    traffic::{Servers, Stream},
    world::{Net, NinePods, PLACEMENTS, PolicyText, Setting, Spread, index_of},
};
use socket2::{Domain, Socket, Type};

use super::super::scene::PORT;

/// Timeout of an answer on an established flow, and of a new connection. The next round receives slower ones.
const ANSWER: Duration = Duration::from_millis(50);
const CONNECT: Duration = Duration::from_millis(200);
/// How long a stopped flow must stay silent.
const SILENCE: Duration = Duration::from_secs(1);
/// A flow of which no packet arrives for this time has stopped: the client sends in several rounds meanwhile.
const STOPPED: Duration = Duration::from_millis(250);
/// The ends of the flows.
const CLIENT: &str = "y/b";
const SERVER: &str = "x/a";

/// A policy at one end of flows from y/b to x/a, which selects the other end by a label.
struct Side {
    what: &'static str,
    policy: (&'static str, &'static str),
    /// The end with the label.
    peer: &'static str,
    role: &'static str,
    /// Another pod with the label, and its flow.
    other: &'static str,
    control: (&'static str, &'static str),
}

const SIDES: [Side; 2] = [
    Side {
        what: "at the receiver",
        policy: (
            "x",
            "{podSelector: {matchLabels: {pod: a}}, \
             ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {role: client}}}]}]}",
        ),
        peer: "y/b",
        role: "client",
        other: "z/c",
        control: ("z/c", "x/a"),
    },
    Side {
        what: "at the sender",
        policy: (
            "y",
            "{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], \
             egress: [{to: [{namespaceSelector: {}, podSelector: {matchLabels: {role: server}}}]}]}",
        ),
        peer: "x/a",
        role: "server",
        other: "z/b",
        control: ("y/b", "z/b"),
    },
];

/// The IP protocol number of TCP.
const TCP: u8 = 6;
/// The flags of a TCP segment that is a reset and nothing else (RFC 9293, section 3.1).
const RESET: u8 = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_relabelled_or_replaced_peer_on_another_node_reaches_established_flows() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let placement = PLACEMENTS[0];
    ensure!(placement[index_of(CLIENT)] != placement[index_of(SERVER)]);
    let mut world = NinePods::spread("fabric-peers", placement).await?;
    for side in SIDES {
        let what = side.what;
        let mut setting = Setting::default();
        for pod in [side.peer, side.other] {
            setting.pods[index_of(pod)].insert("role".into(), side.role.into());
        }
        let policy = PolicyText::new(side.policy.0, "peers", side.policy.1);
        world.apply(Net::Default, &[policy], &setting).await?;
        relabelled(&mut world, &side)
            .await
            .with_context(|| format!("relabelled, {what}"))?;
        replaced(&mut world, &side)
            .await
            .with_context(|| format!("replaced, {what}"))?;
    }
    Ok(())
}

/// The peer loses its label and gets it again, while a flow of another labelled pod loses nothing.
async fn relabelled(world: &mut NinePods<Spread>, side: &Side) -> Result<()> {
    let peer = index_of(side.peer);
    let [labelled, plain] = side.labels();
    let _server = serve(world, SERVER)?;
    let (from, to) = side.control;
    let _other = (to != SERVER).then(|| serve(world, to)).transpose()?;
    let control = Stream::tcp(&world.member(index_of(from)).inside, at(world, to, true))?;
    let mut flows = Flows::start(world, None)?;
    flows.wait_for([true; 4], Instant::now()).context("with the label")?;
    world.relabel(peer, &plain).await?;
    let stopped = flows.wait_until_stopped(world).context("without the label")?;
    flows.assert_silent(world)?;
    let report = control.stop();
    report.assert_whole(to);
    world.relabel(peer, &labelled).await?;
    let again = new_flows_pass(world).context("with the label again")?;
    println!(
        "{}: stopped after {stopped:?}, new ones pass after {again:?}; {} answers to another peer, none lost",
        side.what, report.answered
    );
    Ok(())
}

/// The peer is replaced by a pod with the same addresses without the label, which then gets the label, and by one that
/// has the label.
async fn replaced(world: &mut NinePods<Spread>, side: &Side) -> Result<()> {
    let peer = index_of(side.peer);
    let [labelled, plain] = side.labels();
    let mut server = Some(serve(world, SERVER)?);
    let mut flows = Flows::start(world, None)?;
    flows.wait_for([true; 4], Instant::now()).context("before")?;
    if side.peer == SERVER {
        drop(server.take());
        world.replace(peer, &plain).await?;
        server = Some(serve(world, SERVER)?);
    } else {
        let ports = flows.ports()?;
        drop(flows);
        world.replace(peer, &plain).await?;
        // The new pod sends from the same ports.
        flows = Flows::start(world, Some(ports))?;
    }
    flows.assert_silent(world).context("another pod without the label")?;
    drop(flows);
    world.relabel(peer, &labelled).await?;
    let relabelled = new_flows_pass(world).context("another pod gets the label")?;
    if side.peer == SERVER {
        drop(server.take());
    }
    world.replace(peer, &labelled).await?;
    if side.peer == SERVER {
        server = Some(serve(world, SERVER)?);
    }
    let replaced = new_flows_pass(world).context("a third pod with the label")?;
    drop(server);
    println!(
        "{}: flows of a new peer pass {relabelled:?} after it gets the label, {replaced:?} after it runs with it",
        side.what
    );
    Ok(())
}

impl Side {
    /// The labels of the peer with the role and without it.
    fn labels(&self) -> [Labels; 2] {
        let plain = Setting::default().pods[index_of(self.peer)].clone();
        let mut labelled = plain.clone();
        labelled.insert("role".into(), self.role.into());
        [labelled, plain]
    }
}

/// How long it takes until new flows pass in both families.
fn new_flows_pass(world: &NinePods<Spread>) -> Result<Duration> {
    let start = Instant::now();
    Flows::start(world, None)?.wait_for([true; 4], start)
}

fn at(world: &NinePods<Spread>, pod: &str, v4: bool) -> SocketAddr {
    SocketAddr::new(world.addresses().of(index_of(pod), Net::Default, v4), PORT)
}

fn serve(world: &NinePods<Spread>, pod: &str) -> Result<Servers> {
    Servers::start(&world.member(index_of(pod)).inside, pod, PORT)
}

/// TCP and UDP from the client to the server, in IPv4 and IPv6.
struct Flows([Flow; 2]);

impl Flows {
    /// From free ports, or from these ports of TCP and UDP for each family.
    fn start(world: &NinePods<Spread>, ports: Option<[[u16; 2]; 2]>) -> Result<Self> {
        let inside = &world.member(index_of(CLIENT)).inside;
        let [four, six] = ports.unwrap_or_default();
        Ok(Self([
            Flow::start(inside, at(world, SERVER, true), four)?,
            Flow::start(inside, at(world, SERVER, false), six)?,
        ]))
    }

    fn ports(&self) -> Result<[[u16; 2]; 2]> {
        let [four, six] = &self.0;
        Ok([four.ports()?, six.ports()?])
    }

    /// Sends on all of them: which are answered.
    fn heard(&mut self) -> Result<[bool; 4]> {
        let [four, six] = &mut self.0;
        let [tcp4, udp4] = four.heard()?;
        let [tcp6, udp6] = six.heard()?;
        Ok([tcp4, udp4, tcp6, udp6])
    }

    /// Waits until exactly these are answered; returns the duration since `start`.
    fn wait_for(&mut self, expected: [bool; 4], start: Instant) -> Result<Duration> {
        let limit = patience();
        loop {
            let heard = self.heard()?;
            if heard == expected {
                return Ok(start.elapsed());
            }
            ensure!(
                start.elapsed() < limit,
                "waited {limit:?} in vain: TCP and UDP of IPv4, then of IPv6, are answered: {heard:?}"
            );
        }
    }

    /// Waits until no packet of the client arrives at the server; returns the duration.
    fn wait_until_stopped(&mut self, world: &NinePods<Spread>) -> Result<Duration> {
        let (start, limit) = (Instant::now(), patience());
        loop {
            let (arrived, _) = self.sent_for(world, STOPPED)?;
            if arrived.is_none() {
                return Ok(start.elapsed());
            }
            ensure!(
                start.elapsed() < limit,
                "waited {limit:?} in vain: a packet arrives: {arrived:?}"
            );
        }
    }

    /// No packet of the client arrives at the server for a while, and so none is answered in the end. Answers to
    /// earlier packets may come late.
    fn assert_silent(&mut self, world: &NinePods<Spread>) -> Result<()> {
        let (arrived, heard) = self.sent_for(world, SILENCE)?;
        ensure!(arrived.is_none(), "a packet arrives: {arrived:?}");
        ensure!(heard == [false; 4], "answered: {heard:?}");
        Ok(())
    }

    /// Sends on all flows for this time: the first packet of the client that arrives at the server, and which of the
    /// last ones were answered.
    fn sent_for(&mut self, world: &NinePods<Spread>, time: Duration) -> Result<(Option<Vec<u8>>, [bool; 4])> {
        let client = [true, false].map(|v4| at(world, CLIENT, v4).ip());
        let arriving = PacketSocket::open(&world.member(index_of(SERVER)).inside, "eth0")?;
        let is_from_client = |frame: &[u8]| {
            ip_packet(frame).is_some_and(|(source, _, protocol, segment)| {
                // The client's stack answers the server's end of an earlier connection with a reset.
                let is_reset = protocol == TCP && segment.get(13) == Some(&RESET);
                client.contains(&source) && !is_reset
            })
        };
        thread::scope(|scope| {
            let arrived = scope.spawn(|| arriving.receive(time, is_from_client));
            let start = Instant::now();
            let mut heard = self.heard()?;
            // At least two rounds, of which the first may hear late answers.
            for round in 0.. {
                if round > 0 && start.elapsed() >= time {
                    break;
                }
                heard = self.heard()?;
            }
            let arrived = arrived.join().expect("the recorder does not panic")?;
            Ok((arrived, heard))
        })
    }
}

/// A TCP connection, unless it was not accepted yet, and a UDP socket.
struct Flow {
    inside: Namespaces,
    server: SocketAddr,
    ports: [u16; 2],
    tcp: Option<TcpStream>,
    udp: UdpSocket,
}

impl Flow {
    /// Port 0 is any free one.
    fn start(inside: &Namespaces, server: SocketAddr, ports: [u16; 2]) -> Result<Self> {
        let udp = inside.enter(|| -> std::io::Result<UdpSocket> {
            let socket = UdpSocket::bind(any(server, ports[1]))?;
            socket.connect(server)?;
            Ok(socket)
        })??;
        udp.set_read_timeout(Some(ANSWER))?;
        let mut flow = Self {
            inside: inside.clone(),
            server,
            ports,
            tcp: None,
            udp,
        };
        flow.connect()?;
        Ok(flow)
    }

    fn connect(&mut self) -> Result<()> {
        let (server, from) = (self.server, any(self.server, self.ports[0]));
        let connected = self.inside.enter(|| -> std::io::Result<TcpStream> {
            let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&from.into())?;
            socket.connect_timeout(&server.into(), CONNECT)?;
            Ok(socket.into())
        })?;
        match connected {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(ANSWER))?;
                self.tcp = Some(stream);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(()),
            Err(error) => Err(error).with_context(|| format!("TCP from {from} to {server}")),
        }
    }

    /// The local ports of TCP and UDP.
    fn ports(&self) -> Result<[u16; 2]> {
        let tcp = self.tcp.as_ref().context("no connection")?;
        Ok([tcp.local_addr()?.port(), self.udp.local_addr()?.port()])
    }

    /// Whether anything answers on TCP and on UDP.
    fn heard(&mut self) -> Result<[bool; 2]> {
        if self.tcp.is_none() {
            self.connect()?;
        }
        let mut buffer = [0; 2048];
        // An error of an earlier datagram is no answer.
        let sent = self.udp.send(b"datagram");
        let tcp = match &mut self.tcp {
            Some(stream) => {
                stream.write_all(b"line\n")?;
                match stream.read(&mut buffer) {
                    // The end of the server, before its pod is replaced.
                    Ok(0) => {
                        self.tcp = None;
                        false
                    }
                    Ok(_) => true,
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
                    Err(error) => return Err(error).context("TCP"),
                }
            }
            None => false,
        };
        Ok([tcp, sent.is_ok() && self.udp.recv(&mut buffer).is_ok()])
    }
}

fn any(server: SocketAddr, port: u16) -> SocketAddr {
    let any: IpAddr = if server.is_ipv4() {
        [0; 4].into()
    } else {
        [0; 16].into()
    };
    SocketAddr::new(any, port)
}
