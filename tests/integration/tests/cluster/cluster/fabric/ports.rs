//! Tests the source port of the tunnels' packets: each flow of pods has one, and others have others.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Pod,
    cluster::wire::{ip_packet, tunnelled_at},
    frames::PacketSocket,
    traffic::new_token,
};

use super::{
    super::scene::{ANSWER, PORT, address},
    bed::Bed,
};

/// Flows of each protocol and family.
const FLOWS: usize = 12;
/// Requests of a flow.
const REQUESTS: usize = 3;
/// Flows that may have the port of another one by chance: of some 28 000 ports.
const BY_CHANCE: usize = 3;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The protocol and both ends of a flow, in one direction.
type Flow = (u8, SocketAddr, SocketAddr);

/// What was seen of a flow.
#[derive(Default)]
struct Seen {
    /// The source ports of its tunnel packets.
    ports: BTreeSet<u16>,
    packets: usize,
    /// The sequence numbers of segments that are not only acknowledgements.
    sequences: BTreeSet<u32>,
    /// Whether a segment was repeated: after a timeout the kernel may choose another way, and so another port.
    is_repeated: bool,
}

/// Between two pods of one network with a tunnel, in both directions.
pub(super) fn follow_the_flows(bed: &Bed, tunnel: u16) -> Result<()> {
    let (from, to) = (bed.pod("blue-team", 1), bed.pod("blue-team", 2));
    for v4 in [true, false] {
        // Each frame between the nodes passes this port of the bridge once.
        let wire = PacketSocket::open(bed.cluster.fabric.inside(), "port11")?;
        exchange(from, SocketAddr::new(address(to, v4), PORT))?;
        let ends = [address(from, v4), address(to, v4)];
        let flows = recorded(&wire, tunnel, ends)?;
        for protocol in [TCP, UDP] {
            let of_protocol = || flows.iter().filter(|((found, ..), _)| *found == protocol);
            ensure!(
                of_protocol().count() == 2 * FLOWS,
                "{} flows of {protocol}",
                of_protocol().count()
            );
            for (flow, seen) in of_protocol() {
                ensure!(seen.packets >= REQUESTS, "{flow:?}: {} packets", seen.packets);
                ensure!(seen.ports.len() == 1 || seen.is_repeated, "{flow:?}: {:?}", seen.ports);
            }
            // Of each direction alone: the kernel may give both directions of a flow one port.
            for source in ends {
                let of_source = of_protocol().filter(|((_, from, _), _)| from.ip() == source);
                let ports: BTreeSet<u16> = of_source.flat_map(|(_, seen)| seen.ports.clone()).collect();
                ensure!(
                    ports.len() + BY_CHANCE >= FLOWS,
                    "{FLOWS} flows of {source} have {ports:?}"
                );
                println!(
                    "{FLOWS} flows of protocol {protocol} from {source}: {} ports",
                    ports.len()
                );
            }
        }
    }
    Ok(())
}

/// Several requests of each flow, by turns.
fn exchange(from: &Pod, server: SocketAddr) -> Result<()> {
    let any: IpAddr = if server.is_ipv4() {
        [0; 4].into()
    } else {
        [0; 16].into()
    };
    let mut connections = Vec::new();
    let mut sockets = Vec::new();
    for _flow in 0..FLOWS {
        let connection = from
            .inside
            .enter(|| TcpStream::connect_timeout(&server, ANSWER))?
            .context("connect")?;
        connection.set_read_timeout(Some(ANSWER))?;
        connection.set_nodelay(true)?;
        connections.push(BufReader::new(connection));
        let socket = from.inside.enter(|| UdpSocket::bind(SocketAddr::new(any, 0)))??;
        socket.set_read_timeout(Some(ANSWER))?;
        sockets.push(socket);
    }
    for _request in 0..REQUESTS {
        for connection in &mut connections {
            connection
                .get_mut()
                .write_all(format!("{}\n", new_token()).as_bytes())?;
            connection.read_line(&mut String::new()).context("an answer over TCP")?;
        }
        for socket in &sockets {
            socket.send_to(new_token().as_bytes(), server)?;
            socket.recv(&mut [0; 256]).context("an answer over UDP")?;
        }
    }
    Ok(())
}

/// The flows of TCP and UDP between two pods that passed until now.
fn recorded(wire: &PacketSocket, tunnel: u16, ends: [IpAddr; 2]) -> Result<BTreeMap<Flow, Seen>> {
    let mut flows: BTreeMap<Flow, Seen> = BTreeMap::new();
    while let Some(frame) = wire.receive(Duration::from_millis(20), |_any| true)? {
        let Some((.., outer, datagram)) = ip_packet(&frame) else {
            continue;
        };
        let inner = (outer == UDP).then(|| tunnelled_at(tunnel, datagram)).flatten();
        let Some((source, destination, protocol, payload)) = inner.and_then(|(_, inner)| ip_packet(inner)) else {
            continue;
        };
        let is_between = ends.contains(&source) && ends.contains(&destination);
        if !is_between || ![TCP, UDP].contains(&protocol) {
            continue;
        }
        let flow = (
            protocol,
            SocketAddr::new(source, word(payload, 0)?),
            SocketAddr::new(destination, word(payload, 2)?),
        );
        let seen = flows.entry(flow).or_default();
        seen.packets += 1;
        seen.ports.insert(word(datagram, 0)?);
        if protocol == TCP
            && let Some(sequence) = sequence_of(payload)
        {
            seen.is_repeated |= !seen.sequences.insert(sequence);
        }
    }
    Ok(flows)
}

fn word(bytes: &[u8], at: usize) -> Result<u16> {
    let bytes = bytes.get(at..at + 2).context("a truncated header")?;
    Ok(u16::from_be_bytes(bytes.try_into()?))
}

/// The sequence number of a segment that has data, or SYN or FIN.
fn sequence_of(segment: &[u8]) -> Option<u32> {
    let header = usize::from(segment.get(12)? >> 4) * 4;
    let counts = segment.len() > header || segment.get(13)? & 3 != 0;
    let sequence = segment.get(4..8)?.try_into().ok().map(u32::from_be_bytes);
    sequence.filter(|_| counts)
}
