//! Models the processing of a frame that a pod sends.

use std::net::IpAddr;

use super::{
    Direction, Flow, Model, Outcome, Verdict, answer,
    flows::{End, Known, Opener},
    open::Opening,
    packet::{self, Content, ETHERNET, Packet},
    policy::Hits,
    refuse,
    service::Choose,
    translate,
    world::Row,
};

impl Model {
    /// The order is that of the program's documentation: VLAN, source MAC, ARP, headers, link control, source address,
    /// destination kind, destination MAC, fragment, flow, then for a packet without a current flow service,
    /// destination, policy of both sides, share of the flow tables.
    pub(super) fn evaluate_sent(
        &mut self,
        row: &Row,
        frame: &[u8],
        outcome: &mut Outcome,
        choose: &mut Choose<'_>,
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
        let network = row.endpoint.network;
        let (protocol, ports) = self.flow_of(network, Direction::FromPod, &packet)?;
        let packet = Packet { protocol, ..packet };
        let verdict = self.pass(row, &packet, ports, outcome, choose)?;
        self.vouch(network, Direction::FromPod, &packet);
        Ok(verdict)
    }

    fn pass(
        &mut self,
        row: &Row,
        packet: &Packet,
        ports: (u16, u16),
        outcome: &mut Outcome,
        choose: &mut Choose<'_>,
    ) -> Result<Verdict, Verdict> {
        if let Content::Error(at) = packet.content {
            let to = self.error_from_pod(row, packet, at, &mut outcome.frame)?;
            return Ok(self.go(to, outcome));
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let opens = matches!(packet.content, Content::Open(..));
        if !opens && self.belongs_to_own(row, flow)? {
            let to = self.known(flow).expect("it belongs to it").receiver();
            self.follow(flow, packet, &mut outcome.frame)?;
            return Ok(self.go(to, outcome));
        }
        let opening = Opening { row, flow, opens };
        match self.open(&opening, choose) {
            Ok(()) => {
                let known = self.known(flow).expect("opened just now");
                if known.becomes() != flow {
                    translate::apply(&mut outcome.frame, packet, &flow, &known.becomes())?;
                }
                Ok(self.go(known.receiver(), outcome))
            }
            Err(reason) => {
                if [Verdict::NoServicePort, Verdict::NoBackend].contains(&reason)
                    && let Some(answer) = refuse::answer(&outcome.frame, packet)
                {
                    outcome.frame = answer;
                    outcome.refused = true;
                }
                Err(reason)
            }
        }
    }

    /// Whether an earlier decision is still valid: both ends have the same owners and policies.
    pub(super) fn is_current_from(&self, row: &Row, known: &Known) -> bool {
        let way = match known.receiver() {
            End::Local(to, version) => self
                .world
                .ready(to)
                .is_some_and(|there| there.version == version && there.endpoint.network == row.endpoint.network),
            End::Stack(epoch) => row.endpoint.host_access && epoch == row.epoch,
        };
        let mine = matches!(known.sender(), End::Local(_, version) if version == row.version);
        way && mine && known.entry.is_live()
    }

    /// Whether the packet belongs to a flow; evaluates policies again if required, for the direction in which the flow
    /// was opened.
    fn belongs_to_own(&mut self, row: &Row, flow: Flow) -> Result<bool, Verdict> {
        let Some(known) = self.known(flow) else {
            return Ok(false);
        };
        if self.is_current_from(row, &known) {
            return Ok(true);
        }
        if !known.sender().is_of(row.id, row.version) || !self.lives(&known) {
            return Ok(false);
        }
        let mut hits = Hits::new();
        let judged = match known.receiver() {
            End::Stack(_) if !row.endpoint.host_access => return Ok(false),
            End::Stack(_) => self
                .evaluate_stack_again(row, flow, &known, &mut hits)
                .map(|()| End::Stack(row.epoch)),
            End::Local(to, version) => {
                let there = self
                    .world
                    .ready(to)
                    .filter(|there| there.endpoint.network == flow.network && version.same_life(there.version));
                let Some(there) = there else { return Ok(false) };
                self.evaluate_local_again(row, &there, flow, &known, &mut hits)
                    .map(|()| End::Local(to, there.version))
            }
        };
        self.hit(hits);
        self.renew(&known, End::Local(row.id, row.version), judged?);
        Ok(true)
    }

    fn evaluate_local_again(
        &self,
        row: &Row,
        there: &Row,
        flow: Flow,
        known: &Known,
        hits: &mut Hits,
    ) -> Result<(), Verdict> {
        match (known.entry.opener, known.is_reply()) {
            (Opener::Itself, _) => Ok(()),
            (_, false) => self.between(row, there, known.becomes(), hits),
            // The request of the other endpoint, as this one received it.
            (_, true) => self.between(there, row, flow.reversed(), hits),
        }
    }

    fn evaluate_stack_again(&self, row: &Row, flow: Flow, known: &Known, hits: &mut Hits) -> Result<(), Verdict> {
        match (known.is_reply(), known.entry.opener) {
            (false, _) => self.leaving(row, known.becomes(), hits),
            (true, Opener::Node) => Ok(()),
            (true, _) => {
                let peer = self.identity_at(flow.network, flow.destination.0);
                self.entering(row, peer, flow.reversed(), hits)
            }
        }
    }

    /// The receiver gets a frame from its own gateway.
    fn go(&self, to: End, outcome: &mut Outcome) -> Verdict {
        let End::Local(to, _) = to else {
            return Verdict::PassedToStack;
        };
        let there = self.world.endpoint(to).expect("a current flow leads to an endpoint");
        outcome.frame[..6].copy_from_slice(&there.mac);
        outcome.frame[6..12].copy_from_slice(&there.host_mac);
        outcome.destination = Some(to);
        Verdict::Redirected
    }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Multicast of both families and the limited broadcast; other broadcast addresses cannot be recognized by themselves.
pub(super) fn is_for_many(address: IpAddr) -> bool {
    address.is_multicast() || address == IpAddr::from([255; 4])
}
