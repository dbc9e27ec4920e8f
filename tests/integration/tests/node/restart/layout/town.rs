//! Provides pods with connections of every kind: direct, of the node, through a Service, to themselves, out of the
//! node, and to a port of it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    AgentOptions, Manifest, Namespaces, Node, Outside, Pod, Stage, eventually_sync,
    manifest::network_policy,
    node::NODE_V4,
    traffic::{Servers, Stream, new_token, tcp_get},
};
use kni_proto::kni::{PortMapping, Protocol};

use super::former;
use crate::{
    egress::world::{World, server},
    services::objects::{FRONT, State, endpoint, service, slice, vip},
};

const OPEN: u16 = 8080;
const CLOSED: u16 = 8081;
const HOST_PORT: u16 = 18_080;
const PATIENCE: Duration = Duration::from_secs(15);
/// Time until UDP flows in use are established: they are used in three different windows of about a second.
const ESTABLISHED: Duration = Duration::from_secs(30);
/// Between two uses of the flows until they are established.
const PAUSE: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_millis(400);

/// The node and its pods.
pub(super) struct Town {
    pub(super) world: World,
    client: Pod,
    _pods: Vec<Pod>,
    _servers: Vec<Servers>,
}

/// The addresses of the pods of the default network.
fn ips(last: u8) -> [IpAddr; 2] {
    [
        [10, 244, 7, last].into(),
        [0xfd00, 0x244, 0, 0, 0, 0, 7, u16::from(last)].into(),
    ]
}

fn manifests() -> Vec<Manifest> {
    let mut all = Manifest::overlapping();
    let default = all
        .remove(0)
        .spec("egress: {mode: Masquerade}")
        .spec("serviceSubnets: [\"10.96.0.0/16\", \"fd00:96::/112\"]");
    let spec = "{podSelector: {}, ingress: [{ports: [{protocol: TCP, port: 8080}, {protocol: UDP, port: 8080}]}]}";
    let policy = Manifest::file("policy.yaml", network_policy("team", "one-port", spec));
    let mut objects = vec![service("web", 1), service("self", 2)];
    for (name, pods) in [("web", &[2_u8, 3][..]), ("self", &[1][..])] {
        for (family, v4) in [(0, true), (1, false)] {
            let endpoints = pods.iter().map(|last| endpoint(ips(*last)[family], State::Ready));
            objects.push(slice(name, "only", v4, endpoints));
        }
    }
    all.extend([default, policy, Manifest::of("services.yaml", &objects)]);
    all
}

impl Town {
    /// Runs the pods under the agent at `agent`, or under this release's.
    pub(super) async fn build(name: &str, agent: Option<PathBuf>, hook: &str) -> Result<Self> {
        let node = Node::new(name)?;
        let outside = Outside::new(&node)?;
        let options = AgentOptions {
            embedded_programs: agent.is_some(),
            binary: agent,
            ..AgentOptions::new(
                manifests(),
                &[
                    "--warm-sandboxes",
                    "1",
                    "--node-name",
                    "here",
                    "--zone",
                    "near",
                    "--hook",
                    hook,
                ],
            )
        };
        let stage = Stage::with(node, options).await?;
        let world = World { stage, outside };
        let mut pods = Vec::new();
        for (name, last) in [("client", 1), ("web", 2), ("other", 3)] {
            let addresses = ips(last).map(|ip| ip.to_string()).join(",");
            let mapping = (name == "web").then(|| PortMapping {
                protocol: Protocol::Tcp.into(),
                container_port: OPEN.into(),
                host_port: HOST_PORT.into(),
                host_ip: String::new(),
            });
            let wish = [("kni.dev/ips", addresses.as_str())];
            let pod = world.stage.kubelet.run_pod_with("team", name, &wish, |request| {
                request.port_mappings = mapping.into_iter().collect();
            });
            pods.push(pod.await.with_context(|| format!("run {name}"))?);
        }
        let mut servers = vec![world.serve()?];
        for pod in &pods {
            servers.push(Servers::start(&pod.inside, &pod.name, OPEN)?);
            servers.push(Servers::start(&pod.inside, &pod.name, CLOSED)?);
        }
        Ok(Self {
            world,
            client: pods.remove(0),
            _pods: pods,
            _servers: servers,
        })
    }

    /// Where connections of each kind go, from whom, and who answers; a Service has two backends.
    fn ways(&self) -> Result<Vec<(&'static str, &Namespaces, SocketAddr)>> {
        let client = &self.client.inside;
        let node: &Namespaces = &self.world.stage.node;
        let mut ways = vec![(
            "host port",
            &self.world.outside.server,
            SocketAddr::new(NODE_V4.parse()?, HOST_PORT),
        )];
        for (family, v4) in [(0, true), (1, false)] {
            ways.extend([
                ("direct", client, SocketAddr::new(ips(2)[family], OPEN)),
                ("of the node", node, SocketAddr::new(ips(2)[family], OPEN)),
                ("ClusterIP", client, SocketAddr::new(vip(v4, 1), FRONT)),
                ("hairpin", client, SocketAddr::new(vip(v4, 2), FRONT)),
                ("masqueraded", client, server(v4)),
            ]);
        }
        Ok(ways)
    }

