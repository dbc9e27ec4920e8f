//! What becomes of a frame that reaches a pod through the node's stack.

use super::{
    Direction, Flow, Model, Verdict, Way,
    from_pod::is_for_many,
    packet::{self, Content, ETHERNET, Packet},
    world::Row,
};

impl Model {
    /// The order is that of the program's documentation: VLAN, ARP, headers, link control, host access, destination
    /// kind, destination address, fragment, flow.
    pub(super) fn judge_received(&mut self, row: &Row, frame: &[u8]) -> Result<Verdict, Verdict> {
        let header: [u8; ETHERNET] = packet::take(frame, 0)?;
        let carried = &frame[ETHERNET..];
        let packet = match [header[12], header[13]] {
            [0x81, 0x00] | [0x88, 0xa8] => return Err(Verdict::VlanTagged),
            [0x08, 0x06] => return Ok(Verdict::Absorbed),
            [0x08, 0x00] => packet::ipv4(carried)?,
            [0x86, 0xdd] => packet::ipv6(carried)?,
            _ => return Err(Verdict::UnsupportedEthertype),
        };
        if matches!(packet.content, Content::LinkControl(_)) {
            return Ok(Verdict::Absorbed);
        }
        if !row.endpoint.host_access {
            return Err(Verdict::HostNotAllowed);
        }
        if is_for_many(packet.destination) {
            return Err(Verdict::Multicast);
        }
        if !row.endpoint.has(packet.destination) {
            return Err(Verdict::DestinationAddress);
        }
        let ports = self.ports(row.endpoint.network, Direction::ToPod, &packet)?;
        if let Content::Error(at) = packet.content {
            return self.error_from_stack(row, &packet, &carried[at..packet.length]);
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let way = Way::FromStack {
            receiver: row.incarnation,
        };
        let opens = matches!(packet.content, Content::Open(..));
        if opens || self.flows.get(&flow) != Some(&way) {
            // Whoever translated it on its way must see the answers.
            let answers = Way::ToStack {
                sender: row.incarnation,
            };
            self.learn(flow, way, answers);
        }
        Ok(Verdict::Delivered)
    }

    /// An error must be about a packet that this pod sent into the stack.
    fn error_from_stack(&self, row: &Row, packet: &Packet, quoted: &[u8]) -> Result<Verdict, Verdict> {
        let quote = packet::quote(quoted, packet.source.is_ipv4())?;
        let sent = Flow {
            network: row.endpoint.network,
            protocol: quote.protocol,
            source: quote.source,
            destination: quote.destination,
        };
        let expected = Way::ToStack {
            sender: row.incarnation,
        };
        if sent.source.0 == packet.destination && self.flows.get(&sent) == Some(&expected) {
            Ok(Verdict::Delivered)
        } else {
            Err(Verdict::IcmpUnrelated)
        }
    }
}
