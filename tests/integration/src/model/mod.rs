//! Models the dataplane's programs in a simple second implementation that the frame tests compare with them.
//!
//! It is written from the documentation of the programs, shares no code with them, and is slow: whole packets are
//! parsed into values, tables are maps of values, and nothing is packed. If it differs from a program, one of them is
//! wrong.
//!
//! Intentional differences: a program compares generations of rows, the model compares [`Version`]s, which are never
//! reused. A program reads the clock, the model counts ages, and the test advances its time. The tables of a program
//! may evict rows, those of the model do not, so a comparison must not fill them. A program chooses backends at random,
//! the model receives the chosen one.

mod answer;
mod flows;
mod from_pod;
mod justified;
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

pub use flows::{Class, End, Entry, Lifetimes, Opener, key_of};
use kni_common::counter::HitKey;
pub use kni_common::{Direction, Verdict};
pub use policy::{ANYBODY, Allowed, Asked, Policies, PortRow};
pub use service::{Backend, Candidate, Choice, Choose, Front, Last, Service, Services};
pub use world::{Endpoint, Enforced, NodePort, Route, Version, World};

/// The result for a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The decision.
    pub verdict: Verdict,
    /// The endpoint that it was redirected to.
    pub destination: Option<u32>,
    /// Whether the sender of a dropped packet got a refusal, which is the resulting frame.
    pub refused: bool,
    /// The resulting frame.
    pub frame: Vec<u8>,
}

/// The position at which a frame is processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The direction of the program.
    pub direction: Direction,
    /// The endpoint of the host interface.
    pub endpoint: u32,
    /// Index of the interface through which the node received it, 0 if the node sent it.
    pub ingress: u32,
}

impl Seen {
    /// A frame that the pod sends.
    pub fn from_pod(endpoint: u32) -> Self {
        Self {
            direction: Direction::FromPod,
            endpoint,
            ingress: 0,
        }
    }

    /// A frame from the node's stack to the pod, received through the interface with that index or sent by the node
    /// (0).
    pub fn to_pod(endpoint: u32, ingress: u32) -> Self {
        Self {
            direction: Direction::ToPod,
            endpoint,
            ingress,
        }
    }

    /// A frame in this direction; towards the pod, sent by the node itself.
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
    /// The flow in the reply direction.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ..self
        }
    }
}

/// The datagram of a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Datagram {
    /// Network id.
    pub network: u32,
    /// The direction of the program.
    pub direction: Direction,
    /// Protocol number of IPv4, 0 for IPv6.
    pub protocol: u8,
    /// Identification field.
    pub identification: u32,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
}

/// The first fragment of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct First {
    /// Its transport protocol.
    pub protocol: u8,
    /// Its ports.
    pub ports: (u16, u16),
    /// Ticks since it was let through.
    pub idle: u64,
}

/// How long a first fragment vouches for later ones, as a receiver that reassembles waits (RFC 791).
const FRAGMENT_SECONDS: u64 = 30;

/// Packets and bytes by endpoint (0 for none), direction and verdict.
pub type Counts = BTreeMap<(u32, Direction, Verdict), (u64, u64)>;

/// The model: endpoints, enforced policies, and the state learnt from packets.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Endpoints, addresses and routes.
    pub world: World,
    /// The policies.
    pub policies: Policies,
    /// Lifetimes of flows.
    pub lifetimes: Lifetimes,
    /// Maximum number of open flows per endpoint, 0 for no limit.
    pub flows_per_endpoint: u32,
    /// Flows that each endpoint has opened since the last count.
    pub opened: HashMap<(u32, Class), u32>,
    /// Flow table, by key ([`key_of`]).
    pub flows: HashMap<Flow, Entry>,
    /// Keys and flows of entries that [`Self::complete`] completes.
    pub unsure: Vec<(Flow, Flow)>,
    /// First fragments that were let through.
    pub fragments: HashMap<Datagram, First>,
    /// Ticks per second.
    pub hz: u32,
    /// Counters.
    pub counts: Counts,
    /// Hits of policy rules and default denials.
    pub hits: BTreeMap<HitKey, u64>,
}

impl Model {
    /// Processes and counts a frame. `choose` returns the backend that the program chose among several.
    pub fn evaluate(&mut self, seen: Seen, frame: &[u8], choose: &mut Choose<'_>) -> Outcome {
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
                Direction::FromPod => self.evaluate_sent(&row, frame, &mut outcome, choose),
                Direction::ToPod => self.evaluate_received(&row, ingress, frame, &mut outcome),
                Direction::FromUplink | Direction::ToUplink | Direction::FromOverlay | Direction::ToOverlay => {
                    panic!("the programs of the uplink and of the tunnel have no model")
                }
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

    /// Publishes the endpoint with a new version. Resets its drop counters.
    pub fn publish(&mut self, endpoint: u32, config: Endpoint) {
        self.world.publish(endpoint, config);
        self.counts
            .retain(|(id, _, verdict), _| *id != endpoint || *verdict != Verdict::EndpointNotReady);
    }

    /// Removes the endpoint, its addresses, its counters and its share of the flow tables.
    pub fn withdraw(&mut self, endpoint: u32) {
        self.world.withdraw(endpoint);
        self.opened.retain(|(id, _), _| *id != endpoint);
        self.counts.retain(|(id, _, _), _| *id != endpoint);
    }

    /// Advances the time by ticks.
    pub fn age(&mut self, ticks: u64) {
        for entry in self.flows.values_mut() {
            entry.idle += ticks;
        }
        for first in self.fragments.values_mut() {
            first.idle += ticks;
        }
        for last in self.world.services.last.values_mut() {
            last.idle += ticks;
        }
    }

    /// The protocol and ports of a packet for the flow table: a later fragment has those of its first.
    fn flow_of(
        &self,
        network: u32,
        direction: Direction,
        packet: &packet::Packet,
    ) -> Result<(u8, (u16, u16)), Verdict> {
        let own = (packet.protocol, packet.content.ports());
        let asks = packet::names_flows_by_ports(packet.protocol) || packet::is_extension(packet.protocol);
        match packet.fragment {
            packet::Fragment::Later(id) if asks => {
                let datagram = datagram(network, direction, packet, id);
                let known = self.fragments.get(&datagram).ok_or(Verdict::FragmentWithoutFirst)?;
                if known.idle > FRAGMENT_SECONDS * u64::from(self.hz) {
                    return Err(Verdict::FragmentWithoutFirst);
                }
                Ok((known.protocol, known.ports))
            }
            _ => Ok(own),
        }
    }

    /// Remembers a first fragment that was let through.
    fn vouch(&mut self, network: u32, direction: Direction, packet: &packet::Packet) {
        let packet::Fragment::First(id) = packet.fragment else {
            return;
        };
        if packet::names_flows_by_ports(packet.protocol) || packet.source.is_ipv6() {
            let first = First {
                protocol: packet.protocol,
                ports: packet.content.ports(),
                idle: 0,
            };
            self.fragments.insert(datagram(network, direction, packet, id), first);
        }
    }
}

fn datagram(network: u32, direction: Direction, packet: &packet::Packet, identification: u32) -> Datagram {
    Datagram {
        network,
        direction,
        // The first IPv6 fragment may have another header before the transport header.
        protocol: if packet.source.is_ipv4() { packet.protocol } else { 0 },
        identification,
        source: packet.source,
        destination: packet.destination,
    }
}
