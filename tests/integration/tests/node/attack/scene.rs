//! Provides the node of these tests: attacker and victim in one network, bystanders in another one whose flows are
//! checked by content, a server outside, and senders of crafted frames inside and outside.

use std::{
    io::{BufRead as _, BufReader, ErrorKind, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces, Pod,
    frames::{Link, PacketSocket, parse_mac},
    node::NODE_V4,
    patience,
    stage::address,
    traffic::{Servers, Stream, tcp_get},
};
use kni_proto::kni::{PortMapping, Protocol};
use serde_json::Value;

use super::PORT;
use crate::egress::world::{World, masquerading, server};

/// A port of the node that leads to the victim.
pub(crate) const NODE_PORT: u16 = 30_080;
/// Sources that the router knows and whose answers it discards.
const UNROUTED: &str = "198.18.0.0/15";

pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) attacker: Pod,
    pub(crate) victim: Pod,
    pub(crate) left: Pod,
    pub(crate) right: Pod,
    _servers: [Servers; 3],
}

impl Scene {
    pub(crate) async fn start(name: &str, args: &[&str]) -> Result<Self> {
        let world = World::start(name, masquerading(), args).await?;
        world.outside.router.ip(&[&format!("route add blackhole {UNROUTED}")])?;
        let stage = &world.stage;
        let mapping = PortMapping {
            protocol: Protocol::Tcp.into(),
            container_port: PORT.into(),
            host_port: NODE_PORT.into(),
            host_ip: String::new(),
        };
        let mapped = stage
            .kubelet
            .run_pod_with("team", "victim", &[], |request| request.port_mappings = vec![mapping]);
        let victim = mapped.await?;
        let attacker = stage.pod("attacker").await?;
        let left = stage.pod_in("blue", "left", "10.10.0.11,fd10::11").await?;
        let right = stage.pod_in("blue", "right", "10.10.0.12,fd10::12").await?;
        let servers = [
            Servers::start(&victim.inside, "victim", PORT)?,
            Servers::start(&right.inside, "right", PORT)?,
            world.serve()?,
        ];
        Ok(Self {
            world,
            attacker,
            victim,
            left,
            right,
            _servers: servers,
        })
    }

    /// Starts the flows of the bystanders: between them and across the uplink, in use and idle.
    pub(crate) fn bystanders(&self) -> Result<Bystanders> {
        let (mut streams, mut idle) = (Vec::new(), Vec::new());
        let direct = [true, false].map(|v4| ("right", SocketAddr::new(address(&self.right, v4), PORT)));
        for (identity, to) in direct
            .into_iter()
            .chain([("server", server(true)), ("server", server(false))])
        {
            streams.push((identity, Stream::tcp(&self.left.inside, to)?));
            streams.push((identity, Stream::udp(&self.left.inside, to)?));
            idle.push((identity, Idle::open(&self.left, to)?));
        }
        // Confirmed flows, which have been used for some time.
        for (_, stream) in &streams {
            stream.wait_for_answers(100)?;
        }
        Ok(Bystanders { streams, idle })
    }

    /// Checks that the pod opens connections to another pod and out of the node.
    pub(crate) fn talks_out(pod: &Pod, other: &Pod) -> Result<()> {
        let there = |ip: IpAddr, port| tcp_get(&pod.inside, ip, port, patience());
        there(server(true).ip(), PORT).with_context(|| format!("{} opens no connection out of the node", pod.name))?;
        let listener = Servers::start(&other.inside, "other", PORT + 1)?;
        there(address(other, true), PORT + 1)
            .with_context(|| format!("{} opens no connection to another pod", pod.name))?;
        drop(listener);
        Ok(())
    }

    /// Sends frames of a pod.
    pub(crate) async fn inside(&self, pod: &Pod) -> Result<Sender> {
        let [own, gateway] = self.world.stage.macs(pod, "eth0").await?;
        Ok(Sender {
            socket: PacketSocket::open(&pod.inside, "eth0")?,
            link: Link::new(own, gateway),
        })
    }

    /// Sends frames from the router to the node.
    pub(crate) fn outside(&self) -> Result<Sender> {
        let router = &self.world.outside.router;
        let mac = |ns: &Namespaces, link: &str| -> Result<_> {
            let shown: Value = serde_json::from_str(&ns.run("ip", &["-j", "link", "show", "dev", link])?)?;
            let text = shown[0]["address"].as_str().context("no MAC address")?;
            parse_mac(text).context("a MAC address")
        };
        Ok(Sender {
            socket: PacketSocket::open(router, "fabric0")?,
            link: Link::new(mac(router, "fabric0")?, mac(&self.world.stage.node, "uplink0")?),
        })
    }

