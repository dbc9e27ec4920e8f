//! What the programs of the dataplane should do, said once more and plainly: the judge of the frame tests.
//!
//! It is written from what the programs document, shares no code with them, and is slow: whole packets are parsed into
//! values, tables are maps of values, and nothing is packed. Where it and a program differ, one of them is wrong.
//!
//! Differences of notion, on purpose: a program compares generations of rows, the model [`Incarnation`]s, which are
//! never used twice. A program's tables may evict; the model's do not, so whoever compares both must not fill them.

mod answer;
mod from_pod;
mod packet;
mod to_pod;
mod world;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

pub use kni_common::{Direction, Verdict};
pub use world::{Endpoint, Incarnation, Route, World};

/// What became of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Decision.
    pub verdict: Verdict,
    /// To whom it was redirected.
    pub destination: Option<u32>,
    /// The frame afterwards.
    pub frame: Vec<u8>,
}

/// The two ends of a flow, as they stand in a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// Network id.
    pub network: u32,
    /// Transport protocol number.
    pub protocol: u8,
    /// Source address and port (or echo identifier, or 0).
    pub source: (IpAddr, u16),
    /// Destination address and port (or echo identifier, or 0).
    pub destination: (IpAddr, u16),
}

impl Flow {
    /// The flow of the answers.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ..self
        }
    }
}

/// What was decided for the packets of a flow, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From one endpoint straight to another.
    Local {
        /// Who sends.
        sender: Incarnation,
        /// The endpoint that receives.
        to: u32,
        /// Who that was.
        receiver: Incarnation,
    },
    /// From an endpoint to the node's stack.
    ToStack {
        /// Who sends.
        sender: Incarnation,
    },
    /// From the node's stack to an endpoint.
    FromStack {
        /// Who receives.
        receiver: Incarnation,
    },
}

/// Which datagram a fragment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Datagram {
    /// Network id.
    pub network: u32,
    /// Which program saw it.
    pub direction: Direction,
    /// Transport protocol number.
    pub protocol: u8,
    /// Identification field.
    pub identification: u32,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
}

/// Packets and bytes by endpoint (0 for none), direction and verdict.
pub type Counts = BTreeMap<(u32, Direction, Verdict), (u64, u64)>;

/// The model: who is there, and what was learnt from the packets so far.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Who is there.
    pub world: World,
    /// Flow table.
    pub flows: HashMap<Flow, Way>,
    /// Ports of fragmented datagrams.
    pub fragments: HashMap<Datagram, (u16, u16)>,
    /// Counters.
    pub counts: Counts,
}

impl Model {
    /// What becomes of a frame that the endpoint's host interface sees in that direction; counts it.
    pub fn judge(&mut self, direction: Direction, endpoint: u32, frame: &[u8]) -> Outcome {
        let mut outcome = Outcome {
            verdict: Verdict::NoEndpoint,
            destination: None,
            frame: frame.to_vec(),
        };
        let met = self.world.has_row(endpoint);
        outcome.verdict = if !met {
            Verdict::NoEndpoint
        } else if let Some(row) = self.world.ready(endpoint) {
            let judged = match direction {
                Direction::FromPod => self.judge_sent(endpoint, &row, frame, &mut outcome),
                Direction::ToPod => self.judge_received(&row, frame),
            };
            judged.unwrap_or_else(|reason| reason)
        } else {
            Verdict::EndpointNotReady
        };
        self.count(if met { endpoint } else { 0 }, direction, outcome.verdict, frame.len());
        if let Some(destination) = outcome.destination {
            self.count(destination, Direction::ToPod, Verdict::Redirected, frame.len());
        }
        outcome
    }

    fn count(&mut self, endpoint: u32, direction: Direction, verdict: Verdict, length: usize) {
        let (packets, bytes) = self.counts.entry((endpoint, direction, verdict)).or_default();
        *packets += 1;
        *bytes += u64::try_from(length).expect("a frame's length");
    }

    /// Makes the endpoint ready under a new incarnation. Drops from before it was are forgotten.
    pub fn publish(&mut self, endpoint: u32, config: Endpoint) {
        self.world.publish(endpoint, config);
        self.counts
            .retain(|(id, _, verdict), _| *id != endpoint || *verdict != Verdict::EndpointNotReady);
    }

    /// Forgets the endpoint, its addresses and its counters.
    pub fn withdraw(&mut self, endpoint: u32) {
        self.world.withdraw(endpoint);
        self.counts.retain(|(id, _, _), _| *id != endpoint);
    }

    /// The ports that stand for a packet in the flow table. A first fragment's are remembered for the later ones.
    fn ports(&mut self, network: u32, direction: Direction, packet: &packet::Packet) -> Result<(u16, u16), Verdict> {
        let own = packet.content.ports();
        let (first, identification) = match packet.fragment {
            packet::Fragment::Whole => return Ok(own),
            packet::Fragment::First(id) => (true, id),
            packet::Fragment::Later(id) => (false, id),
        };
        if !packet::names_flows_by_ports(packet.protocol) {
            return Ok(own);
        }
        let datagram = Datagram {
            network,
            direction,
            protocol: packet.protocol,
            identification,
            source: packet.source,
            destination: packet.destination,
        };
        if first {
            self.fragments.insert(datagram, own);
            return Ok(own);
        }
        self.fragments
            .get(&datagram)
            .copied()
            .ok_or(Verdict::FragmentWithoutFirst)
    }

    fn learn(&mut self, flow: Flow, way: Way, answers: Way) {
        self.flows.insert(flow.reversed(), answers);
        self.flows.insert(flow, way);
    }
}
