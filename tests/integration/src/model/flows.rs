//! Models the flow table: the state of flows, their transitions and their end.

use super::{Flow, Model, Verdict, packet::Packet, translate, world::Version};

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;

/// Ticks after which a packet certainly is in a later window than the one before.
const A_WHILE: u64 = 256;

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

/// One end of a flow, at the time of the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// An endpoint.
    Local(u32, Version),
    /// Whatever the node's stack leads to, with the epoch of the other end.
    Stack(u64),
}

impl End {
    /// Whether it is an endpoint of this node.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Local(..))
    }

    /// The endpoint of this node.
    pub fn endpoint(self) -> Option<u32> {
        match self {
            Self::Local(id, _) => Some(id),
            Self::Stack(_) => None,
        }
    }

    /// Whether it is the endpoint, with the same owner.
    pub(super) fn is_of(self, id: u32, version: Version) -> bool {
        matches!(self, Self::Local(of, then) if of == id && then.same_life(version))
    }
}

/// A row of the flow table. Index 0 of a pair is the first end of the key, 1 the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own that a row tells"
)]
pub struct Entry {
    /// The ends.
    pub ends: [End; 2],
    /// The end that opened the flow.
    pub opened_by: usize,
    /// With a translation: the end whose packets the row is of.
    pub only_from: Option<usize>,
    /// The opener of the flow.
    pub opener: Opener,
    /// Whether the original destination is translated.
    pub service: bool,
    /// Whether a reply was seen.
    pub replied: bool,
    /// Whether the flow is established.
    pub confirmed: bool,
    /// UDP: whether the opener continued in a later window.
    pub aged: bool,
    /// The ends that have sent their FIN.
    pub finished: [bool; 2],
    /// Whether the connection has ended.
    pub closed: bool,
    /// Whether an RST came from outside of the node.
    pub reset: bool,
    /// The addresses and ports of the packet after its translation; those of the key without a translation.
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

    pub(super) fn is_reply(&self, from: usize) -> bool {
        self.opened_by != from
    }

    /// The flow's packets of that end after their translation. `key`: of the entry.
    fn translated(&self, key: Flow, from: usize) -> Flow {
        match (self.only_from, from) {
            (Some(_), _) => self.becomes,
            (None, 0) => key,
            (None, _) => key.reversed(),
        }
    }
}

/// The key of a flow's row, and the end that sends: the ends are sorted by address. Addresses are compared as words of
/// four bytes in the machine's order, the last one first.
pub fn key_of(flow: Flow) -> (Flow, usize) {
    let words = |address: std::net::IpAddr| {
        let bytes = kni_common::address::from_ip(address);
        let words = bytes.chunks_exact(4).rev();
        words
            .map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")))
            .collect::<Vec<_>>()
    };
    if words(flow.source.0) > words(flow.destination.0) {
        (flow.reversed(), 1)
    } else {
        (flow, 0)
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
    pub udp_replied: u32,
    pub udp_established: u32,
    pub sctp_established: u32,
    pub other_established: u32,
}

impl Lifetimes {
    fn of(&self, protocol: u8, entry: &Entry) -> u64 {
        let Entry { replied, confirmed, .. } = *entry;
        u64::from(match protocol {
            _ if entry.closed || entry.reset => self.tcp_closing,
            TCP if confirmed => self.tcp_established,
            TCP => self.tcp_new,
            UDP if confirmed => self.udp_established,
            UDP if replied => self.udp_replied,
            SCTP if confirmed => self.sctp_established,
            UDP | SCTP => self.other_new,
            _ if replied => self.other_established,
            _ => self.other_new,
        })
    }
}

/// The classes of flows that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Opened by the endpoint: TCP and SCTP.
    Connections,
    /// Opened by the endpoint: other protocols.
    Datagrams,
    /// Opened to the endpoint from elsewhere than a pod of the node.
    Inbound,
}

impl Class {
    fn of(protocol: u8, inbound: bool) -> Self {
        match protocol {
            _ if inbound => Self::Inbound,
            TCP | SCTP => Self::Connections,
            _ => Self::Datagrams,
        }
    }
}

/// A flow that was allowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) opener: Opener,
    pub(super) sender: End,
    pub(super) receiver: End,
    pub(super) becomes: Flow,
}

