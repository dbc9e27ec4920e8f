//! Which endpoints of a service port this node uses: readiness, locality, hints.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::service::BackendValue;
use kni_model::service::{NodePlace, SliceEndpoint, TrafficDistribution};

/// Why a frontend has no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WhyEmpty {
    /// No `EndpointSlice` has an endpoint of this family for this port.
    #[error("there is no endpoint")]
    NoEndpoint,
    /// No endpoint is ready, none that terminates serves.
    #[error("no endpoint is ready")]
    NoneReady,
    /// Some are usable, none on this node, and the Service wants local ones.
    #[error("no endpoint on this node is ready, and internalTrafficPolicy is Local")]
    NoneLocal,
}

/// What an endpoint can be used for, from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// Nothing.
    Down,
    /// What already flows: it serves, and is neither ready nor on its way out.
    Serving,
    /// New flows while no endpoint is ready: it serves and is on its way out.
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

/// An endpoint as one node sees it. The same address and port in several slices is one endpoint: while it moves from one
/// slice to the other, the better of both counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    state: State,
    local: bool,
    node: Hint,
    zone: Hint,
}

/// What was chosen.
#[derive(Debug, Clone, Default)]
pub(super) struct Choice {
    /// Takes new flows; sorted, each once.
    pub(super) backends: Vec<BackendValue>,
    /// Still serves what flows to it, whether chosen or not, on any node.
    pub(super) serving: BTreeSet<BackendValue>,
    /// Set when there are no backends.
    pub(super) empty: Option<WhyEmpty>,
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
        (true, true, _) => Some(WhyEmpty::NoEndpoint),
        (true, false, false) => Some(WhyEmpty::NoneReady),
        (true, false, true) => Some(WhyEmpty::NoneLocal),
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

/// Leaves the endpoints that are meant for this node, if their hints are complete and name it.
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
