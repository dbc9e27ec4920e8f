//! Models the backends of virtual addresses, and the choice of one for a flow.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use kni_common::counter::HitKey;

use super::{Counts, Flow, Verdict};

/// Address and port of a backend.
pub type Backend = (IpAddr, u16);

/// The key of a service port: network, address, protocol, port.
pub type Front = (u32, IpAddr, u8, u16);

/// A service port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Its number.
    pub id: u32,
    /// Its backends.
    pub backends: Vec<Backend>,
    /// Whether packets without a backend are dropped instead of refused, because backends exist elsewhere.
    pub local_only: bool,
    /// Ticks for which an idle client retains its backend, 0 for none.
    pub affinity: u32,
}

/// The last backend of a client, and its age in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Last {
    /// The backend.
    pub backend: Backend,
    /// Ticks since the last new flow.
    pub idle: u64,
}

/// All service ports, and the affinity of their clients.
#[derive(Debug, Clone, Default)]
pub struct Services {
    /// Service ports.
    pub fronts: BTreeMap<Front, Service>,
    /// Addresses outside of the cluster, which are Services' at their ports only.
    pub external: BTreeSet<(u32, IpAddr)>,
    /// Last backends by service, network and client.
    pub last: HashMap<(u32, u32, IpAddr), Last>,
}

impl Services {
    /// Whether any service has the address, with all ports.
    pub fn has_address(&self, network: u32, address: IpAddr) -> bool {
        if self.external.contains(&(network, address)) {
            return false;
        }
        let ports = (network, address, 0, 0)..=(network, address, u8::MAX, u16::MAX);
        self.fronts.range(ports).next().is_some()
    }
}

/// A candidate backend, and the result for the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The backend.
    pub backend: Backend,
    /// The result for the packet; a drop does not identify the backend.
    pub fate: Result<(), Verdict>,
    /// The policy hits.
    pub hits: Vec<HitKey>,
}

/// The random choice of a program.
#[derive(Debug)]
pub struct Choice<'a> {
    /// The sending endpoint.
    pub endpoint: u32,
    /// The service.
    pub service: &'a Service,
    /// The flow that would be opened.
    pub flow: Flow,
    /// The counters before.
    pub counts: &'a Counts,
    /// The policy hits before.
    pub hits: &'a BTreeMap<HitKey, u64>,
    /// The candidates, at least two.
    pub candidates: &'a [Candidate],
}

/// Returns the index of the candidate that the program chose.
pub type Choose<'a> = dyn FnMut(&Choice<'_>) -> usize + 'a;

impl Service {
    /// The drop reason without a candidate.
    pub(super) fn no_backend(&self) -> Verdict {
        if self.local_only {
            Verdict::NoLocalBackend
        } else {
            Verdict::NoBackend
        }
    }
}
