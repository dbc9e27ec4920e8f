//! Explains the fate of a packet: builds it, runs the programs on it and renders their decision as text.

use std::net::{IpAddr, SocketAddr};

use kni_common::{Direction, Verdict, address::to_ip};
use kni_dataplane::{FlowRecord, OtherNode, Probe, SupposedTunnel};
use kni_model::{
    Attachment, EndpointId, MacAddr, NetworkId,
    flow_view::{Arrival, ExplainQuestion, ExplainView, Onward, QuestionError},
};

use super::{
    Flows,
    ends::{self, Ends},
    frame::{self, Packet},
    name, node,
    steps::{self, Crossing, Owner},
};

/// First source port: the upper part of the range that Linux assigns to clients, without registered ports.
const FIRST_SOURCE_PORT: u16 = 49_152;
/// Number of source ports, up to 60999.
const SOURCE_PORTS: u16 = 11_848;

/// ICMP, whose echo identifier takes the place of the source port, for IPv4 and IPv6.
const ICMP: [u8; 2] = [1, 58];

/// The longest packet that a run of a program takes on every kernel: a page less what the kernel adds.
const LONGEST: u16 = 3500;

/// The MAC addresses of a packet in a tunnel, which no program reads.
const INNER: [MacAddr; 2] = [MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2])];

/// A packet, and where its program sees it.
struct Seen {
    network: Option<NetworkId>,
    source: IpAddr,
    destination: IpAddr,
    macs: [MacAddr; 2],
    place: Place,
}

/// The program that sees a packet.
#[derive(Clone, Copy)]
enum Place {
    FromPod(EndpointId),
    /// With the interface on which the node would have received it.
    ToPod(EndpointId, u32),
    FromOverlay(SupposedTunnel),
}

