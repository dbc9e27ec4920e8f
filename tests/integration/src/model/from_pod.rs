//! Models the processing of a frame that a pod sends.

use std::net::IpAddr;

use super::{
    Direction, Flow, Model, Outcome, Verdict, answer,
    flows::{Entry, Kind},
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
    pub(super) fn judge_sent(
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
        let ports = self.ports(row.endpoint.network, Direction::FromPod, &packet)?;
        self.pass(row, &packet, ports, outcome, choose)
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
            let (kind, to) = self.error_from_pod(row, packet, at, &mut outcome.frame)?;
            return Ok(self.go(kind, to, outcome));
        }
        let flow = Flow {
            network: row.endpoint.network,
            protocol: packet.protocol,
            source: (packet.source, ports.0),
            destination: (packet.destination, ports.1),
        };
        let opens = matches!(packet.content, Content::Open(..));
        let entry = if !opens && self.belongs_to_own(row, flow)? {
            self.follow(flow, packet, &mut outcome.frame)?
        } else {
            let opening = Opening { row, flow, opens };
            match self.open(&opening, choose) {
                Ok(()) => {
                    let entry = self.flows[&flow];
                    if entry.becomes != flow {
                        translate::apply(&mut outcome.frame, packet, &flow, &entry.becomes)?;
                    }
                    entry
                }
                Err(reason) => {
                    if [Verdict::NoServicePort, Verdict::NoBackend].contains(&reason)
                        && let Some(answer) = refuse::answer(&outcome.frame, packet)
                    {
                        outcome.frame = answer;
                        outcome.refused = true;
                    }
                    return Err(reason);
                }
            }
        };
        Ok(self.go(entry.kind, entry.to, outcome))
    }

    /// Whether an earlier decision is still valid: both ends have the same owners and policies.
    pub(super) fn is_current_from(&self, row: &Row, entry: &Entry) -> bool {
        let there = || {
            let there = entry.to.and_then(|to| self.world.ready(to));
            there.is_some_and(|there| {
                Some(there.version) == entry.receiver && there.endpoint.network == row.endpoint.network
            })
        };
        let way = match entry.kind {
            Kind::Local => there(),
            Kind::ToStack => row.endpoint.host_access,
            Kind::FromStack => false,
        };
        way && entry.sender == Some(row.version) && entry.is_live()
    }

    /// Whether the packet belongs to a flow; evaluates policies again if required, for the direction in which the flow
    /// was opened.
    fn belongs_to_own(&mut self, row: &Row, flow: Flow) -> Result<bool, Verdict> {
        let known = self.flows.get(&flow).copied();
        if known.is_some_and(|entry| self.is_current_from(row, &entry)) {
            return Ok(true);
        }
        let Some(entry) = known.or_else(|| self.lost_answer(row, flow)) else {
            return Ok(false);
        };
        let mine = entry.sender.is_some_and(|version| version.same_life(row.version));
        if !mine || !self.lives(&entry) {
            return Ok(false);
        }
        let mut hits = Hits::new();
        let judged = match entry.kind {
            Kind::FromStack => return Ok(false),
            Kind::ToStack if !row.endpoint.host_access => return Ok(false),
            Kind::ToStack => self.judge_stack_again(row, flow, &entry, &mut hits).map(|()| None),
            Kind::Local => {
                let there = entry.to.and_then(|to| self.world.ready(to)).filter(|there| {
                    there.endpoint.network == flow.network
                        && entry.receiver.is_some_and(|version| version.same_life(there.version))
                });
                let Some(there) = there else { return Ok(false) };
                self.judge_local_again(row, &there, flow, &entry, &mut hits)
                    .map(|()| Some(there.version))
            }
        };
        self.hit(hits);
        self.renew(flow, Some(row.version), judged?);
        Ok(true)
    }

    fn judge_local_again(
        &self,
        row: &Row,
        there: &Row,
        flow: Flow,
        entry: &Entry,
        hits: &mut Hits,
    ) -> Result<(), Verdict> {
        match (entry.opener, entry.answer) {
            (super::flows::Opener::Itself, _) => Ok(()),
            (_, false) => self.between(row, there, entry.becomes, hits),
            // The request of the other endpoint, as this one received it.
            (_, true) => self.between(there, row, flow.reversed(), hits),
        }
    }

    fn judge_stack_again(&self, row: &Row, flow: Flow, entry: &Entry, hits: &mut Hits) -> Result<(), Verdict> {
        match (entry.answer, entry.opener) {
            (false, _) => self.leaving(row, entry.becomes, hits),
            (true, super::flows::Opener::Node) => Ok(()),
            (true, _) => {
                let peer = self.identity_at(flow.network, flow.destination.0);
                self.entering(row, peer, flow.reversed(), hits)
            }
        }
    }

    /// The reply entry of a flow whose original entry exists.
    fn lost_answer(&mut self, row: &Row, flow: Flow) -> Option<Entry> {
        let original = self.flows.get(&flow.reversed())?;
        let mine = original.receiver.is_some_and(|version| version.same_life(row.version));
        if original.answer || original.becomes != flow.reversed() || !mine || !original.is_live() {
            return None;
        }
        match original.kind {
            Kind::FromStack => Some(self.repair(flow, Kind::ToStack, None)),
            Kind::Local => {
                let client = self.world.endpoint_at(flow.network, flow.destination.0)?;
                Some(self.repair(flow, Kind::Local, Some(client)))
            }
            Kind::ToStack => None,
        }
    }

    /// The receiver gets a frame from its own gateway.
    fn go(&self, kind: Kind, to: Option<u32>, outcome: &mut Outcome) -> Verdict {
        if kind != Kind::Local {
            return Verdict::PassedToStack;
        }
        let to = to.expect("a local flow has a receiver");
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
