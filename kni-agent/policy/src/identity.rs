//! Computes identities: groups of peers of a network that all of its policies treat alike.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use kni_model::policy::ContainerPort;

use super::{
    blocks::Blocks,
    body::{NamedPort, resolve_all},
    peer::Peer,
    prefix::Prefix,
    set::PolicySet,
    stable::Interner,
};

/// The key of an identity. It includes the network: a set that is newly used in another network must not find an
/// identity that was computed without the peers of that set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) network: u32,
    /// The matching peers, sorted.
    pub(super) peers: Vec<Arc<Peer>>,
    /// The container ports that names in egress rules refer to, sorted.
    pub(super) names: Vec<ContainerPort>,
}

/// The peers and port names that the active policy sets of a network refer to.
#[derive(Debug)]
pub(super) struct PeerIndex {
    network: u32,
    pub(super) sets: BTreeMap<u32, Arc<PolicySet>>,
    /// Sets by the peers that they refer to.
    by_peer: HashMap<Arc<Peer>, Vec<u32>>,
    blocks: Blocks,
    names: BTreeSet<NamedPort>,
}

/// An address of a pod.
pub(super) struct PodAddress<'a> {
    pub(super) address: IpAddr,
    /// All peers that the labels of the pod match.
    pub(super) peers: &'a [Arc<Peer>],
    pub(super) ports: &'a [ContainerPort],
}

impl PeerIndex {
    /// No policy set is active.
    pub(super) fn new(network: u32) -> Self {
        Self {
            network,
            sets: BTreeMap::new(),
            by_peer: HashMap::new(),
            blocks: Blocks::default(),
            names: BTreeSet::new(),
        }
    }

    /// Replaces the active sets. Returns the sets that became inactive and those that became active.
    pub(super) fn set_sets(&mut self, sets: BTreeMap<u32, Arc<PolicySet>>) -> (BTreeSet<u32>, BTreeSet<u32>) {
        let before = std::mem::replace(&mut self.sets, sets);
        let gone = before.iter().filter(|(number, _)| !self.sets.contains_key(number));
        let come = self.sets.iter().filter(|(number, _)| !before.contains_key(number));
        for (number, set) in come.clone() {
            for peer in &set.peers {
                let users = self.by_peer.entry(Arc::clone(peer)).or_default();
                if users.is_empty() {
                    self.blocks.add(peer);
                }
                users.push(*number);
            }
        }
        for (number, set) in gone.clone() {
            for peer in &set.peers {
                let Some(users) = self.by_peer.get_mut(peer) else {
                    continue;
                };
                users.retain(|known| known != number);
                if users.is_empty() {
                    self.by_peer.remove(peer);
                    self.blocks.remove(peer);
                }
            }
        }
        let changed = (
            gone.map(|(number, _)| *number).collect(),
            come.map(|(number, _)| *number).collect(),
        );
        self.names = self.sets.values().flat_map(|set| set.names.iter().cloned()).collect();
        changed
    }

    /// The identity of a pod's address.
    pub(super) fn of_pod(&self, pod: &PodAddress<'_>) -> Identity {
        let relevant = pod
            .peers
            .iter()
            .filter(|peer| self.by_peer.contains_key(*peer))
            .cloned();
        let blocks = self.blocks.of_address(pod.address).iter().cloned();
        let mut peers: Vec<Arc<Peer>> = relevant.chain(blocks).collect();
        peers.sort_unstable();
        Identity {
            network: self.network,
            peers,
            names: resolve_all(&self.names, pod.ports),
        }
    }

    /// The peers that these sets refer to.
    pub(super) fn peers_of(&self, sets: &BTreeSet<u32>) -> HashSet<&Arc<Peer>> {
        let sets = sets.iter().filter_map(|number| self.sets.get(number));
        sets.flat_map(|set| &set.peers).collect()
    }

    /// The active sets that refer to a peer.
    pub(super) fn users(&self, peer: &Arc<Peer>) -> Option<&[u32]> {
        self.by_peer.get(peer).map(Vec::as_slice)
    }

