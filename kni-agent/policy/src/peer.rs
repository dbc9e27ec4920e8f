//! Deduplicates the peers of rules and finds the pods that match them.

use std::{
    collections::{HashMap, HashSet},
    hash::{Hash, Hasher},
    sync::Arc,
};

use ipnet::IpNet;
use kni_model::policy::{Labels, PolicyPeer, Selector};

use super::{
    selector::{LabelIndex, matches},
    stable,
};

/// The matching criteria of a peer, independent of the rule that names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Matcher {
    /// Pods of one namespace.
    PodsOf(String, Selector),
    /// Pods of selected namespaces.
    Pods(Selector, Selector),
    /// Addresses.
    Block(IpNet, Vec<IpNet>),
}

/// A distinct peer. Equal content is the same peer while a reference to it exists.
#[derive(Debug)]
pub(super) struct Peer {
    number: u64,
    hash: u64,
    pub(super) what: Matcher,
}

impl Peer {
    /// A sort key that is the same in every run.
    pub(super) fn order(&self) -> (u64, u64) {
        (self.hash, self.number)
    }

    /// Whether it is a range of addresses.
    pub(super) fn is_block(&self) -> bool {
        matches!(self.what, Matcher::Block(..))
    }

    /// The length of its prefix, in bits of an IPv6 address; 0 if it is no range.
    pub(super) fn range_length(&self) -> u8 {
        match &self.what {
            Matcher::Block(cidr, _) => cidr.prefix_len() + if cidr.addr().is_ipv4() { 96 } else { 0 },
            Matcher::PodsOf(..) | Matcher::Pods(..) => 0,
        }
    }

    /// Whether a pod with these labels, in this namespace, matches.
    fn is_about(&self, namespace: &str, namespace_labels: &Labels, labels: &Labels) -> bool {
        match &self.what {
            Matcher::PodsOf(own, pods) => own == namespace && matches(pods, labels),
            Matcher::Pods(namespaces, pods) => matches(pods, labels) && matches(namespaces, namespace_labels),
            Matcher::Block(..) => false,
        }
    }
}

impl PartialEq for Peer {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Peer {}

impl PartialOrd for Peer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Peer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl Hash for Peer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

/// Every peer that a policy names.
#[derive(Debug, Default)]
pub(super) struct Peers {
    known: HashMap<Matcher, Arc<Peer>>,
    last: u64,
    index: PodIndex,
}

/// Pod peers that rules have started to name, and those that no rule names any more.
#[derive(Debug, Default)]
pub(super) struct NamedPeers {
    come: Vec<Arc<Peer>>,
    gone: Vec<Arc<Peer>>,
}

/// Finds the peers that may match a pod.
#[derive(Debug, Default)]
struct PodIndex {
    /// By the index of the peer in `peers`.
    own: HashMap<String, LabelIndex<usize>>,
    by_pod: LabelIndex<usize>,
    by_namespace: LabelIndex<usize>,
    peers: Vec<Arc<Peer>>,
}

impl Peers {
    /// The peer of a rule of a policy in `namespace`.
    pub(super) fn intern(&mut self, peer: &PolicyPeer, namespace: &str) -> Arc<Peer> {
        let what = match peer {
            PolicyPeer::Pods { namespaces: None, pods } => Matcher::PodsOf(namespace.to_owned(), pods.clone()),
            PolicyPeer::Pods {
                namespaces: Some(namespaces),
                pods,
            } => Matcher::Pods(namespaces.clone(), pods.clone()),
            PolicyPeer::Block { cidr, except } => Matcher::Block(cidr.trunc(), except.clone()),
        };
        if let Some(known) = self.known.get(&what) {
            return Arc::clone(known);
        }
        self.last += 1;
        let peer = Arc::new(Peer {
            number: self.last,
            hash: stable::hash(&what),
            what: what.clone(),
        });
        self.known.insert(what, Arc::clone(&peer));
        peer
    }

    /// Removes the peers without references and returns the changes of the named peers.
    pub(super) fn set_named<'a>(&mut self, named: impl IntoIterator<Item = &'a Arc<Peer>>) -> NamedPeers {
        let before = std::mem::take(&mut self.index).peers;
        let mut known: HashSet<&Arc<Peer>> = before.iter().collect();
        let mut indexed = HashSet::new();
        let mut come = Vec::new();
        for peer in named {
            if indexed.insert(peer) && self.index.insert(peer) && !known.remove(peer) {
                come.push(Arc::clone(peer));
            }
        }
        let gone: Vec<Arc<Peer>> = known.into_iter().map(Arc::clone).collect();
        drop(before);
        self.known
            .retain(|_, peer| Arc::strong_count(peer) > 1 + usize::from(gone.contains(peer)));
        NamedPeers { come, gone }
    }