/// A flow's entry, its key and the end that sends the packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub(super) key: Flow,
    pub(super) from: usize,
    pub(super) entry: Entry,
}

impl Known {
    pub(super) fn sender(&self) -> End {
        self.entry.ends[self.from]
    }

    pub(super) fn receiver(&self) -> End {
        self.entry.ends[1 - self.from]
    }

    pub(super) fn is_reply(&self) -> bool {
        self.entry.is_reply(self.from)
    }

    /// The packet after its translation.
    pub(super) fn becomes(&self) -> Flow {
        self.entry.translated(self.key, self.from)
    }

    /// The packet before its translation.
    fn flow(&self) -> Flow {
        if self.from == 0 { self.key } else { self.key.reversed() }
    }

    /// The key of the other direction's entry, where the flow is translated.
    fn other_key(&self) -> Option<Flow> {
        self.entry.only_from.map(|_| key_of(self.entry.becomes.reversed()).0)
    }

    /// Whether the entry at that key belongs to the same flow: another one's may have replaced it.
    fn is_pair(&self, other: &Entry) -> bool {
        other.only_from.is_some() && other.becomes == self.flow().reversed()
    }
}

impl Model {
    /// The entry of a packet's flow.
    pub(super) fn known(&self, flow: Flow) -> Option<Known> {
        let (key, from) = key_of(flow);
        let entry = *self.flows.get(&key)?;
        let fits = entry.only_from.is_none_or(|only| only == from);
        fits.then_some(Known { key, from, entry })
    }

    /// The entry of a packet's flow.
    pub fn entry(&self, flow: Flow) -> Option<Entry> {
        self.known(flow).map(|known| known.entry)
    }

    /// The key of the other direction's entry of a translated flow, if it exists.
    fn other(&self, known: &Known) -> Option<Flow> {
        let key = known.other_key()?;
        let other = self.flows.get(&key)?;
        known.is_pair(other).then_some(key)
    }

    /// Writes a flow and overwrites existing entries.
    pub(super) fn learn(&mut self, flow: Flow, plan: &Plan) {
        let (key, from) = key_of(flow);
        let becomes = plan.becomes;
        let ends = |sender: usize| match sender {
            0 => [plan.sender, plan.receiver],
            _ => [plan.receiver, plan.sender],
        };
        let mut entry = Entry {
            ends: ends(from),
            opened_by: from,
            only_from: None,
            opener: plan.opener,
            service: false,
            replied: false,
            confirmed: false,
            aged: false,
            finished: [false; 2],
            closed: false,
            reset: false,
            becomes: key,
            lifetime: 0,
            idle: 0,
        };
        entry.lifetime = self.lifetimes.of(flow.protocol, &entry);
        if becomes != flow {
            entry.service = becomes.destination != flow.destination || becomes.source.1 != flow.source.1;
            let (other, to) = key_of(becomes.reversed());
            let reply = Entry {
                ends: ends(1 - to),
                opened_by: 1 - to,
                only_from: Some(to),
                becomes: flow.reversed(),
                ..entry
            };
            self.flows.insert(other, reply);
            entry.only_from = Some(from);
            entry.becomes = becomes;
        }
        self.flows.insert(key, entry);
    }

    /// Whether the entry or that of the other direction has not expired.
    pub(super) fn lives(&self, known: &Known) -> bool {
        let other = self.other(known).and_then(|other| self.flows.get(&other));
        known.entry.is_live() || other.is_some_and(Entry::is_live)
    }

    /// Updates the flow after a decision with the current versions of its ends.
    pub(super) fn renew(&mut self, known: &Known, sender: End, receiver: End) {
        let other = self.other(known).and_then(|other| self.flows.get_mut(&other));
        if let Some(other) = other
            && let Some(from) = other.only_from
        {
            other.ends[from] = receiver;
            other.ends[1 - from] = sender;
            other.idle = 0;
        }
        let mut entry = known.entry;
        entry.ends[known.from] = sender;
        entry.ends[1 - known.from] = receiver;
        entry.idle = 0;
        self.flows.insert(known.key, entry);
    }

