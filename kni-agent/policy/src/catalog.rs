//! Indexes the policies by the pods that they select.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use kni_model::policy::{Labels, Policy, PolicyInterface, PolicyPod, PolicyRef, PolicyScope};

use super::{
    body::Body,
    peer::{NamedPeers, Peers},
    selector::{LabelIndex, matches},
};

/// All policies.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    /// Sorted by name.
    policies: Vec<Listed>,
    index: HashMap<String, LabelIndex<usize>>,
    pub(super) peers: Peers,
}

/// A policy with its rules.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) policy: Arc<Policy>,
    /// `None`: the policy has no effect.
    pub(super) body: Option<Arc<Body>>,
}

/// The changes of a replacement.
#[derive(Debug, Default)]
pub(super) struct Replaced {
    /// Policies that were added, removed or changed, in the old and in the new version.
    policies: Vec<Arc<Policy>>,
    pub(super) peers: NamedPeers,
}

impl Replaced {
    pub(super) fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    /// Whether the change affects the policies of a pod.
    pub(super) fn is_about(&self, pod: &PolicyPod) -> bool {
        self.policies.iter().any(|policy| selects(policy, pod))
    }
}

impl Catalog {
    /// Replaces all policies. Of two policies with the same name the later one is used.
    pub(super) fn replace(&mut self, mut policies: Vec<Arc<Policy>>) -> Replaced {
        policies.reverse();
        policies.sort_by(|a, b| a.reference.cmp(&b.reference));
        policies.dedup_by(|later, kept| later.reference == kept.reference);
        let mut before = std::mem::take(&mut self.policies).into_iter().peekable();
        let mut replaced = Replaced::default();
        for policy in policies {
            while let Some(gone) = before.next_if(|known| known.policy.reference < policy.reference) {
                replaced.policies.push(gone.policy);
            }
            let known = before.next_if(|known| known.policy.reference == policy.reference);
            let listed = match known {
                Some(known) if Arc::ptr_eq(&known.policy, &policy) || known.policy == policy => known,
                known => {
                    replaced.policies.extend(known.map(|known| known.policy));
                    replaced.policies.push(Arc::clone(&policy));
                    Listed {
                        body: Body::of(&policy, &mut self.peers).map(Arc::new),
                        policy,
                    }
                }
            };
            self.policies.push(listed);
        }
        replaced.policies.extend(before.map(|gone| gone.policy));
        if !replaced.is_empty() {
            self.index();
            let bodies = self.policies.iter().filter_map(|listed| listed.body.as_deref());
            let named = bodies.flat_map(Body::rules).flat_map(|rule| &rule.peers);
            // Blocks, of which a policy may name thousands, match no labels.
            let named = named.filter(|peer| !peer.is_block());
            replaced.peers = self.peers.set_named(named);
        }
        replaced
    }

    fn index(&mut self) {
        self.index.clear();
        for (position, listed) in self.policies.iter().enumerate() {
            let namespace = &listed.policy.reference.namespace;
            if !self.index.contains_key(namespace) {
                self.index.insert(namespace.clone(), LabelIndex::default());
            }
            if let Some(of_namespace) = self.index.get_mut(namespace) {
                of_namespace.insert(&listed.policy.pods, position);
            }
        }
    }

    /// The policies that select the pod, by name, regardless of the interfaces that they apply to.
    pub(super) fn selecting(&self, namespace: &str, labels: &Labels) -> Vec<&Listed> {
        let candidates = self
            .index
            .get(namespace)
            .into_iter()
            .flat_map(|index| index.candidates(labels));
        let mut positions: Vec<usize> = candidates.collect();
        positions.sort_unstable();
        let listed = positions.into_iter().filter_map(|position| self.policies.get(position));
        listed.filter(|listed| matches(&listed.policy.pods, labels)).collect()
    }

    /// A policy by name.
    pub(super) fn get(&self, reference: &PolicyRef) -> Option<&Listed> {
        let found = self
            .policies
            .binary_search_by(|listed| listed.policy.reference.cmp(reference));
        self.policies.get(found.ok()?)
    }

    /// Every policy, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Policy> {
        self.policies.iter().map(|listed| &*listed.policy)
    }
}

impl Listed {
    /// Whether the policy applies to this interface of a pod that it selects.
    pub(super) fn is_about(&self, interface: &PolicyInterface) -> bool {
        match &self.policy.scope {
            PolicyScope::Primary => interface.primary,
            PolicyScope::Networks(networks) => networks.contains(&interface.network),
            PolicyScope::Named(names) => names.iter().any(|name| name.stands_for(interface)),
            PolicyScope::All => true,
        }
    }

    /// Whether the policy selects the pod.
    pub(super) fn selects(&self, pod: &PolicyPod) -> bool {
        selects(&self.policy, pod)
    }
}

fn selects(policy: &Policy, pod: &PolicyPod) -> bool {
    policy.reference.namespace == pod.pod.namespace && matches(&policy.pods, &pod.labels)
}

/// The source addresses that egress policies request: per family the first one, by policy name.
pub(super) fn egress_addresses<'a>(policies: impl IntoIterator<Item = &'a Listed>) -> Vec<(IpAddr, PolicyRef)> {
    let mut found: Vec<(IpAddr, PolicyRef)> = Vec::new();
    for listed in policies {
        let external = listed.policy.external.as_ref();
        for address in external.into_iter().flat_map(|rules| &rules.egress_addresses) {
            if found.iter().all(|(other, _)| other.is_ipv4() != address.is_ipv4()) {
                found.push((*address, listed.policy.reference.clone()));
            }
        }
    }
    found.sort_unstable();
    found
}
