//! Defines policy sets: the combination of all policies that select an interface.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use kni_model::policy::{ContainerPort, PolicyDirection, PolicyRef};

use super::{
    body::{Body, NamedPort, Rule, resolve_all},
    peer::Peer,
};

/// The directions with allow rules.
pub(super) const ALLOWING: [PolicyDirection; 2] = [PolicyDirection::Egress, PolicyDirection::Ingress];

/// Every direction, in the order of its number in the dataplane.
pub(super) const DIRECTIONS: [PolicyDirection; 3] = [
    PolicyDirection::Egress,
    PolicyDirection::Ingress,
    PolicyDirection::External,
];

/// The key of a policy set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SetContent {
    /// Sorted by name of the policy.
    bodies: Vec<Arc<Body>>,
    /// The container ports of the selected pod that names in ingress rules refer to, sorted.
    names: Vec<ContainerPort>,
}

impl SetContent {
    /// The set of policies, sorted by name, that select an interface of a pod with these ports.
    pub(super) fn new(bodies: Vec<Arc<Body>>, ports: &[ContainerPort]) -> Self {
        let rules = bodies
            .iter()
            .filter_map(|body| body.allows(PolicyDirection::Ingress))
            .flatten();
        let names = resolve_all(rules.flat_map(|rule| rule.ports.named()), ports);
        Self { bodies, names }
    }

    /// The same policies without their rules.
    pub(super) fn closed(&self) -> Self {
        Self {
            bodies: self.bodies.iter().map(Body::closed).collect(),
            names: Vec::new(),
        }
    }

    /// The namespace of the policies, which select pods of their own namespace only.
    pub(super) fn namespace(&self) -> &str {
        let first = self.bodies.first();
        first.map_or("", |body| body.content.reference.namespace.as_str())
    }

    /// Whether no policy has an effect.
    pub(super) fn is_empty(&self) -> bool {
        self.bodies.is_empty()
    }

    /// The policies.
    pub(super) fn bodies(&self) -> &[Arc<Body>] {
        &self.bodies
    }

    /// The policies that deny by default in a direction.
    pub(super) fn isolating(&self, direction: PolicyDirection) -> Vec<PolicyRef> {
        let isolating = self.bodies.iter().filter(|body| body.isolates(direction));
        isolating.map(|body| body.content.reference.clone()).collect()
    }
}

/// The position of a rule in a set: policy, then index.
pub(super) type Place = (usize, usize);

/// A policy set, indexed by peers.
#[derive(Debug)]
pub(super) struct PolicySet {
    pub(super) number: u32,
    pub(super) content: Arc<SetContent>,
    /// Rules that name the peer, in order, by [`ALLOWING`].
    by_peer: [HashMap<Arc<Peer>, Vec<Place>>; 2],
    /// Rules that match every peer, in order, by [`ALLOWING`].
    wildcard: [Vec<Place>; 2],
    /// Peers of rules about external destinations.
    external: HashSet<Arc<Peer>>,
    /// Every peer, sorted.
    pub(super) peers: Vec<Arc<Peer>>,
    /// Port names that are resolved with the ports of the peer.
    pub(super) names: BTreeSet<NamedPort>,
    /// Whether a rule allows such a port name to every peer.
    pub(super) wildcard_by_name: bool,
}

impl PolicySet {
    /// The set with this number and content.
    pub(super) fn new(number: u32, content: &Arc<SetContent>) -> Self {
        let mut set = Self {
            number,
            by_peer: [HashMap::new(), HashMap::new()],
            wildcard: [Vec::new(), Vec::new()],
            external: HashSet::new(),
            peers: Vec::new(),
            names: BTreeSet::new(),
            wildcard_by_name: false,
            content: Arc::clone(content),
        };
        for (policy, body) in content.bodies.iter().enumerate() {
            set.add(policy, body);
        }
        set.peers.sort_unstable();
        set.peers.dedup();
        set
    }

    fn add(&mut self, policy: usize, body: &Body) {
        let by_direction = self.by_peer.iter_mut().zip(&mut self.wildcard);
        for (direction, (by_peer, wildcard)) in ALLOWING.into_iter().zip(by_direction) {
            for (position, rule) in body.allows(direction).into_iter().flatten().enumerate() {
                if rule.peers.is_empty() {
                    wildcard.push((policy, position));
                }
                for peer in &rule.peers {
                    by_peer.entry(Arc::clone(peer)).or_default().push((policy, position));
                }
            }
        }
        for rule in body.content.egress.iter().flatten() {
            self.names.extend(rule.ports.named().iter().cloned());
            self.wildcard_by_name |= rule.peers.is_empty() && !rule.ports.named().is_empty();
        }
        for rule in body.content.external.iter().flat_map(|external| &external.rules) {
            self.external.extend(rule.peers.iter().cloned());
        }
        self.peers
            .extend(body.rules().flat_map(|rule| rule.peers.iter().cloned()));
    }

    /// Whether any policy isolates in a direction.
    pub(super) fn isolates(&self, direction: PolicyDirection) -> bool {
        self.content.bodies.iter().any(|body| body.isolates(direction))
    }

    /// Whether any rule about external destinations has one of these peers.
    pub(super) fn is_external(&self, peers: &[Arc<Peer>]) -> bool {
        peers.iter().any(|peer| self.external.contains(peer))
    }

    /// The rules that match every peer.
    pub(super) fn wildcard(&self, direction: PolicyDirection) -> impl Iterator<Item = &Rule> {
        let places = ALLOWING
            .iter()
            .position(|d| *d == direction)
            .and_then(|at| self.wildcard.get(at));
        places
            .into_iter()
            .flatten()
            .filter_map(move |place| self.rule(direction, *place))
    }

    /// Rules that name one of these peers, in order.
    pub(super) fn specific(&self, direction: PolicyDirection, peers: &[Arc<Peer>]) -> Vec<&Rule> {
        let by_peer = ALLOWING
            .iter()
            .position(|d| *d == direction)
            .and_then(|at| self.by_peer.get(at));
        let places = by_peer
            .into_iter()
            .flat_map(|by_peer| peers.iter().filter_map(|peer| by_peer.get(peer)));
        let mut places: Vec<Place> = places.flatten().copied().collect();
        places.sort_unstable();
        places.dedup();
        places
            .into_iter()
            .filter_map(|place| self.rule(direction, place))
            .collect()
    }

    fn rule(&self, direction: PolicyDirection, (policy, position): Place) -> Option<&Rule> {
        self.content.bodies.get(policy)?.allows(direction)?.get(position)
    }

    /// The peers that allow rules of a direction name.
    pub(super) fn named(&self, direction: PolicyDirection) -> impl Iterator<Item = &Arc<Peer>> {
        let of_direction = ALLOWING
            .iter()
            .zip(&self.by_peer)
            .filter(move |(d, _)| **d == direction);
        of_direction.flat_map(|(_, by_peer)| by_peer.keys())
    }

    /// The named ports of the selected pod that rules refer to.
    pub(super) fn own_names(&self) -> &[ContainerPort] {
        &self.content.names
    }
}