    /// Processes a packet of the flow: refreshes the flow, translates the packet, and advances or ends the state.
    pub(super) fn follow(&mut self, flow: Flow, packet: &Packet, frame: &mut [u8]) -> Result<(), Verdict> {
        let mut known = self.known(flow).expect("a flow that is known");
        let later = known.entry.idle >= A_WHILE;
        known.entry.idle = 0;
        self.flows.insert(known.key, known.entry);
        if let Some(key) = known.other_key() {
            match self.flows.get_mut(&key) {
                Some(other) if later && known.is_pair(other) => other.idle = 0,
                Some(_) => {}
                None if later => self.restore(&known, flow),
                None => self.unsure.push((known.key, flow)),
            }
        }
        if known.becomes() != flow {
            translate::apply(frame, packet, &flow, &known.becomes())?;
        }
        self.turn(&known, packet, later);
        Ok(())
    }

    /// Writes the lost entry of the other direction of a translated flow, unless its key has one.
    fn restore(&mut self, known: &Known, flow: Flow) {
        let Known { entry, from, .. } = *known;
        let (key, to) = key_of(entry.becomes.reversed());
        let swapped = from == to;
        let swap = |pair: [bool; 2]| if swapped { [pair[1], pair[0]] } else { pair };
        let lost = Entry {
            ends: if swapped {
                [entry.ends[1], entry.ends[0]]
            } else {
                entry.ends
            },
            opened_by: if swapped { 1 - entry.opened_by } else { entry.opened_by },
            only_from: Some(to),
            finished: swap(entry.finished),
            becomes: flow.reversed(),
            ..entry
        };
        self.flows.entry(key).or_insert(lost);
    }

    fn turn(&mut self, known: &Known, packet: &Packet, later: bool) {
        let Known { key, from, mut entry } = *known;
        let flags = packet.tcp_flags;
        let ends = entry.finished.contains(&true) || entry.closed || entry.reset;
        if entry.confirmed && flags & (FIN | RST) == 0 && !ends {
            return;
        }
        if flags & (FIN | RST) == 0 && !ends && known.is_reply() == entry.replied {
            // A second reply, or a second request.
            return;
        }
        let other_key = self.other(known);
        let (local, both) = (
            known.sender().is_local(),
            known.sender().is_local() && known.receiver().is_local(),
        );
        if flags & RST != 0 {
            if local {
                // No packet follows: the entries are removed at once.
                self.remove(known);
                return;
            }
            for key in [Some(key), other_key].into_iter().flatten() {
                if let Some(entry) = self.flows.get_mut(&key) {
                    entry.reset = true;
                    entry.lifetime = u64::from(self.lifetimes.tcp_closing);
                }
            }
            return;
        }
        if entry.closed && flags & (FIN | SYN) == 0 && both {
            self.remove(known);
            return;
        }
        entry.reset &= !local;
        self.advance(&mut entry, known, packet, later);
        if other_key == Some(key) {
            // From an address and port to the same address and port: one row represents both directions.
            entry.finished = [entry.finished.contains(&true); 2];
        }
        let mut other = other_key
            .filter(|other| *other != key)
            .and_then(|key| self.flows.get(&key).copied());
        if let Some(other) = &mut other
            && let Some(to) = other.only_from
        {
            other.replied |= entry.replied;
            other.confirmed |= entry.confirmed;
            other.aged |= entry.aged;
            other.finished[1 - to] |= entry.finished[from];
            entry.finished[1 - from] |= other.finished[to];
            other.reset &= entry.reset;
        }
        entry.closed |= entry.finished == [true; 2];
        entry.lifetime = self.lifetimes.of(key.protocol, &entry);
        if let (Some(mut other), Some(other_key)) = (other, other_key) {
            other.closed |= entry.closed;
            other.lifetime = entry.lifetime;
            self.flows.insert(other_key, other);
        }
        self.flows.insert(key, entry);
    }

    fn advance(&mut self, entry: &mut Entry, known: &Known, packet: &Packet, later: bool) {
        let protocol = known.key.protocol;
        let connected = matches!(protocol, TCP | UDP | SCTP);
        if known.is_reply() {
            entry.replied = true;
            entry.confirmed |= !connected;
        } else if entry.replied {
            match protocol {
                TCP => entry.confirmed |= packet.tcp_flags & SYN == 0,
                UDP if later => entry.confirmed |= entry.aged,
                // The clock may have moved on to the next window.
                UDP => self.unsure.push((known.key, known.key)),
                _ => entry.confirmed = true,
            }
            entry.aged |= later && protocol == UDP;
        }
        entry.finished[known.from] |= packet.tcp_flags & FIN != 0;
    }