    /// Opens a stream and an idle connection of every kind and transport, and idle ones of the numbers.
    pub(super) fn open(&self, [tcp, udp, masqueraded, services]: [usize; 4]) -> Result<Flows> {
        let mut flows = Flows::default();
        for (kind, from, to) in self.ways()? {
            flows.idle(kind, from, to, true)?;
            flows.streams.push((kind, to, Stream::tcp(from, to)?));
            if kind != "host port" {
                flows.idle(kind, from, to, false)?;
                flows.streams.push((kind, to, Stream::udp(from, to)?));
            }
        }
        let client = &self.client.inside;
        for number in 0..tcp.max(udp).max(masqueraded).max(services) {
            let family = number % 2;
            let direct = SocketAddr::new(ips(2)[family], OPEN);
            for (kind, count, to, is_tcp) in [
                ("direct", tcp, direct, true),
                ("direct", udp, direct, false),
                ("masqueraded", masqueraded, server(family == 0), number % 4 < 2),
                (
                    "ClusterIP",
                    services,
                    SocketAddr::new(vip(family == 0, 1), FRONT),
                    number % 4 < 2,
                ),
            ] {
                if number < count {
                    flows.idle(kind, client, to, is_tcp)?;
                }
            }
        }
        self.establish(&mut flows)?;
        Ok(flows)
    }

    /// Uses the flows until those of UDP are established, too: until then they expire within ten seconds, less than a
    /// start of the agent takes on a busy machine.
    fn establish(&self, flows: &mut Flows) -> Result<()> {
        eventually_sync(ESTABLISHED, || {
            let young = former::unestablished(&self.world.stage.node)?;
            if young > 0 {
                flows.ask()?;
                thread::sleep(PAUSE);
            }
            ensure!(young == 0, "{young} UDP flows are not established");
            Ok(())
        })
    }

    /// What a policy forbids stays silent.
    pub(super) fn assert_policy(&self, when: &str) -> Result<()> {
        for ip in ips(2) {
            let answer = tcp_get(&self.client.inside, ip, CLOSED, SILENCE);
            ensure!(answer.is_err(), "{when}: {ip}:{CLOSED} answers {answer:?}");
        }
        Ok(())
    }

    /// New connections of every kind are opened.
    pub(super) fn assert_opens(&self, when: &str) -> Result<()> {
        for (kind, from, to) in self.ways()? {
            let answer = tcp_get(from, to.ip(), to.port(), PATIENCE);
            ensure!(answer.is_ok(), "{when}: {kind} to {to}: {answer:?}");
        }
        Ok(())
    }
}

/// Connections that must live on.
#[derive(Default)]
pub(super) struct Flows {
    streams: Vec<(&'static str, SocketAddr, Stream)>,
    idle: Vec<Idle>,
}

impl Flows {
    fn idle(&mut self, kind: &'static str, from: &Namespaces, to: SocketAddr, is_tcp: bool) -> Result<()> {
        let opened = Idle::open(kind, from, to, is_tcp);
        self.idle.push(opened.with_context(|| format!("{kind} to {to}"))?);
        Ok(())
    }

    /// Every idle connection is answered, by whom it was answered before.
    pub(super) fn ask(&mut self) -> Result<()> {
        for idle in &mut self.idle {
            let answer = idle.ask().with_context(|| format!("{} to {}", idle.kind, idle.to))?;
            ensure!(
                answer == idle.identity,
                "{} to {}: {answer}, not {}",
                idle.kind,
                idle.to,
                idle.identity
            );
        }
        Ok(())
    }

    /// Each is answered, by whom it was answered before.
    pub(super) fn assert_whole(self) -> Result<()> {
        let mut broken = Vec::new();
        let count = self.idle.len();
        for mut idle in self.idle {
            let answered = idle.ask();
            if !matches!(&answered, Ok(identity) if *identity == idle.identity) {
                let transport = if matches!(idle.socket, Socket::Tcp(_)) {
                    "TCP"
                } else {
                    "UDP"
                };
                broken.push(format!(
                    "{} {transport} to {}, answered by {}: {answered:?}",
                    idle.kind, idle.to, idle.identity
                ));
            }
        }
        let streams = self.streams.len();
        for (kind, to, stream) in self.streams {
            let report = stream.stop();
            if report.sent == 0 || report.lost() > 0 || report.broken.is_some() || report.identities.len() != 1 {
                broken.push(format!("stream, {kind} to {to}: {report:?}"));
            }
        }
        println!(
            "{count} idle connections and {streams} streams, {} broken",
            broken.len()
        );
        ensure!(broken.is_empty(), "broken:\n{}", broken.join("\n"));
        Ok(())
    }
}

enum Socket {
    Tcp(BufReader<TcpStream>),
    Udp(UdpSocket),
}

/// A connection that is idle meanwhile.
struct Idle {
    kind: &'static str,
    to: SocketAddr,
    identity: String,
    socket: Socket,
}

impl Idle {
    fn open(kind: &'static str, from: &Namespaces, to: SocketAddr, is_tcp: bool) -> Result<Self> {
        let socket = from.enter(|| -> std::io::Result<Socket> {
            if is_tcp {
                let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                return Ok(Socket::Tcp(BufReader::new(stream)));
            }
            let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(Socket::Udp(socket))
        })??;
        let mut idle = Self {
            kind,
            to,
            identity: String::new(),
            socket,
        };
        // Twice: the opener continues after the reply.
        idle.ask()?;
        idle.identity = idle.ask()?;
        Ok(idle)
    }

    /// Who answers.
    fn ask(&mut self) -> Result<String> {
        let question = new_token();
        let answer = match &mut self.socket {
            Socket::Tcp(stream) => {
                stream.get_mut().write_all(format!("{question}\n").as_bytes())?;
                let mut line = String::new();
                stream.read_line(&mut line)?;
                line
            }
            Socket::Udp(socket) => {
                socket.send(question.as_bytes())?;
                let mut buffer = [0; 2048];
                let length = socket.recv(&mut buffer)?;
                String::from_utf8_lossy(&buffer[..length]).into_owned()
            }
        };
        ensure!(answer.contains(&question), "it answered {answer:?}");
        Ok(answer.split(' ').next().unwrap_or_default().to_owned())
    }
}
