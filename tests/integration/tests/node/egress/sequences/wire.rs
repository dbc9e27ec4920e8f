//! Provides both ends of the sequences: sends marked packets of the pods and of the server, and records where they
//! arrive.

use std::{cell::RefCell, collections::BTreeSet, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Outside, Pod,
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags, checksum, crc32c},
    node::{NODE_V4, NODE_V6},
    stage::address,
};

use super::{Key, Transport};
use crate::egress::world::World;

/// Timeout for an expected packet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time to wait before no packet counts as silence; later packets are detected as well.
const SILENCE: Duration = Duration::from_millis(15);
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

    /// Sends a pod's packet and returns the packet that the server receives.
    pub(crate) fn send(&mut self, key: Key, flags: TcpFlags, expected: bool) -> Result<Outcome> {
        let (mark, text) = self.mark();
        let way = key.way;
        let from = self.inside[key.pod].address(way.v4);
        let payload = way.payload([key.own, way.there], false, flags, &text);
        let packet = Ip::new(from, Outside::server_address(way.v4)).packet(&payload);
        let pod = &self.inside[key.pod];
        pod.socket.send(&pod.link.frame(&packet))?;
        let patience = if expected { PATIENCE } else { SILENCE };
        let Some(frame) = self.outside.receive(patience, |frame| marks(frame) == Some(mark))? else {
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
        let frame = self.inside[pod].socket.receive(PATIENCE, |frame| {
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
    pub(crate) fn finish(&self) -> Result<()> {
        for (pod, inside) in self.inside.iter().enumerate() {
            let stray = inside.socket.receive(SILENCE, |frame| marks(frame).is_some())?;
            ensure!(stray.is_none(), "pod {pod} got what is not its own: {stray:02x?}");
        }
        let late = self.outside.receive(SILENCE, |frame| {
            let refused = marks(frame).filter(|mark| self.forbidden.contains(mark));
            // Errors of the node's own stack about unexpected packets quote it.
            refused.is_some() && !is_error(frame)
        })?;
        ensure!(late.is_none(), "refused, and yet it left: {late:02x?}");
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

/// An IP packet without options and extension headers.
struct Packet<'a> {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    header: &'a [u8],
    body: &'a [u8],
}

impl<'a> Packet<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => {
                let (header, body) = bytes.split_at_checked(20)?;
                let address = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(header.get(at..at + 4)?).ok()?));
                let length = usize::from(u16::from_be_bytes([header[2], header[3]])).checked_sub(20)?;
                Some(Self {
                    source: address(12)?,
                    destination: address(16)?,
                    protocol: header[9],
                    header,
                    body: body.get(..length)?,
                })
            }
            6 => {
                let (header, body) = bytes.split_at_checked(40)?;
                let address = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(header.get(at..at + 16)?).ok()?));
                let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
                Some(Self {
                    source: address(8)?,
                    destination: address(24)?,
                    protocol: header[6],
                    header,
                    body: body.get(..length)?,
                })
            }
            _ => None,
        }
    }

    /// Both ports; twice the identifier of an echo.
    fn ports(&self, transport: Transport) -> [u16; 2] {
        let at = |offset: usize| u16::from_be_bytes([self.body[offset], self.body[offset + 1]]);
        match transport {
            Transport::Echo => [at(4); 2],
            Transport::Tcp | Transport::Udp | Transport::Sctp => [at(0), at(2)],
        }
    }

    fn check_header(&self) -> Result<()> {
        let right = self.source.is_ipv6() || checksum(&[self.header]) == 0;
        ensure!(right, "the header's checksum is wrong");
        Ok(())
    }

    /// Checks that all checksums are correct.
    fn check(&self) -> Result<()> {
        self.check_header()?;
        if self.protocol == 132 {
            let sum = u32::from_le_bytes(self.body[8..12].try_into()?);
            let mut body = self.body.to_vec();
            body[8..12].fill(0);
            ensure!(crc32c(&body) == sum, "the SCTP checksum is wrong");
            return Ok(());
        }
        let pseudo = Ip::new(self.source, self.destination).pseudo_header(self.protocol, self.body.len());
        let covered: &[u8] = if self.protocol == 1 { &[] } else { &pseudo };
        ensure!(
            checksum(&[covered, self.body]) == 0,
            "the checksum of protocol {} is wrong",
            self.protocol
        );
        Ok(())
    }
}