    /// Entries about which the model cannot know whether the last packet was in a later window: `flags` returns whether
    /// the kernel's row of a key is aged and confirmed, `exists` whether there is one.
    pub fn complete(&mut self, row: &mut dyn FnMut(Flow) -> Option<(bool, bool)>) {
        for (key, flow) in std::mem::take(&mut self.unsure) {
            let Some(known) = self.flows.get(&key).copied() else {
                continue;
            };
            if key == flow {
                self.complete_stream(key, known, row(key));
                continue;
            }
            let (_, from) = key_of(flow);
            let known = Known {
                key,
                from,
                entry: known,
            };
            let other = known.other_key().expect("a translated flow");
            if !self.flows.contains_key(&other) && row(other).is_some() {
                self.restore(&known, flow);
            }
        }
    }

    fn complete_stream(&mut self, key: Flow, mut entry: Entry, row: Option<(bool, bool)>) {
        let Some((aged, confirmed)) = row else { return };
        if aged == entry.aged && confirmed == entry.confirmed {
            return;
        }
        // The one step that a later window allows.
        entry.confirmed |= entry.aged;
        entry.aged = true;
        entry.lifetime = self.lifetimes.of(key.protocol, &entry);
        self.flows.insert(key, entry);
        let from = entry.only_from.unwrap_or(0);
        let other = self.other(&Known { key, from, entry });
        if let Some(other) = other.and_then(|other| self.flows.get_mut(&other)) {
            other.aged = true;
            other.confirmed = entry.confirmed;
            other.lifetime = entry.lifetime;
        }
    }

    /// Removes an ended flow, which no longer counts.
    fn remove(&mut self, known: &Known) {
        if let Some(other) = self.other(known) {
            self.flows.remove(&other);
        }
        self.flows.remove(&known.key);
        let opener = known.entry.ends[known.entry.opened_by];
        let target = known.entry.ends[1 - known.entry.opened_by];
        let account = match (opener, target) {
            (End::Local(id, _), _) => (id, Class::of(known.key.protocol, false)),
            (End::Stack(_), End::Local(id, _)) => (id, Class::Inbound),
            (End::Stack(_), End::Stack(_)) => return,
        };
        if let Some(opened) = self.opened.get_mut(&account) {
            *opened = opened.saturating_sub(1);
        }
    }

    /// Removes the flows of the network that use the node's stack.
    pub fn remove_external(&mut self, network: u32) {
        self.flows
            .retain(|flow, entry| flow.network != network || entry.ends.iter().all(|end| end.is_local()));
    }

    /// Whether the endpoint may open another flow, and no other endpoint uses the same ports towards the same receiver.
    pub(super) fn may_open(&self, id: u32, flow: Flow, opens: bool, becomes: Flow) -> Result<(), Verdict> {
        if opens && let Some(answers) = self.flows.get(&key_of(becomes.reversed()).0) {
            let same = match answers.only_from {
                None => becomes == flow,
                Some(_) => answers.becomes == flow.reversed(),
            };
            if answers.replied && !answers.closed && answers.is_live() && !same {
                return Err(Verdict::TupleInUse);
            }
        }
        self.may_have_more(id, flow.protocol, false)
    }

    /// Whether the endpoint's share of the tables has room.
    pub(super) fn may_have_more(&self, id: u32, protocol: u8, inbound: bool) -> Result<(), Verdict> {
        let class = Class::of(protocol, inbound);
        let opened = self.opened.get(&(id, class)).copied().unwrap_or(0);
        let limit = match class {
            Class::Datagrams => 2 * self.flows_per_endpoint,
            Class::Connections | Class::Inbound => self.flows_per_endpoint,
        };
        if limit != 0 && opened >= limit {
            Err(Verdict::FlowQuota)
        } else {
            Ok(())
        }
    }

    /// Counts an opened flow.
    pub(super) fn count_opened(&mut self, id: u32, protocol: u8, inbound: bool) {
        *self.opened.entry((id, Class::of(protocol, inbound))).or_default() += 1;
    }
}