    /// The peers that match a pod with these labels, sorted.
    pub(super) fn of_pod(&self, namespace: &str, namespace_labels: &Labels, labels: &Labels) -> Vec<Arc<Peer>> {
        let index = &self.index;
        let own = index
            .own
            .get(namespace)
            .into_iter()
            .flat_map(|own| own.candidates(labels));
        let others = index
            .by_pod
            .candidates(labels)
            .chain(index.by_namespace.candidates(namespace_labels));
        let candidates = own.chain(others).filter_map(|position| index.peers.get(position));
        let about = candidates.filter(|peer| peer.is_about(namespace, namespace_labels, labels));
        let mut found: Vec<Arc<Peer>> = about.cloned().collect();
        found.sort_unstable();
        found
    }
}

impl NamedPeers {
    /// Updates an earlier result of [`Peers::of_pod`].
    pub(super) fn update(
        &self,
        peers: &mut Vec<Arc<Peer>>,
        namespace: &str,
        namespace_labels: &Labels,
        labels: &Labels,
    ) {
        if !self.gone.is_empty() {
            peers.retain(|peer| !self.gone.contains(peer));
        }
        let come = self.come.iter();
        let about = come.filter(|peer| peer.is_about(namespace, namespace_labels, labels));
        let known = peers.len();
        peers.extend(about.cloned());
        if peers.len() > known {
            peers.sort_unstable();
        }
    }

    /// Whether the named peers are unchanged.
    pub(super) fn is_empty(&self) -> bool {
        self.come.is_empty() && self.gone.is_empty()
    }
}

impl PodIndex {
    /// `false`: the peer matches no pod.
    fn insert(&mut self, peer: &Arc<Peer>) -> bool {
        let position = self.peers.len();
        match &peer.what {
            Matcher::PodsOf(namespace, pods) => {
                self.own.entry(namespace.clone()).or_default().insert(pods, position);
            }
            Matcher::Pods(namespaces, pods) if pods.requirements.is_empty() => {
                self.by_namespace.insert(namespaces, position);
            }
            Matcher::Pods(_, pods) => self.by_pod.insert(pods, position),
            Matcher::Block(..) => return false,
        }
        self.peers.push(Arc::clone(peer));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::world::{labels, select};

    #[test]
    fn a_selector_without_namespaces_is_about_the_own_one() {
        let mut peers = Peers::default();
        let pods = |namespaces: Option<&str>, pods: &str| PolicyPeer::Pods {
            namespaces: namespaces.map(select),
            pods: select(pods),
        };
        let own = peers.intern(&pods(None, "pod=a"), "x");
        let all = peers.intern(&pods(Some(""), ""), "x");
        let other = peers.intern(&pods(Some("ns=y"), "pod=a"), "x");
        assert_eq!(
            peers.intern(&pods(Some("ns=y"), "pod=a"), "z"),
            other,
            "the same from everywhere"
        );
        peers.set_named([&own, &all, &other]);
        let find = |namespace: &str, pod: &str| {
            peers.of_pod(
                namespace,
                &labels(&format!("ns={namespace}")),
                &labels(&format!("pod={pod}")),
            )
        };
        let sorted = |mut list: Vec<&Arc<Peer>>| {
            list.sort();
            list.into_iter().cloned().collect::<Vec<_>>()
        };
        assert_eq!(find("x", "a"), sorted(vec![&own, &all]));
        assert_eq!(find("y", "a"), sorted(vec![&other, &all]));
        assert_eq!(find("y", "b"), sorted(vec![&all]));
    }

    #[test]
    fn what_nobody_names_is_forgotten() {
        let mut peers = Peers::default();
        let block = PolicyPeer::Block {
            cidr: "10.0.0.0/8".parse().unwrap(),
            except: vec![],
        };
        let held = peers.intern(&block, "x");
        peers.set_named([&held]);
        assert_eq!(peers.known.len(), 1);
        drop(held);
        peers.set_named([]);
        assert!(peers.known.is_empty());
    }
}
