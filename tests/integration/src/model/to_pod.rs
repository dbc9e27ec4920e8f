//! Models the processing of a frame that reaches a pod through the node's stack.

use kni_common::IFINDEX_BASE;

use super::{
    Direction, Flow, Model, Outcome, Verdict,
    flows::{Entry, Kind, Opener, Plan},
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
    pub(super) fn judge_received(
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
        let ports = self.ports(row.endpoint.network, Direction::ToPod, &packet)?;
        if let Content::Error(at) = packet.content {
            return self.error_from_stack(row, &packet, at, &mut outcome.frame);
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let opens = matches!(packet.content, Content::Open(..));
        if !opens && self.belongs_to_known(row, flow)? {
            self.follow(flow, &packet, &mut outcome.frame)?;
            return Ok(Verdict::Delivered);
        }
        self.open_from_stack(row, ingress, flow)?;
        Ok(Verdict::Delivered)
    }

    fn is_current_to(row: &Row, entry: &Entry) -> bool {
        entry.kind == Kind::FromStack && entry.receiver == Some(row.version) && entry.is_live()
    }

    /// Whether the packet belongs to a flow; evaluates policies again if required.
    fn belongs_to_known(&mut self, row: &Row, flow: Flow) -> Result<bool, Verdict> {
        let known = self.flows.get(&flow).copied();
        if known.is_some_and(|entry| Self::is_current_to(row, &entry)) {
            return Ok(true);
        }
        let Some(entry) = known.or_else(|| self.lost_answer_from_stack(row, flow)) else {
            return Ok(false);
        };
        let mine = entry.receiver.is_some_and(|version| version.same_life(row.version));
        if entry.kind != Kind::FromStack || !mine || !self.lives(&entry) {
            return Ok(false);
        }
        let mut hits = Hits::new();
        let judged = if entry.answer {
            self.leaving(row, flow.reversed(), &mut hits)
        } else if entry.opener == Opener::Node {
            Ok(())
        } else {
            let peer = self.identity_at(flow.network, flow.source.0);
            self.entering(row, peer, flow, &mut hits)
        };
        self.hit(hits);
        judged?;
        self.renew(flow, None, Some(row.version));
        Ok(true)
    }

    fn lost_answer_from_stack(&mut self, row: &Row, flow: Flow) -> Option<Entry> {
        let original = self.flows.get(&flow.reversed())?;
        let mine = original.sender.is_some_and(|version| version.same_life(row.version));
        let direct = !original.answer && original.becomes == flow.reversed();
        let usable = original.kind == Kind::ToStack && direct && mine && original.is_live();
        usable.then(|| self.repair(flow, Kind::FromStack, Some(row.id)))
    }

    fn open_from_stack(&mut self, row: &Row, ingress: u32, flow: Flow) -> Result<(), Verdict> {
        let mut opener = Opener::Node;
        if ingress != 0 {
            opener = Opener::Anybody;
            let peer = self.external_sender(flow, ingress)?;
            let mut hits = Hits::new();
            let judged = self.entering(row, peer, flow, &mut hits);
            self.hit(hits);
            judged?;
        }
        self.may_have_more(row.id)?;
        *self.opened.entry(row.id).or_default() += 1;
        let plan = Plan {
            kind: Kind::FromStack,
            opener,
            sender: None,
            receiver: Some((row.id, row.version)),
            becomes: flow,
        };
        self.learn(flow, &plan);
        Ok(())
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

    /// An error must be about a packet that this pod has sent to the stack.
    fn error_from_stack(&self, row: &Row, packet: &Packet, at: usize, frame: &mut [u8]) -> Result<Verdict, Verdict> {
        let (quote, quoted) = Self::quoted(row, packet, at, frame)?;
        let flow = quoted.flow;
        if let Some(answers) = self.flows.get(&flow.reversed())
            && Self::is_current_to(row, answers)
        {
            Self::translate_error(packet, &quote, &quoted, answers, frame)?;
            return Ok(Verdict::Delivered);
        }
        match self.flows.get(&flow) {
            Some(entry) if entry.kind == Kind::ToStack && entry.sender == Some(row.version) && entry.is_live() => {
                Ok(Verdict::Delivered)
            }
            _ => Err(Verdict::IcmpUnrelated),
        }
    }
}
