//! The backends of virtual addresses, and the choice of one for a flow.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use kni_common::counter::HitKey;

use super::{Counts, Flow, Verdict};

/// Address and port of a backend.
pub type Backend = (IpAddr, u16);

/// What names a service port: network, address, protocol, port.
pub type Front = (u32, IpAddr, u8, u16);

/// A service port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Its number.
    pub id: u32,
    /// Who serves.
    pub backends: Vec<Backend>,
    /// Whether packets without a backend are dropped instead of refused, because backends exist elsewhere.
    pub local_only: bool,
    /// Ticks for which an idle client retains its backend, 0 for none.
    pub affinity: u32,
}

/// A backend that a client had, and how many ticks ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Last {
    /// The backend.
    pub backend: Backend,
    /// Ticks since the last new flow.
    pub idle: u64,
}

/// All service ports, and what is remembered of their clients.
#[derive(Debug, Clone, Default)]
pub struct Services {
    /// Service ports.
    pub fronts: BTreeMap<Front, Service>,
    /// Last backends by service, network and client.
    pub last: HashMap<(u32, u32, IpAddr), Last>,
}

impl Services {
    /// Whether any service has the address.
    pub fn has_address(&self, network: u32, address: IpAddr) -> bool {
        let ports = (network, address, 0, 0)..=(network, address, u8::MAX, u16::MAX);
        self.fronts.range(ports).next().is_some()
    }
}

/// A backend that may be chosen, and what would become of the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The backend.
    pub backend: Backend,
    /// What would become of the packet; a drop does not show whom it was for.
    pub fate: Result<(), Verdict>,
    /// What policy would count.
    pub hits: Vec<HitKey>,
}

/// The random choice that a program makes.
#[derive(Debug)]
pub struct Choice<'a> {
    /// The endpoint that asks.
    pub endpoint: u32,
    /// The service.
    pub service: &'a Service,
    /// The flow that would be opened.
    pub flow: Flow,
    /// What was counted before.
    pub counts: &'a Counts,
    /// What policy counted before.
    pub hits: &'a BTreeMap<HitKey, u64>,
    /// Who may be chosen, two at least.
    pub candidates: &'a [Candidate],
}

/// Returns the candidate that the program chose.
pub type Choose<'a> = dyn FnMut(&Choice<'_>) -> usize + 'a;

impl Service {
    /// Why there is no candidate.
    pub(super) fn no_backend(&self) -> Verdict {
        if self.local_only {
            Verdict::NoLocalBackend
        } else {
            Verdict::NoBackend
        }
    }
}