impl Flows {
    /// Explains the fate of a connection's first packet. The programs decide with the current tables, without side
    /// effects. Blocking; the first request loads the programs once more, which takes some ten milliseconds.
    pub fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        if let Some(length) = question.length.filter(|length| *length > LONGEST) {
            return Err(QuestionError::Invalid {
                field: "length",
                reason: format!("{length} bytes; the programs can be asked about packets of {LONGEST} bytes at most"),
            });
        }
        let seen = match question.arrival {
            Some(arrival) => self.arriving(question, arrival)?,
            None => self.leaving(question)?,
        };
        let source_port = self.unused_port(&seen, question)?;
        let frame = frame::build(&Packet {
            source_mac: seen.macs[0],
            destination_mac: seen.macs[1],
            source: seen.source,
            destination: seen.destination,
            protocol: question.protocol,
            source_port,
            destination_port: question.port,
            length: question.length,
        });
        let frame = frame.map_err(|error| match question.length {
            Some(_) => QuestionError::Invalid {
                field: "length",
                reason: error.to_string(),
            },
            None => failed(&error),
        })?;
        self.run(seen.place, frame)
    }

    /// A packet that comes through the tunnel.
    fn arriving(&self, question: &ExplainQuestion, arrival: Arrival) -> Result<Seen, QuestionError> {
        let (source, destination) = ends::of_arrival(question)?;
        let tunnel = SupposedTunnel {
            number: arrival.number,
            sender: arrival.sender,
        };
        Ok(Seen {
            network: self
                .dataplane
                .network_of(arrival.number)
                .map_err(|error| failed(&error))?,
            source,
            destination,
            macs: INNER,
            place: Place::FromOverlay(tunnel),
        })
    }

    /// A packet from or to a pod of this node.
    fn leaving(&self, question: &ExplainQuestion) -> Result<Seen, QuestionError> {
        let ends = ends::find(question, &*self.naming)?;
        let (macs, place) = self.place(&ends)?;
        let Ends {
            network,
            source_ip,
            destination_ip,
            ..
        } = ends;
        Ok(Seen {
            network: Some(network),
            source: source_ip,
            destination: destination_ip,
            macs,
            place,
        })
    }

    /// The program that sees the packet first.
    fn place(&self, ends: &Ends) -> Result<([MacAddr; 2], Place), QuestionError> {
        if let Some(Attachment {
            mac,
            host_mac,
            endpoint,
            ..
        }) = ends.source
        {
            return Ok(([mac, host_mac], Place::FromPod(endpoint)));
        }
        let other = self.dataplane.other_node(ends.network, ends.source_ip);
        match other.map_err(|error| failed(&error))? {
            Some(other) if other.way.overlay => {
                let tunnel = SupposedTunnel {
                    number: other.number.unwrap_or(0),
                    sender: other.way.underlay,
                };
                return Ok((INNER, Place::FromOverlay(tunnel)));
            }
            Some(_) => {
                return Err(QuestionError::Failed(format!(
                    "packets of {} come from another node without a tunnel; ask that node's agent about what it sends",
                    ends.source_ip
                )));
            }
            None => {}
        }
        let destination = ends.destination.as_ref();
        let destination =
            destination.ok_or_else(|| QuestionError::Failed("neither end is a pod of this node".to_owned()))?;
        let place = Place::ToPod(destination.endpoint, node::ingress_of(ends.source_ip));
        Ok(([destination.host_mac, destination.mac], place))
    }

    /// A source port without a flow to the destination: a packet of an established flow is not evaluated, and the
    /// answer would lack the policies and the service.
    fn unused_port(&self, seen: &Seen, question: &ExplainQuestion) -> Result<u16, QuestionError> {
        let (protocol, destination_port) = match question.protocol {
            icmp if ICMP.contains(&icmp) => (if seen.source.is_ipv4() { ICMP[0] } else { ICMP[1] }, 0),
            other => (other, question.port),
        };
        let destination = SocketAddr::new(seen.destination, destination_port);
        let has_flow = |port| {
            let source = SocketAddr::new(seen.source, port);
            match seen.network {
                Some(network) => self.dataplane.has_flow(network, source, destination, protocol),
                None => Ok(false),
            }
        };
        let found = first_unused(fastrand::u16(..SOURCE_PORTS), has_flow).map_err(|error| failed(&error))?;
        found.ok_or_else(|| {
            QuestionError::Failed(format!(
                "each of the source ports {FIRST_SOURCE_PORT} to {} has a flow from {} to {destination}",
                FIRST_SOURCE_PORT + (SOURCE_PORTS - 1),
                seen.source
            ))
        })
    }

    /// Explains the fate of a frame at that place.
    fn run(&self, place: Place, frame: Vec<u8>) -> Result<ExplainView, QuestionError> {
        let (endpoint, direction, ingress_ifindex, tunnel) = match place {
            Place::FromPod(endpoint) => (endpoint, Direction::FromPod, 0, None),
            Place::ToPod(endpoint, ingress) => (endpoint, Direction::ToPod, ingress, None),
            Place::FromOverlay(tunnel) => (EndpointId(0), Direction::FromOverlay, 0, Some(tunnel)),
        };
        let probe = Probe {
            endpoint,
            direction,
            frame,
            ingress_ifindex,
            tunnel,
        };
        let answer = self.dataplane.explain(&probe).map_err(|error| failed(&error))?;
        let verdict = Verdict::from_code(answer.event.verdict).ok_or_else(|| {
            QuestionError::Failed(format!("the programs gave no known verdict ({})", answer.event.verdict))
        })?;
        let record = FlowRecord {
            event: answer.event,
            direction,
            verdict,
        };
        let flow = name::flow(&record, &*self.naming);
        let crossing = self.crossing(place, &record)?;
        let steps = steps::of(&flow, ingress_ifindex, &crossing);
        let leaves = [Verdict::Tunnelled, Verdict::Routed].contains(&verdict);
        Ok(ExplainView {
            flow,
            steps,
            node: self.naming.own_node(),
            onward: match crossing {
                Crossing::Out(onward) => Some(onward).filter(|_| leaves),
                Crossing::None | Crossing::In { .. } => None,
            },
        })
    }

    /// The other node of a packet that goes to it or comes from it.
    fn crossing(&self, place: Place, record: &FlowRecord) -> Result<Crossing, QuestionError> {
        let event = &record.event;
        let network = NetworkId::try_from(event.network).ok();
        let other = |address: [u8; 16]| match network {
            Some(network) => self.dataplane.other_node(network, to_ip(address)),
            None => Ok(None),
        };
        let other = |address| other(address).map_err(|error| failed(&error));
        match place {
            Place::FromPod(_) if event.source != [0; 16] => Ok(match other(event.translated_destination)? {
                Some(node) => Crossing::Out(self.onward(record, &node)),
                None => Crossing::None,
            }),
            Place::FromOverlay(tunnel) => {
                let owner = other(event.source)?.filter(|owner| owner.mtu != 0);
                Ok(Crossing::In {
                    tunnel,
                    sender: self.naming.node_at(None, tunnel.sender),
                    owner: owner.map(|owner| Owner {
                        name: self.naming.node_at(None, owner.way.underlay),
                        underlay: owner.way.underlay,
                        overlay: owner.way.overlay,
                        is_node: owner.is_node,
                    }),
                })
            }
            Place::FromPod(_) | Place::ToPod(..) => Ok(Crossing::None),
        }
    }

    fn onward(&self, record: &FlowRecord, node: &OtherNode) -> Onward {
        let event = &record.event;
        let overlay = node.way.overlay;
        // Ports of other protocols are identifiers.
        let has_ports = name::WITH_PORTS.iter().any(|one| u32::from(*one) == event.protocol);
        let port = u16::from_be_bytes(event.translated_ports.destination);
        Onward {
            node: self.naming.node_at(None, node.way.underlay),
            underlay: node.way.underlay,
            sender: node.own.filter(|_| overlay),
            number: node.number.filter(|_| overlay),
            tunnel_port: if overlay { node.port } else { 0 },
            mtu: node.mtu,
            source: to_ip(event.translated_source),
            destination: to_ip(event.translated_destination),
            port: if has_ports { port } else { 0 },
        }
    }
}

