//! What becomes of a frame that a pod sends.

use std::net::IpAddr;

use super::{
    Direction, Flow, Model, Outcome, Verdict, Way, answer,
    packet::{self, Content, ETHERNET, Packet},
    world::{Route, Row},
};

impl Model {
    /// The order is that of the program's documentation: VLAN, source MAC, ARP, headers, source address, destination
    /// kind, destination MAC, fragment, flow, destination.
    pub(super) fn judge_sent(
        &mut self,
        id: u32,
        row: &Row,
        frame: &[u8],
        outcome: &mut Outcome,
    ) -> Result<Verdict, Verdict> {
        let header: [u8; ETHERNET] = packet::take(frame, 0)?;
        let carried = &frame[ETHERNET..];
        if [[0x81, 0x00], [0x88, 0xa8]].contains(&[header[12], header[13]]) {
            return Err(Verdict::VlanTagged);
        }
        if header[6..12] != row.endpoint.mac {
            return Err(Verdict::SourceMac);
        }
        let packet = match [header[12], header[13]] {
            [0x08, 0x00] => packet::ipv4(carried)?,
            [0x86, 0xdd] => packet::ipv6(carried)?,
            [0x08, 0x06] => return answer::arp(&row.endpoint, &mut outcome.frame),
            _ => return Err(Verdict::UnsupportedEthertype),
        };
        let own = row.endpoint.has(packet.source);
        if let Content::LinkControl(kind) = packet.content {
            return if own || is_link_local(packet.source) || packet.source.is_unspecified() {
                Ok(answer::solicitation(&row.endpoint, &packet, kind, &mut outcome.frame))
            } else {
                Err(Verdict::SourceAddress)
            };
        }
        if !own {
            return Err(Verdict::SourceAddress);
        }
        if is_link_local(packet.destination) {
            return Err(Verdict::LinkLocal);
        }
        if is_for_many(packet.destination) {
            return Err(Verdict::Multicast);
        }
        if packet.destination.is_loopback() {
            return Err(Verdict::Loopback);
        }
        if header[..6] != row.endpoint.host_mac {
            return Err(Verdict::DestinationMac);
        }
        let ports = self.ports(row.endpoint.network, Direction::FromPod, &packet)?;
        let way = self.way_out(id, row, &packet, ports, &carried[..packet.length])?;
        Ok(self.go(way, outcome))
    }

    fn way_out(
        &mut self,
        id: u32,
        row: &Row,
        packet: &Packet,
        ports: (u16, u16),
        bytes: &[u8],
    ) -> Result<Way, Verdict> {
        if let Content::Error(at) = packet.content {
            return self.way_of_error(row, packet, &bytes[at..]);
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let opens = matches!(packet.content, Content::Open(..));
        match self.current_way(row, flow) {
            Some(way) if !opens => Ok(way),
            _ if !opens && self.answers_stack(row, flow) => Ok(self.way_to_stack(row, flow)),
            _ => self.new_way(id, row, flow),
        }
    }

    /// Whether the other direction came through the stack: also where nothing is known of this one, whoever translates
    /// there must see the answer.
    fn answers_stack(&self, row: &Row, flow: Flow) -> bool {
        let receiver = row.incarnation;
        row.endpoint.host_access && self.flows.get(&flow.reversed()) == Some(&Way::FromStack { receiver })
    }

    fn way_to_stack(&mut self, row: &Row, flow: Flow) -> Way {
        let own = row.incarnation;
        let way = Way::ToStack { sender: own };
        self.learn(flow, way, Way::FromStack { receiver: own });
        way
    }

    /// The way that was decided earlier, as long as both ends live the lives that it was decided for.
    fn current_way(&self, row: &Row, flow: Flow) -> Option<Way> {
        let way = *self.flows.get(&flow)?;
        let current = match way {
            Way::Local { sender, to, receiver } => {
                sender == row.incarnation && self.world.same_life(to, receiver).is_some()
            }
            Way::ToStack { sender } => sender == row.incarnation,
            Way::FromStack { .. } => false,
        };
        current.then_some(way)
    }

    /// An error goes where the pod's own packets of the quoted flow go, and must be about a packet that the pod got
    /// from the one it tells.
    fn way_of_error(&self, row: &Row, packet: &Packet, quoted: &[u8]) -> Result<Way, Verdict> {
        let quote = packet::quote(quoted, packet.source.is_ipv4())?;
        let received = Flow {
            network: row.endpoint.network,
            protocol: quote.protocol,
            source: quote.source,
            destination: quote.destination,
        };
        if received.source.0 != packet.destination || received.destination.0 != packet.source {
            return Err(Verdict::IcmpUnrelated);
        }
        self.current_way(row, received.reversed()).ok_or(Verdict::IcmpUnrelated)
    }

    fn new_way(&mut self, id: u32, row: &Row, flow: Flow) -> Result<Way, Verdict> {
        let (network, sender) = (row.endpoint.network, row.incarnation);
        let Some((to, receiver)) = self.world.owner(network, flow.destination.0) else {
            return self.way_beyond(row, flow);
        };
        if to == id {
            return Err(Verdict::SelfAddressed);
        }
        let there = self.world.same_life(to, receiver);
        if there.is_none_or(|there| there.endpoint.network != network) {
            return Err(Verdict::DestinationNotReady);
        }
        let way = Way::Local { sender, to, receiver };
        let answers = Way::Local {
            sender: receiver,
            to: id,
            receiver: sender,
        };
        self.learn(flow, way, answers);
        Ok(way)
    }

    fn way_beyond(&mut self, row: &Row, flow: Flow) -> Result<Way, Verdict> {
        match self.world.route(row.endpoint.network, flow.destination.0) {
            Some(Route::Unreachable) => Err(Verdict::NoDestination),
            Some(Route::Stack) if row.endpoint.host_access => Ok(self.way_to_stack(row, flow)),
            Some(Route::Stack) | None => Err(Verdict::NoRoute),
        }
    }

    /// The receiver sees a frame from its own gateway.
    fn go(&self, way: Way, outcome: &mut Outcome) -> Verdict {
        let Way::Local { to, .. } = way else {
            return Verdict::PassedToStack;
        };
        let there = self.world.endpoint(to).expect("a current way leads to an endpoint");
        outcome.frame[..6].copy_from_slice(&there.mac);
        outcome.frame[6..12].copy_from_slice(&there.host_mac);
        outcome.destination = Some(to);
        Verdict::Redirected
    }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Multicast of both families and the limited broadcast; no other broadcast address can be told by looking at it.
pub(super) fn is_for_many(address: IpAddr) -> bool {
    address.is_multicast() || address == IpAddr::from([255; 4])
}