    /// The sets that may have rows for an identity of their own, by number.
    pub(super) fn sets_of<'a>(&'a self, identity: &Identity) -> Vec<&'a Arc<PolicySet>> {
        let by_peer = identity
            .peers
            .iter()
            .filter_map(|peer| self.by_peer.get(peer))
            .flatten();
        let mut numbers: Vec<u32> = by_peer.copied().collect();
        if !identity.names.is_empty() {
            numbers.extend(
                self.sets
                    .values()
                    .filter(|set| set.wildcard_by_name)
                    .map(|set| set.number),
            );
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers.iter().filter_map(|number| self.sets.get(number)).collect()
    }

    /// The identity of an address that these pods of other nodes have.
    pub(super) fn of_remote<'a>(&self, pods: impl Iterator<Item = PodAddress<'a>>) -> Identity {
        let mut identities = pods.map(|pod| self.of_pod(&pod));
        let first = identities.next();
        let mut identity = first.unwrap_or_else(|| Identity::unmatched(self.network));
        identities.for_each(|other| identity.join(other));
        identity
    }

    /// The ranges that policies name, outer ones first, each with its identity. Without those that are one of the
    /// addresses `hosts`.
    pub(super) fn regions(
        &mut self,
        hosts: &BTreeMap<Prefix, u32>,
        identities: &mut Interner<Identity>,
    ) -> Vec<(Prefix, u32)> {
        let network = self.network;
        let hidden = |prefix: &Prefix| hosts.contains_key(prefix);
        self.blocks.identities(hidden, |blocks| {
            let identity = Identity {
                peers: blocks.to_vec(),
                ..Identity::unmatched(network)
            };
            number(identities, identity)
        })
    }

    /// Whether a policy names the prefix as a range.
    pub(super) fn is_range(&self, prefix: &Prefix) -> bool {
        self.blocks.has(prefix)
    }

    /// The identity of the range around an address as of the last [`Self::regions`]; 0 without one.
    pub(super) fn around(&self, host: &Prefix) -> u32 {
        self.blocks.identity_around(host)
    }
}

/// The prefixes of a network whose identity differs from that of the surrounding prefix, outer prefixes first. Every
/// address that does not belong to a local endpoint has the identity of its longest prefix, or identity 0 without one.
pub(super) fn rows(regions: &[(Prefix, u32)], hosts: &BTreeMap<Prefix, u32>) -> Vec<(Prefix, u32)> {
    let mut all = regions.to_vec();
    if !hosts.is_empty() {
        all.extend(hosts.iter().map(|(prefix, identity)| (*prefix, *identity)));
        all.sort_unstable();
    }
    without_repetition(all)
}

/// Removes prefixes that have the identity of the surrounding prefix.
fn without_repetition(regions: Vec<(Prefix, u32)>) -> Vec<(Prefix, u32)> {
    let mut around: Vec<(Prefix, u32)> = Vec::new();
    let mut rows = Vec::with_capacity(regions.len());
    for (prefix, number) in regions {
        while around.last().is_some_and(|(outer, _)| !outer.contains(&prefix)) {
            around.pop();
        }
        if around.last().map_or(0, |(_, outer)| *outer) != number {
            rows.push((prefix, number));
        }
        around.push((prefix, number));
    }
    rows
}

impl Identity {
    fn unmatched(network: u32) -> Self {
        Self {
            network,
            peers: Vec::new(),
            names: Vec::new(),
        }
    }

    /// Two pods temporarily share an address while one replaces the other: the identity matches the peers of both.
    fn join(&mut self, other: Self) {
        self.peers.extend(other.peers);
        self.peers.sort_unstable();
        self.peers.dedup();
        self.names.extend(other.names);
        self.names.sort_unstable();
        self.names.dedup();
    }
}

/// The number of an identity; 0 when no policy refers to it.
pub(super) fn number(identities: &mut Interner<Identity>, identity: Identity) -> u32 {
    if identity.peers.is_empty() && identity.names.is_empty() {
        return 0;
    }
    identities.intern(identity)
}
