//! Models the flow table: the state of flows, their transitions and their end.

use super::{Flow, Model, Verdict, packet::Packet, translate, world::Version};

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const FIN: u8 = 0x01;
const RST: u8 = 0x04;

/// Ticks after which a packet also refreshes the other direction.
const A_WHILE: u64 = 256;

/// The destination of the packets of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From one endpoint directly to another.
    Local,
    /// From an endpoint to the node's stack.
    ToStack,
    /// From the node's stack to an endpoint.
    FromStack,
}

/// The opener of a flow, if it determines which policies apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// A pod, or a host outside the node.
    Anybody,
    /// A pod that reaches itself through a service: no policy applies.
    Itself,
    /// The node, which may always reach its pods.
    Node,
}

/// The state of one direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own that a row tells"
)]
pub struct Entry {
    /// The kind of destination of its packets.
    pub kind: Kind,
    /// The local endpoint that sends, at the time of the decision.
    pub sender: Option<Version>,
    /// The local endpoint that receives, at the time of the decision.
    pub receiver: Option<Version>,
    /// The number of that endpoint.
    pub to: Option<u32>,
    /// Whether it is the reply direction.
    pub answer: bool,
    /// The opener of the flow.
    pub opener: Opener,
    /// Whether an answer was seen.
    pub confirmed: bool,
    /// Whether this direction has sent its FIN.
    pub finished: bool,
    /// Whether the connection has ended.
    pub closed: bool,
    /// The addresses and ports of the packet after its translation; unchanged without a translation.
    pub becomes: Flow,
    /// Ticks without a packet after which the entry expires.
    pub lifetime: u64,
    /// Ticks since its last packet.
    pub idle: u64,
}

impl Entry {
    pub(super) fn is_live(&self) -> bool {
        self.idle <= self.lifetime
    }
}

/// Ticks without a packet after which flows expire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in `kni_common::config::Config`")]
pub struct Lifetimes {
    pub tcp_new: u32,
    pub tcp_established: u32,
    pub tcp_closing: u32,
    pub other_new: u32,
    pub udp_established: u32,
    pub sctp_established: u32,
    pub other_established: u32,
}

impl Lifetimes {
    fn unanswered(&self, protocol: u8) -> u64 {
        u64::from(if protocol == TCP { self.tcp_new } else { self.other_new })
    }

    fn answered(&self, protocol: u8) -> u64 {
        u64::from(match protocol {
            TCP => self.tcp_established,
            UDP => self.udp_established,
            SCTP => self.sctp_established,
            _ => self.other_established,
        })
    }
}

/// A flow that was allowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    pub(super) opener: Opener,
    pub(super) sender: Option<(u32, Version)>,
    pub(super) receiver: Option<(u32, Version)>,
    pub(super) becomes: Flow,
}

impl Model {
    /// Writes both directions and overwrites existing entries.
    pub(super) fn learn(&mut self, flow: Flow, plan: &Plan) {
        let Plan { sender, receiver, .. } = *plan;
        let entry = Entry {
            kind: plan.kind,
            sender: sender.map(|(_, version)| version),
            receiver: receiver.map(|(_, version)| version),
            to: receiver.map(|(id, _)| id),
            answer: false,
            opener: plan.opener,
            confirmed: false,
            finished: false,
            closed: false,
            becomes: plan.becomes,
            lifetime: self.lifetimes.unanswered(flow.protocol),
            idle: 0,
        };
        let answers = Entry {
            kind: match plan.kind {
                Kind::Local => Kind::Local,
                Kind::ToStack => Kind::FromStack,
                Kind::FromStack => Kind::ToStack,
            },
            sender: entry.receiver,
            receiver: entry.sender,
            to: sender.map(|(id, _)| id),
            answer: true,
            becomes: flow.reversed(),
            ..entry
        };
        self.flows.insert(plan.becomes.reversed(), answers);
        self.flows.insert(flow, entry);
    }

    /// Restores the lost entry of the reply direction; possible only without translation, because it then follows from
    /// the other entry.
    pub(super) fn repair(&mut self, answer: Flow, kind: Kind, to: Option<u32>) -> Entry {
        let original = self.flows[&answer.reversed()];
        let entry = Entry {
            kind,
            sender: original.receiver,
            receiver: original.sender,
            to,
            answer: true,
            finished: false,
            becomes: answer,
            ..original
        };
        self.flows.insert(answer, entry);
        entry
    }

    /// Whether either direction has not expired.
    pub(super) fn lives(&self, entry: &Entry) -> bool {
        let other = self.flows.get(&entry.becomes.reversed());
        entry.is_live() || other.is_some_and(Entry::is_live)
    }

