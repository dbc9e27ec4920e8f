//! Chooses the endpoints of a service port that this node uses, by readiness, locality and hints.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::service::BackendValue;
use kni_model::service::{NodePlace, SliceEndpoint, TrafficDistribution};

/// Why a frontend has no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoBackendReason {
    /// No `EndpointSlice` has an endpoint of this family for this port.
    #[error("there is no endpoint")]
    NoEndpoint,
    /// No endpoint of this family is a known pod of the Service's network or a host outside.
    #[error("no endpoint is a known pod of the network or a host outside")]
    NoMember,
    /// No endpoint is ready, and no terminating endpoint serves.
    #[error("no endpoint is ready")]
    NoneReady,
    /// Some endpoints are usable, but none on this node, and the Service requires local ones.
    #[error("no endpoint on this node is ready, and internalTrafficPolicy is Local")]
    NoneLocal,
}

/// The traffic that an endpoint can take, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// No traffic.
    Down,
    /// Existing flows only: it serves, and is neither ready nor terminating.
    Serving,
    /// New flows while no endpoint is ready: it serves and is terminating.
    Draining,
    /// New flows.
    Ready,
}

/// Whether the hints of one kind name this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hint {
    Missing,
    Elsewhere,
    Here,
}

/// An endpoint from the point of view of one node. The same address and port in several slices is one endpoint: while
/// it moves between slices, the better state counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    state: State,
    local: bool,
    node: Hint,
    zone: Hint,
}

/// The chosen backends of a service port.
#[derive(Debug, Clone, Default)]
pub(super) struct Choice {
    /// Backends for new flows; sorted, without duplicates.
    pub(super) backends: Vec<BackendValue>,
    /// Backends that still serve existing flows, whether chosen or not, on any node.
    pub(super) serving: BTreeSet<BackendValue>,
    /// Set when there are no backends.
    pub(super) empty: Option<NoBackendReason>,
}

impl Candidate {
    pub(super) fn new(endpoint: &SliceEndpoint, place: &NodePlace) -> Self {
        let state = match (endpoint.ready, endpoint.serving, endpoint.terminating) {
            (true, _, _) => State::Ready,
            (false, true, true) => State::Draining,
            (false, true, false) => State::Serving,
            (false, false, _) => State::Down,
        };
        Self {
            state,
            local: endpoint.node.as_ref() == Some(&place.name),
            node: Hint::new(&endpoint.for_nodes, Some(&place.name)),
            zone: Hint::new(&endpoint.for_zones, place.zone.as_ref()),
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.state = self.state.max(other.state);
        self.local |= other.local;
        self.node = self.node.max(other.node);
        self.zone = self.zone.max(other.zone);
    }
}

impl Hint {
    fn new(names: &BTreeSet<String>, here: Option<&String>) -> Self {
        if names.is_empty() {
            Self::Missing
        } else if here.is_some_and(|here| names.contains(here)) {
            Self::Here
        } else {
            Self::Elsewhere
        }
    }
}

/// Chooses among the endpoints of one service port and one family.
pub(super) fn choose(
    candidates: &BTreeMap<BackendValue, Candidate>,
    local_only: bool,
    distribution: TrafficDistribution,
) -> Choice {
    let in_state = |state: State| -> Vec<(BackendValue, Candidate)> {
        let all = candidates.iter().filter(|(_, c)| c.state == state);
        all.map(|(backend, candidate)| (*backend, *candidate)).collect()
    };
    let (mut ready, mut draining) = (in_state(State::Ready), in_state(State::Draining));
    let somewhere = !ready.is_empty() || !draining.is_empty();
    if local_only {
        ready.retain(|(_, c)| c.local);
        draining.retain(|(_, c)| c.local);
    } else {
        prefer(&mut ready, distribution);
    }
    let usable = if ready.is_empty() { draining } else { ready };
    let empty = match (usable.is_empty(), candidates.is_empty(), somewhere) {
        (false, _, _) => None,
        (true, true, _) => Some(NoBackendReason::NoEndpoint),
        (true, false, false) => Some(NoBackendReason::NoneReady),
        (true, false, true) => Some(NoBackendReason::NoneLocal),
    };
    Choice {
        backends: usable.into_iter().map(|(backend, _)| backend).collect(),
        serving: candidates
            .iter()
            .filter(|(_, c)| c.state > State::Down)
            .map(|(backend, _)| *backend)
            .collect(),
        empty,
    }
}

/// Retains the endpoints whose hints name this node, if the hints are complete and name it.
fn prefer(ready: &mut Vec<(BackendValue, Candidate)>, distribution: TrafficDistribution) {
    let node: fn(&Candidate) -> Hint = |c| c.node;
    let zone: fn(&Candidate) -> Hint = |c| c.zone;
    let kinds = match distribution {
        TrafficDistribution::Any => return,
        TrafficDistribution::SameZone => vec![zone],
        TrafficDistribution::SameNode => vec![node, zone],
    };
    for hint in kinds {
        let complete = ready.iter().all(|(_, c)| hint(c) != Hint::Missing);
        if complete && ready.iter().any(|(_, c)| hint(c) == Hint::Here) {
            ready.retain(|(_, c)| hint(c) == Hint::Here);
            return;
        }
    }
}