/// The first port without a flow, from the one at an offset in the range on, and then from the start of the range.
fn first_unused<E>(offset: u16, mut has_flow: impl FnMut(u16) -> Result<bool, E>) -> Result<Option<u16>, E> {
    for step in 0..SOURCE_PORTS {
        let port = FIRST_SOURCE_PORT + (offset + step) % SOURCE_PORTS;
        if !has_flow(port)? {
            return Ok(Some(port));
        }
    }
    Ok(None)
}

fn failed(error: &dyn std::error::Error) -> QuestionError {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    QuestionError::Failed(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: u16 = 60_999;

    fn found(offset: u16, used: impl Fn(u16) -> bool) -> Option<u16> {
        first_unused(offset, |port| Ok::<_, ()>(used(port))).unwrap()
    }

    #[test]
    fn a_port_with_a_flow_is_not_taken() {
        assert_eq!(found(0, |_| false), Some(FIRST_SOURCE_PORT));
        assert_eq!(found(0, |port| port < 50_000), Some(50_000));
        assert_eq!(found(SOURCE_PORTS - 1, |port| port == LAST), Some(FIRST_SOURCE_PORT));
        for offset in [0, 1, 5_000, SOURCE_PORTS - 1] {
            assert_eq!(found(offset, |port| port != 60_000), Some(60_000));
            assert_eq!(found(offset, |_| true), None);
        }
    }

    #[test]
    fn a_failure_to_read_ends_the_search() {
        let mut asked = 0;
        let result = first_unused(3, |_| {
            asked += 1;
            if asked == 2 { Err("the table") } else { Ok(true) }
        });
        assert_eq!((result, asked), (Err("the table"), 2));
    }
}