    /// Updates both directions after a decision with the current versions of their ends.
    pub(super) fn renew(&mut self, flow: Flow, sender: Option<Version>, receiver: Option<Version>) {
        let entry = self.flows[&flow];
        if let Some(other) = self.flows.get_mut(&entry.becomes.reversed()) {
            (other.sender, other.receiver) = (receiver, sender);
            other.idle = 0;
        }
        let renewed = Entry {
            sender,
            receiver,
            idle: 0,
            ..entry
        };
        self.flows.insert(flow, renewed);
    }

    /// Processes a packet of the flow: refreshes the flow, translates the packet, and advances or ends the state.
    /// Returns the entry.
    pub(super) fn follow(&mut self, flow: Flow, packet: &Packet, frame: &mut [u8]) -> Result<Entry, Verdict> {
        let mut entry = self.flows[&flow];
        // The programs do so occasionally; ticks that pass by themselves in the meantime do not matter.
        if entry.idle >= A_WHILE
            && let Some(other) = self.flows.get_mut(&entry.becomes.reversed())
        {
            other.idle = 0;
        }
        entry.idle = 0;
        self.flows.insert(flow, entry);
        if entry.becomes != flow {
            translate::apply(frame, packet, &flow, &entry.becomes)?;
        }
        self.turn(flow, entry, packet);
        Ok(entry)
    }

    fn turn(&mut self, flow: Flow, mut entry: Entry, packet: &Packet) {
        let key = entry.becomes.reversed();
        if packet.tcp_flags & RST != 0 {
            // No packet follows: both entries are removed at once.
            self.flows.remove(&flow);
            if let Some(other) = self.flows.remove(&key).or((key == flow).then_some(entry)) {
                self.give_back(&entry, &other);
            }
            return;
        }
        let answered = entry.answer && !entry.confirmed;
        entry.finished |= packet.tcp_flags & FIN != 0;
        // From an address and port to the same address and port: one row represents both directions.
        let known = self.flows.get(&key).copied();
        let mut other = if key == flow { Some(entry) } else { known };
        let both = entry.finished && other.is_some_and(|other| other.finished);
        let ends = both && (answered || packet.tcp_flags & FIN != 0);
        let lifetime = if ends || entry.closed {
            u64::from(self.lifetimes.tcp_closing)
        } else {
            self.lifetimes.answered(flow.protocol)
        };
        if let Some(other) = &other
            && ends
        {
            self.give_back(&entry, other);
        }
        if answered || ends {
            for entry in [Some(&mut entry), other.as_mut()].into_iter().flatten() {
                entry.confirmed |= answered;
                entry.closed |= ends;
                entry.lifetime = lifetime;
            }
        }
        if let Some(other) = other {
            self.flows.insert(key, other);
        }
        self.flows.insert(flow, entry);
    }

    /// An ended flow no longer counts towards the share of its opener, or of its receiver if the opener is outside the
    /// node.
    fn give_back(&mut self, entry: &Entry, other: &Entry) {
        if entry.closed {
            return;
        }
        let (answer, original) = if entry.answer { (entry, other) } else { (other, entry) };
        if let Some(opened) = answer.to.or(original.to).and_then(|owner| self.opened.get_mut(&owner)) {
            *opened = opened.saturating_sub(1);
        }
    }

    /// Removes the flows of the network that use the node's stack.
    pub fn remove_external(&mut self, network: u32) {
        self.flows
            .retain(|flow, entry| flow.network != network || entry.kind == Kind::Local);
    }

    /// Whether the endpoint may open another flow, and no other endpoint uses the same ports towards the same receiver.
    pub(super) fn may_open(&self, id: u32, flow: Flow, opens: bool, becomes: Flow) -> Result<(), Verdict> {
        if opens && let Some(answers) = self.flows.get(&becomes.reversed()) {
            let answered = answers.answer && answers.confirmed && !answers.closed;
            if answered && answers.is_live() && answers.becomes.reversed() != flow {
                return Err(Verdict::TupleInUse);
            }
        }
        self.may_have_more(id)
    }

    /// Whether the endpoint's share of the tables has room.
    pub(super) fn may_have_more(&self, id: u32) -> Result<(), Verdict> {
        let opened = self.opened.get(&id).copied().unwrap_or(0);
        if self.flows_per_endpoint != 0 && opened >= self.flows_per_endpoint {
            Err(Verdict::FlowQuota)
        } else {
            Ok(())
        }
    }
}
