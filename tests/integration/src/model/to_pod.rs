//! Models the processing of a frame that reaches a pod through the node's stack.

use kni_common::IFINDEX_BASE;

use super::{
    Direction, Flow, Model, Outcome, Verdict,
    flows::{End, Known, Opener, Plan},
    from_pod::is_for_many,
    packet::{self, Content, ETHERNET, Packet},
    policy::Hits,
    world::{Owner, Row},
};

impl Model {
    /// The order is that of the program's documentation: VLAN, ARP, headers, link control, host access, destination
    /// kind, destination address, fragment, flow, then for a packet without a current flow source, ingress policy,
    /// share of the flow tables. `ingress` is the interface through which the node received the packet, 0 if the node
    /// sent it.
    pub(super) fn evaluate_received(
        &mut self,
        row: &Row,
        ingress: u32,
        frame: &[u8],
        outcome: &mut Outcome,
    ) -> Result<Verdict, Verdict> {
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
        let (protocol, ports) = self.flow_of(row.endpoint.network, Direction::ToPod, &packet)?;
        let packet = packet::Packet { protocol, ..packet };
        let verdict = self.deliver(row, ingress, &packet, ports, outcome)?;
        self.vouch(row.endpoint.network, Direction::ToPod, &packet);
        Ok(verdict)
    }

    fn deliver(
        &mut self,
        row: &Row,
        ingress: u32,
        packet: &packet::Packet,
        ports: (u16, u16),
        outcome: &mut Outcome,
    ) -> Result<Verdict, Verdict> {
        if let Content::Error(at) = packet.content {
            return self.error_from_stack(row, packet, at, &mut outcome.frame);
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let opens = matches!(packet.content, Content::Open(..));
        if !opens && self.belongs_to_known(row, ingress, flow)? {
            self.follow(flow, packet, &mut outcome.frame)?;
            return Ok(Verdict::Delivered);
        }
        self.open_from_stack(row, ingress, flow)?;
        Ok(Verdict::Delivered)
    }

    fn is_current_to(row: &Row, known: &Known) -> bool {
        let from = matches!(known.sender(), End::Stack(epoch) if epoch == row.epoch);
        let to = matches!(known.receiver(), End::Local(_, version) if version == row.version);
        from && to && known.entry.is_live()
    }

    /// Whether the packet belongs to a flow; evaluates policies again if required.
    fn belongs_to_known(&mut self, row: &Row, ingress: u32, flow: Flow) -> Result<bool, Verdict> {
        let Some(known) = self.known(flow) else {
            return Ok(false);
        };
        if Self::is_current_to(row, &known) {
            return Ok(true);
        }
        let mine = known.receiver().is_of(row.id, row.version);
        if known.sender().is_local() || !mine || !self.lives(&known) {
            return Ok(false);
        }
        if ingress == 0 {
            self.own_sender(flow, known.is_reply())?;
        }
        let mut hits = Hits::new();
        let judged = if known.is_reply() {
            self.leaving(row, flow.reversed(), &mut hits)
        } else if known.entry.opener == Opener::Node {
            Ok(())
        } else {
            let peer = if ingress == 0 {
                self.identity_at(flow.network, flow.source.0)
            } else {
                self.external_sender(flow, ingress)?
            };
            self.entering(row, peer, flow, &mut hits)
        };
        self.hit(hits);
        judged?;
        self.renew(&known, End::Stack(row.epoch), End::Local(row.id, row.version));
        Ok(true)
    }

    fn open_from_stack(&mut self, row: &Row, ingress: u32, flow: Flow) -> Result<(), Verdict> {
        let mut opener = Opener::Node;
        if ingress == 0 {
            self.own_sender(flow, false)?;
        } else {
            opener = Opener::Anybody;
            let peer = self.external_sender(flow, ingress)?;
            let mut hits = Hits::new();
            let judged = self.entering(row, peer, flow, &mut hits);
            self.hit(hits);
            judged?;
        }
        self.may_have_more(row.id, flow.protocol, true)?;
        self.count_opened(row.id, flow.protocol, true);
        let plan = Plan {
            opener,
            sender: End::Stack(row.epoch),
            receiver: End::Local(row.id, row.version),
            becomes: flow,
        };
        self.learn(flow, &plan);
        Ok(())
    }

    /// The node sends with no pod's address, and only replies with that of a service.
    fn own_sender(&self, flow: Flow, is_reply: bool) -> Result<(), Verdict> {
        match self.world.owner(flow.network, flow.source.0) {
            None => Ok(()),
            Some(Owner::Service) if is_reply => Ok(()),
            Some(_) => Err(Verdict::SourceAddress),
        }
    }

    /// Identity of the packet's sender. The address of a local pod is valid only from the interface of that pod, the
    /// address of a service is never valid.
    fn external_sender(&self, flow: Flow, ingress: u32) -> Result<u32, Verdict> {
        let address = flow.source.0;
        let Some(owner) = self.world.owner(flow.network, address) else {
            return Ok(self.policies.external_identity(flow.network, address));
        };
        let sender = self.world.still(flow.network, owner);
        let sender = sender.filter(|sender| owner != Owner::Service && ingress == IFINDEX_BASE + sender.id);
        let sender = sender.ok_or(Verdict::SourceAddress)?;
        Ok(sender.enforced.identity(address))
    }

    /// An error must be about a packet that this pod has sent to the stack, whatever became known about the peer since.
    fn error_from_stack(&self, row: &Row, packet: &Packet, at: usize, frame: &mut [u8]) -> Result<Verdict, Verdict> {
        let (quote, quoted) = Self::quoted(row, packet, at, frame)?;
        let flow = quoted.flow;
        if let Some(answers) = self.known(flow.reversed())
            && !answers.sender().is_local()
            && matches!(answers.receiver(), End::Local(_, version) if version == row.version)
            && answers.entry.is_live()
        {
            Self::translate_error(packet, &quote, &quoted, &answers, frame)?;
            return Ok(Verdict::Delivered);
        }
        match self.known(flow) {
            Some(known)
                if !known.receiver().is_local()
                    && matches!(known.sender(), End::Local(_, version) if version == row.version)
                    && known.entry.is_live() =>
            {
                Ok(Verdict::Delivered)
            }
            _ => Err(Verdict::IcmpUnrelated),
        }
    }
}
