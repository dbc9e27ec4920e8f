//! Evaluates policies: whether a peer may send to another one, and which rule counts the packet.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_common::{
    counter::HitKey,
    policy::{EGRESS, EXTERNAL, INGRESS},
};

use super::{
    Flow, Model, Verdict,
    world::{Owner, Row},
};

/// Ordinal of a default deny in the hits.
const DEFAULT_DENY: u16 = u16::MAX;

/// A question to a policy set about a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Asked {
    /// May the endpoint send to it?
    Egress,
    /// May the endpoint receive from it?
    Ingress,
    /// May the endpoint's packets leave the pod networks to it?
    External,
}

impl Asked {
    /// The code in the tables.
    pub fn code(self) -> u32 {
        match self {
            Self::Egress => EGRESS,
            Self::Ingress => INGRESS,
            Self::External => EXTERNAL,
        }
    }

    fn denial(self) -> Verdict {
        match self {
            Self::Egress => Verdict::PolicyEgress,
            Self::Ingress => Verdict::PolicyIngress,
            Self::External => Verdict::PolicyExternal,
        }
    }
}

/// The result of a row of a policy set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// Nothing.
    Nothing,
    /// Every protocol and port.
    Everything,
    /// The decision of this port set.
    Ports(u32),
}

/// A row of a port set. The longest match decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRow {
    /// Protocol; `None` for all.
    pub protocol: Option<u8>,
    /// Port and its number of significant leading bits, 0 for every port. Only with a protocol.
    pub port: (u16, u32),
    /// Ordinal of the entry in the set.
    pub ordinal: u16,
    /// Whether it allows the packet.
    pub allow: bool,
}

impl PortRow {
    fn matches(&self, protocol: u8, port: u16) -> Option<u32> {
        let (prefix, bits) = self.port;
        match self.protocol {
            None => Some(0),
            Some(named) if named != protocol => None,
            Some(_) if bits == 0 || (prefix ^ port) >> (16 - bits) == 0 => Some(1 + bits),
            Some(_) => None,
        }
    }
}

/// Identity of rows that apply to every peer.
pub const ANYBODY: u32 = 0;

/// All policies. Sets and port sets never change while they are in use; new ones replace them.
#[derive(Debug, Clone, Default)]
pub struct Policies {
    /// (policy set, identity of the peer, question) to the result and the rule.
    pub rows: BTreeMap<(u32, u32, Asked), (Allowed, u32)>,
    /// Port sets.
    pub ports: BTreeMap<u32, Vec<PortRow>>,
    /// Identities of addresses without a local endpoint, by network and prefix.
    pub identities: HashMap<(u32, IpNet), u32>,
}

/// The policy hits of a packet.
pub(super) type Hits = Vec<HitKey>;

impl Policies {
    /// Identity of an address without a local endpoint.
    pub(super) fn external_identity(&self, network: u32, address: IpAddr) -> u32 {
        let rows = self.identities.iter();
        let matching = rows.filter(|((of, prefix), _)| *of == network && prefix.contains(&address));
        let longest = matching.max_by_key(|((_, prefix), _)| prefix.prefix_len());
        longest.map_or(ANYBODY, |(_, identity)| *identity)
    }

    /// Whether the set allows it. Counts every denial, and packets allowed by a rule.
    fn ask(&self, set: u32, peer: u32, asked: Asked, service: (u8, u16), hits: &mut Hits) -> Result<(), Verdict> {
        let own = self.rows.get(&(set, peer, asked));
        let row = own.or_else(|| self.rows.get(&(set, ANYBODY, asked)));
        let (allow, rule, ordinal) = match row {
            None | Some((Allowed::Nothing, _)) => (false, 0, 0),
            Some((Allowed::Everything, rule)) => (true, *rule, 0),
            Some((Allowed::Ports(ports), rule)) => {
                let rows = self.ports.get(ports).into_iter().flatten();
                let matching = rows.filter_map(|row| Some((row.matches(service.0, service.1)?, row)));
                match matching.max_by_key(|(length, _)| *length) {
                    Some((_, row)) => (row.allow, *rule, row.ordinal),
                    None => (false, 0, 0),
                }
            }
        };
        if !allow || rule != 0 {
            let ordinal = if rule == 0 { DEFAULT_DENY } else { ordinal };
            let direction = u16::try_from(asked.code()).expect("a small number");
            hits.push(HitKey {
                set,
                rule,
                ordinal,
                direction,
            });
        }
        if allow { Ok(()) } else { Err(asked.denial()) }
    }
}

/// Protocol and destination port of the opener; ICMP identifiers are not ports.
fn service(flow: Flow) -> (u8, u16) {
    const WITH_PORTS: [u8; 3] = [6, 17, 132];
    let port = if WITH_PORTS.contains(&flow.protocol) {
        flow.destination.1
    } else {
        0
    };
    (flow.protocol, port)
}

impl Model {
    /// Whether one local endpoint may open `flow` (as the receiver sees it) to another.
    pub(super) fn between(&self, sender: &Row, receiver: &Row, flow: Flow, hits: &mut Hits) -> Result<(), Verdict> {
        let (set, peer) = (sender.enforced.policy, receiver.enforced.identity(flow.source.0));
        if set != 0 {
            self.policies.ask(set, peer, Asked::Egress, service(flow), hits)?;
        }
        self.entering(receiver, sender.enforced.identity(flow.source.0), flow, hits)
    }

    /// Whether the endpoint may open `flow` to an address without a local endpoint.
    pub(super) fn leaving(&self, sender: &Row, flow: Flow, hits: &mut Hits) -> Result<(), Verdict> {
        let set = sender.enforced.policy;
        if set == 0 {
            return Ok(());
        }
        let peer = self.policies.external_identity(flow.network, flow.destination.0);
        self.policies.ask(set, peer, Asked::Egress, service(flow), hits)?;
        self.policies.ask(set, peer, Asked::External, service(flow), hits)
    }

    /// Whether a peer of this identity may open `flow` to the endpoint.
    pub(super) fn entering(&self, receiver: &Row, peer: u32, flow: Flow, hits: &mut Hits) -> Result<(), Verdict> {
        match receiver.enforced.policy {
            0 => Ok(()),
            set => self.policies.ask(set, peer, Asked::Ingress, service(flow), hits),
        }
    }

    /// Identity of an address.
    pub(super) fn identity_at(&self, network: u32, address: IpAddr) -> u32 {
        let owner: Option<Owner> = self.world.owner(network, address);
        match owner.and_then(|owner| self.world.still(network, owner)) {
            Some(row) => row.enforced.identity(address),
            None => self.policies.external_identity(network, address),
        }
    }

    pub(super) fn hit(&mut self, hits: Hits) {
        for key in hits {
            *self.hits.entry(key).or_default() += 1;
        }
    }
}
