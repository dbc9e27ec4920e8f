//! Provides both ends of the sequences: sends marked packets of the pods and of the server, and records where they
//! arrive.

use std::{cell::RefCell, collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Outside, Pod,
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags},
    node::{NODE_V4, NODE_V6},
    patience,
    stage::address,
};

use super::{Key, Transport, packet::Packet};
use crate::egress::world::World;

/// The ports of a pod and of the server of the flow whose packets are fences: what was sent before one of them, and has
/// not arrived before it, was dropped. No other flow needs the ports of the node towards this port of the server.
const FENCE: [u16; 2] = [4100, 9100];
/// The stacks have no sockets for these packets and must not send errors about them.
const MUTE: &str = "add table inet mute\nadd chain inet mute in { type filter hook input priority -300; }\n\
                    add rule inet mute in meta l4proto { tcp, udp, sctp } drop\n\
                    add rule inet mute in icmp type echo-request drop\n\
                    add rule inet mute in icmpv6 type echo-request drop\n";
const MARK: &[u8] = b"kni-mark";

/// The use of a node port: the same port may have several uses at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) v4: bool,
    pub(crate) transport: Transport,
    /// The server's port, 0 for echo requests.
    pub(crate) there: u16,
}

impl Way {
    fn node(self) -> IpAddr {
        let text = if self.v4 { NODE_V4 } else { NODE_V6 };
        text.parse().expect("an address")
    }

    fn payload(self, [source, destination]: [u16; 2], answer: bool, flags: TcpFlags, mark: &[u8]) -> Payload {
        match self.transport {
            Transport::Tcp => Payload::Tcp {
                source_port: source,
                destination_port: destination,
                flags,
                sequence: 1000,
                data: mark.to_vec(),
            },
            Transport::Udp => Payload::udp(source, destination, mark),
            Transport::Sctp => Payload::Sctp {
                source_port: source,
                destination_port: destination,
                tag: 7,
                chunks: mark.to_vec(),
            },
            Transport::Echo => Payload::Icmp {
                kind: match (self.v4, answer) {
                    (true, false) => 8,
                    (true, true) => 0,
                    (false, false) => 128,
                    (false, true) => 129,
                },
                code: 0,
                body: [&(source + destination).to_be_bytes()[..], &[0, 1], mark].concat(),
            },
        }
    }
}

/// The result for a pod's packet.
pub(crate) enum Outcome {
    Seen(Seen),
    Silent,
}

/// A pod's packet as received by the server.
pub(crate) struct Seen {
    pub(crate) port: u16,
    pub(crate) packet: Vec<u8>,
}

struct Inside {
    socket: PacketSocket,
    link: Link,
    /// IPv4 first.
    addresses: [IpAddr; 2],
}

impl Inside {
    fn address(&self, v4: bool) -> IpAddr {
        self.addresses[usize::from(!v4)]
    }
}

pub(crate) struct Wire {
    inside: Vec<Inside>,
    outside: PacketSocket,
    /// The Ethernet header from the server to the router, known after the first packet.
    back: Option<Link>,
    mark: u32,
    /// Marks of packets that must not arrive anywhere.
    forbidden: BTreeSet<u32>,
    used: BTreeSet<(Way, u16)>,
}

impl Wire {
    pub(crate) async fn open(world: &World, pods: &[Pod]) -> Result<Self> {
        let mut inside = Vec::new();
        for pod in pods {
            let [own, gateway] = world.stage.macs(pod, "eth0").await?;
            pod.inside.nft(MUTE)?;
            inside.push(Inside {
                socket: PacketSocket::open(&pod.inside, "eth0")?,
                link: Link::new(own, gateway),
                addresses: [address(pod, true), address(pod, false)],
            });
        }
        world.outside.server.nft(MUTE)?;
        Ok(Self {
            inside,
            outside: PacketSocket::open(&world.outside.server, "server0")?,
            back: None,
            mark: 0,
            forbidden: BTreeSet::new(),
            used: BTreeSet::new(),
        })
    }

    pub(crate) fn pods(&self) -> usize {
        self.inside.len()
    }

    /// Whether a flow has ever had the port.
    pub(crate) fn was_used(&self, way: Way, port: u16) -> bool {
        self.used.contains(&(way, port))
    }