    /// Packets of the pod that were dropped because of its share.
    pub(crate) async fn refused(&self, pod: &Pod, direction: &str) -> Result<u64> {
        self.world.stage.drops(pod, direction, "flow_quota").await
    }

    /// Checks that no packet of the bystanders was dropped because of the tables.
    pub(crate) async fn bystanders_are_not_named(&self) -> Result<()> {
        for pod in [&self.left, &self.right] {
            for direction in ["from_pod", "from_uplink"] {
                for reason in ["flow_quota", "flow_table_full", "fragment_without_first"] {
                    let dropped = self.world.stage.drops(pod, direction, reason).await?;
                    ensure!(dropped == 0, "{dropped} packets of {} {direction}: {reason}", pod.name);
                }
            }
        }
        Ok(())
    }
}

/// Keeps a pod's own stack from receiving what the rule of nftables matches: it would answer crafted packets.
pub(crate) fn mute(pod: &Pod, rule: &str) -> Result<()> {
    pod.inside.nft(&format!(
        "add table inet mute\nadd chain inet mute in {{ type filter hook input priority -300; }}\nadd rule inet mute in \
         {rule} drop\n"
    ))
}

/// The address of the node for clients outside.
pub(crate) fn node() -> Result<IpAddr> {
    Ok(NODE_V4.parse()?)
}

/// A raw socket and the Ethernet header of its frames.
pub(crate) struct Sender {
    socket: PacketSocket,
    link: Link,
}

impl Sender {
    pub(crate) fn send(&self, packet: &[u8]) -> Result<()> {
        let frame = self.link.frame(packet);
        loop {
            match self.socket.send(&frame) {
                // The queue is full; the sender waits like any other one.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) || e.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_micros(50));
                }
                sent => return Ok(sent?),
            }
        }
    }
}

/// Calls `send` with the numbers up to `count`, at most `rate` times a second; prints the rate. A sender that had no
/// CPU does not catch up: the queues of the kernel would overflow.
pub(crate) fn paced(what: &str, count: u32, rate: u32, mut send: impl FnMut(u32) -> Result<()>) -> Result<()> {
    /// Calls between two looks at the clock.
    const BURST: u32 = 50;
    let start = Instant::now();
    let pause = Duration::from_secs(1) * BURST / rate;
    let mut due = start;
    for number in 0..count {
        if number.is_multiple_of(BURST) {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            due = Instant::now() + pause;
        }
        send(number)?;
    }
    let reached = f64::from(count) / start.elapsed().as_secs_f64();
    println!("{what}: {count} at {reached:.0}/s");
    Ok(())
}

/// Flows of pods that have nothing to do with an attack.
pub(crate) struct Bystanders {
    streams: Vec<(&'static str, Stream)>,
    idle: Vec<(&'static str, Idle)>,
}

impl Bystanders {
    /// Checks that nothing was lost, and that the idle connections continue.
    pub(crate) fn assert_whole(self) -> Result<()> {
        let mut broken = Vec::new();
        for (identity, mut idle) in self.idle {
            if let Err(error) = idle.ask() {
                broken.push(format!("the idle connection to {identity} at {}: {error:#}", idle.to));
            }
        }
        for (identity, stream) in self.streams {
            // The attack is over, and each flow is in use still.
            stream.wait_for_answers(50)?;
            let report = stream.stop();
            let only = report.identities.iter().eq([identity]);
            if report.lost() > 0 || report.broken.is_some() || !only {
                broken.push(format!("the stream to {identity}: {report:?}"));
            }
        }
        ensure!(
            broken.is_empty(),
            "flows of others were disturbed:\n{}",
            broken.join("\n")
        );
        Ok(())
    }
}

/// A connection that is idle during an attack.
struct Idle {
    to: SocketAddr,
    stream: BufReader<TcpStream>,
}

impl Idle {
    fn open(pod: &Pod, to: SocketAddr) -> Result<Self> {
        let stream = pod.enter(|| TcpStream::connect_timeout(&to, patience()))??;
        stream.set_read_timeout(Some(patience()))?;
        let mut idle = Self {
            to,
            stream: BufReader::new(stream),
        };
        idle.ask()?;
        Ok(idle)
    }

    fn ask(&mut self) -> Result<()> {
        let question = kni_integration::traffic::new_token();
        self.stream.get_mut().write_all(format!("{question}\n").as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(line.contains(&question), "it answered {line:?}");
        Ok(())
    }
}
