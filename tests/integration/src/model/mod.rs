//! A plain second implementation of the data plane's programs, with which the frame tests compare them.
//!
//! It is written from what the programs document, shares no code with them, and is slow: whole packets are parsed into
//! values, tables are maps of values, and nothing is packed. Where it and a program differ, one of them is wrong.
//!
//! Differences of notion, on purpose: a program compares generations of rows, the model [`Version`]s, which are never
//! used twice. A program looks at the clock, the model counts ages and has its time advanced by the test. A
//! program's tables may evict; the model's do not, so a comparison must not fill them. A program chooses
//! backends at random; the model is given the chosen one.

mod answer;
mod flows;
mod from_pod;
mod open;
mod packet;
mod policy;
mod refuse;
mod related;
mod service;
mod to_pod;
mod translate;
mod world;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

pub use flows::{Entry, Kind, Lifetimes, Opener};
use kni_common::counter::HitKey;
pub use kni_common::{Direction, Verdict};
pub use policy::{ANYBODY, Allowed, Asked, Policies, PortRow};
pub use service::{Backend, Candidate, Choice, Choose, Front, Last, Service, Services};
pub use world::{Endpoint, Enforced, Route, Version, World};

/// What became of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Decision.
    pub verdict: Verdict,
    /// To whom it was redirected.
    pub destination: Option<u32>,
    /// Whether the sender got an answer that refuses a dropped packet: the frame afterwards.
    pub refused: bool,
    /// The frame afterwards.
    pub frame: Vec<u8>,
}

/// Where a frame is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Which program sees it.
    pub direction: Direction,
    /// At whose host interface.
    pub endpoint: u32,
    /// Index of the interface through which the node got it, 0 where the node made it.
    pub ingress: u32,
}

impl Seen {
    /// What the pod sends.
    pub fn from_pod(endpoint: u32) -> Self {
        Self {
            direction: Direction::FromPod,
            endpoint,
            ingress: 0,
        }
    }

    /// What the node's stack hands to the pod, got through the interface with that index or made by the node itself (0).
    pub fn to_pod(endpoint: u32, ingress: u32) -> Self {
        Self {
            direction: Direction::ToPod,
            endpoint,
            ingress,
        }
    }

    /// Seen by that program, made by the node itself where it is the one for what goes to the pod.
    pub fn by(direction: Direction, endpoint: u32) -> Self {
        Self {
            direction,
            endpoint,
            ingress: 0,
        }
    }
}

/// The two ends of a flow, as a packet has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// Network id.
    pub network: u32,
    /// Transport protocol number.
    pub protocol: u8,
    /// Source address and port (or a request's echo identifier, or 0).
    pub source: (IpAddr, u16),
    /// Destination address and port (or a reply's echo identifier, or 0).
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

/// The model: endpoints, enforced policies, and the state learnt from packets.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Who is there.
    pub world: World,
    /// The policies.
    pub policies: Policies,
    /// How long flows live.
    pub lifetimes: Lifetimes,
    /// Flows that an endpoint may have open, 0 for no limit.
    pub flows_per_endpoint: u32,
    /// Flows that each endpoint has opened since they were counted.
    pub opened: HashMap<u32, u32>,
    /// Flow table.
    pub flows: HashMap<Flow, Entry>,
    /// Ports of fragmented datagrams.
    pub fragments: HashMap<Datagram, (u16, u16)>,
    /// Counters.
    pub counts: Counts,
    /// What policy allowed by a rule, or denied.
    pub hits: BTreeMap<HitKey, u64>,
}

impl Model {
    /// The verdict for a frame, which it counts. `choose` returns which of several backends the program chose.
    pub fn judge(&mut self, seen: Seen, frame: &[u8], choose: &mut Choose<'_>) -> Outcome {
        let Seen {
            direction,
            endpoint,
            ingress,
        } = seen;
        let mut outcome = Outcome {
            verdict: Verdict::NoEndpoint,
            destination: None,
            refused: false,
            frame: frame.to_vec(),
        };
        let met = self.world.has_row(endpoint);
        outcome.verdict = if !met {
            Verdict::NoEndpoint
        } else if let Some(row) = self.world.ready(endpoint) {
            let judged = match direction {
                Direction::FromPod => self.judge_sent(&row, frame, &mut outcome, choose),
                Direction::ToPod => self.judge_received(&row, ingress, frame, &mut outcome),
                Direction::FromUplink | Direction::ToUplink => panic!("the programs of the uplink have no model"),
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

    /// Makes the endpoint ready under a new version. Drops from before it was are forgotten.
    pub fn publish(&mut self, endpoint: u32, config: Endpoint) {
        self.world.publish(endpoint, config);
        self.counts
            .retain(|(id, _, verdict), _| *id != endpoint || *verdict != Verdict::EndpointNotReady);
    }

    /// Removes the endpoint, its addresses, its counters and its share of the flow tables.
    pub fn withdraw(&mut self, endpoint: u32) {
        self.world.withdraw(endpoint);
        self.opened.remove(&endpoint);
        self.counts.retain(|(id, _, _), _| *id != endpoint);
    }

    /// Lets time pass, in ticks.
    pub fn age(&mut self, ticks: u64) {
        for entry in self.flows.values_mut() {
            entry.idle += ticks;
        }
        for last in self.world.services.last.values_mut() {
            last.idle += ticks;
        }
    }

    /// The ports of a packet in the flow table. A first fragment's are remembered for the later ones.
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
}