    fn mark(&mut self) -> (u32, Vec<u8>) {
        self.mark += 1;
        (self.mark, [MARK, &self.mark.to_be_bytes()].concat())
    }

    /// Sends a packet of the pod that always arrives. Returns its mark.
    fn fence(&mut self, pod: usize, v4: bool) -> Result<u32> {
        let (mark, text) = self.mark();
        let payload = Self::fences(v4).payload(FENCE, false, TcpFlags::ACK, &text);
        let inside = &self.inside[pod];
        let packet = Ip::new(inside.address(v4), Outside::server_address(v4)).packet(&payload);
        inside.socket.send(&inside.link.frame(&packet))?;
        Ok(mark)
    }

    const fn fences(v4: bool) -> Way {
        Way {
            v4,
            transport: Transport::Udp,
            there: FENCE[1],
        }
    }

    /// The server's next frame with a mark that `wanted` accepts; no forbidden packet may arrive before it.
    fn at_server(&self, wanted: impl Fn(u32) -> bool) -> Result<Option<Vec<u8>>> {
        let is_forbidden = |frame: &[u8]| {
            // Errors of the node's own stack about unexpected packets quote it.
            marks(frame).is_some_and(|mark| self.forbidden.contains(&mark)) && !is_error(frame)
        };
        let frame = self.outside.receive(patience(), |frame| {
            marks(frame).is_some_and(&wanted) || is_forbidden(frame)
        })?;
        let refused = frame.as_deref().is_some_and(is_forbidden);
        ensure!(!refused, "refused, and yet it left: {frame:02x?}");
        Ok(frame)
    }

    /// Sends a pod's packet and returns the packet that the server receives. One that is not `expected` is followed by
    /// a fence.
    pub(crate) fn send(&mut self, key: Key, flags: TcpFlags, expected: bool) -> Result<Outcome> {
        let (mark, text) = self.mark();
        let way = key.way;
        let from = self.inside[key.pod].address(way.v4);
        let payload = way.payload([key.own, way.there], false, flags, &text);
        let packet = Ip::new(from, Outside::server_address(way.v4)).packet(&payload);
        let pod = &self.inside[key.pod];
        pod.socket.send(&pod.link.frame(&packet))?;
        let fence = if expected {
            None
        } else {
            Some(self.fence(key.pod, way.v4)?)
        };
        let frame = self.at_server(|seen| seen == mark || Some(seen) == fence)?;
        ensure!(frame.is_some() || expected, "the fence after {key:?} does not arrive");
        let Some(frame) = frame.filter(|frame| marks(frame) == Some(mark)) else {
            self.forbidden.insert(mark);
            return Ok(Outcome::Silent);
        };
        let packet = Packet::read(&frame[14..]).context("no IP packet")?;
        packet.check().with_context(|| format!("{key:?} at the server"))?;
        ensure!(packet.source == way.node(), "{key:?} left as {}", packet.source);
        ensure!(packet.destination == Outside::server_address(way.v4));
        let [port, there] = packet.ports(way.transport);
        ensure!(
            way.transport == Transport::Echo || there == way.there,
            "{key:?} to port {there}"
        );
        self.used.insert((way, port));
        self.back = Some(Link::new(frame[..6].try_into()?, frame[6..12].try_into()?));
        Ok(Outcome::Seen(Seen {
            port,
            packet: frame[14..].to_vec(),
        }))
    }

    /// Sends an answer of the server and expects it in the pod of the request.
    pub(crate) fn answer(&mut self, key: Key, port: u16, flags: TcpFlags) -> Result<()> {
        let (mark, text) = self.mark();
        self.reply(key.way, port, flags, &text)?;
        let frame = self.arrives(key.pod, |frame| marks(frame) == Some(mark))?;
        let packet = Packet::read(&frame[14..]).context("no IP packet")?;
        packet.check()?;
        let (server, own) = (
            Outside::server_address(key.way.v4),
            self.inside[key.pod].address(key.way.v4),
        );
        ensure!(
            (packet.source, packet.destination) == (server, own),
            "it is from {} to {}",
            packet.source,
            packet.destination
        );
        let expected = match key.way.transport {
            Transport::Echo => [key.own; 2],
            Transport::Tcp | Transport::Udp | Transport::Sctp => [key.way.there, key.own],
        };
        ensure!(
            packet.ports(key.way.transport) == expected,
            "ports {:?}",
            packet.ports(key.way.transport)
        );
        Ok(())
    }

    /// Sends a packet of the server to an unused port; it must not reach a pod.
    pub(crate) fn unasked(&mut self, way: Way, port: u16) -> Result<()> {
        if self.back.is_none() {
            return Ok(());
        }
        let (mark, text) = self.mark();
        self.forbidden.insert(mark);
        self.reply(way, port, TcpFlags::SYN_ACK, &text)
    }

    /// Sends an error of the server about the pod's packet; the pod must find its own packet quoted.
    pub(crate) fn unreachable(&mut self, key: Key, latest: &[u8]) -> Result<()> {
        let v4 = key.way.v4;
        let error = Payload::Icmp {
            kind: if v4 { 3 } else { 1 },
            code: if v4 { 3 } else { 4 },
            body: [&[0; 4][..], latest].concat(),
        };
        let mark = marks(latest);
        ensure!(mark.is_some(), "the latest packet has no mark");
        let packet = Ip::new(Outside::server_address(v4), key.way.node()).packet(&error);
        let back = self.back.as_ref().context("nothing was seen yet")?;
        self.outside.send(&back.frame(&packet))?;
        let frame = self
            .arrives(key.pod, |frame| marks(frame) == mark)
            .with_context(|| format!("an error about {key:?}"))?;
        let packet = Packet::read(&frame[14..]).context("no IP packet")?;
        packet.check().context("the error")?;
        let own = self.inside[key.pod].address(v4);
        ensure!(packet.destination == own, "the error is to {}", packet.destination);
        let quoted = Packet::read(&packet.body[8..]).context("nothing is quoted")?;
        // The quoted transport checksum is not verified, because the packet is quoted partially.
        quoted.check_header().context("the quoted packet")?;
        ensure!(
            (quoted.source, quoted.ports(key.way.transport)) == (own, [key.own, key.way.there]),
            "quoted is {} with ports {:?}",
            quoted.source,
            quoted.ports(key.way.transport)
        );
        Ok(())
    }

    fn reply(&self, way: Way, port: u16, flags: TcpFlags, text: &[u8]) -> Result<()> {
        let ports = if way.transport == Transport::Echo {
            [0, port]
        } else {
            [way.there, port]
        };
        let payload = way.payload(ports, true, flags, text);
        let packet = Ip::new(Outside::server_address(way.v4), way.node()).packet(&payload);
        let back = self.back.as_ref().context("nothing was seen yet")?;
        Ok(self.outside.send(&back.frame(&packet))?)
    }

    /// The expected frame at a pod; no other marked frame may arrive before it.
    fn arrives(&self, pod: usize, wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let strays = RefCell::new(Vec::new());
        let frame = self.inside[pod].socket.receive(patience(), |frame| {
            let found = wanted(frame);
            if !found && marks(frame).is_some() {
                strays.borrow_mut().push(frame.to_vec());
            }
            found
        })?;
        let strays = strays.into_inner();
        ensure!(strays.is_empty(), "pod {pod} got what is not its own: {strays:02x?}");
        frame.with_context(|| format!("it does not reach pod {pod}"))
    }

    /// Checks that no unexpected packet has arrived anywhere.
    pub(crate) fn finish(&mut self) -> Result<()> {
        for pod in 0..self.pods() {
            for v4 in [true, false] {
                let fence = self.fence(pod, v4)?;
                let frame = self.at_server(|mark| mark == fence)?;
                let frame = frame.with_context(|| format!("the last fence of pod {pod} does not arrive"))?;
                let packet = Packet::read(&frame[14..]).context("no IP packet")?;
                let [port, _] = packet.ports(Transport::Udp);
                let (mark, text) = self.mark();
                self.reply(Self::fences(v4), port, TcpFlags::ACK, &text)?;
                self.arrives(pod, |frame| marks(frame) == Some(mark))?;
            }
        }
        Ok(())
    }
}

/// The number of a marked packet.
fn marks(bytes: &[u8]) -> Option<u32> {
    let at = bytes.windows(MARK.len()).position(|window| window == MARK)? + MARK.len();
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn is_error(frame: &[u8]) -> bool {
    Packet::read(&frame[14..]).is_some_and(|packet| match packet.protocol {
        1 => packet.body[0] == 3,
        58 => packet.body[0] < 128,
        _ => false,
    })
}
