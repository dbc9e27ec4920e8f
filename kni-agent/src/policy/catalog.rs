//! The policies by whom they select.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use super::{
    body::Body,
    peer::Peers,
    selector::{LabelIndex, matches},
};
use crate::model::policy::{Labels, Policy, PolicyInterface, PolicyPod, PolicyRef, PolicyScope};

/// All policies.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    /// By name.
    policies: Vec<Listed>,
    index: HashMap<String, LabelIndex<usize>>,
    pub(super) peers: Peers,
}

/// A policy, and what it says.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) policy: Policy,
    /// `None`: nothing.
    pub(super) body: Option<Arc<Body>>,
}

impl Catalog {
    /// Replaces all policies. `false`: they are what they were. Of two with one name the later counts.
    pub(super) fn replace(&mut self, policies: Vec<Policy>) -> bool {
        let wanted: BTreeMap<PolicyRef, Policy> = policies.into_iter().map(|p| (p.reference.clone(), p)).collect();
        if wanted.values().eq(self.policies.iter().map(|listed| &listed.policy)) {
            return false;
        }
        let mut before: HashMap<PolicyRef, Listed> = std::mem::take(&mut self.policies)
            .into_iter()
            .map(|listed| (listed.policy.reference.clone(), listed))
            .collect();
        self.index.clear();
        for (reference, policy) in wanted {
            let known = before.remove(&reference).filter(|listed| listed.policy == policy);
            let listed = known.unwrap_or_else(|| Listed {
                body: Body::of(&policy, &mut self.peers).map(Arc::new),
                policy,
            });
            let of_namespace = self.index.entry(reference.namespace).or_default();
            of_namespace.insert(&listed.policy.pods, self.policies.len());
            self.policies.push(listed);
        }
        drop(before);
        let bodies = self.policies.iter().filter_map(|listed| listed.body.as_deref());
        self.peers
            .settle(bodies.flat_map(Body::rules).flat_map(|rule| &rule.peers));
        true
    }

    /// The policies that select the pod, by name, whichever of its interfaces they are about.
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
        self.policies.iter().map(|listed| &listed.policy)
    }
}

impl Listed {
    /// Whether the policy is about this interface of a pod that it selects.
    pub(super) fn is_about(&self, interface: &PolicyInterface) -> bool {
        match &self.policy.scope {
            PolicyScope::Primary => interface.primary,
            PolicyScope::Networks(networks) => networks.contains(&interface.network),
            PolicyScope::All => true,
        }
    }

    /// Whether the policy selects the pod.
    pub(super) fn selects(&self, pod: &PolicyPod) -> bool {
        self.policy.reference.namespace == pod.pod.namespace && matches(&self.policy.pods, &pod.labels)
    }
}

/// The source addresses that egress policies ask for: per family the first one, by name of the policy.
pub(super) fn egress_addresses<'a>(policies: impl IntoIterator<Item = &'a Listed>) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    for address in policies
        .into_iter()
        .filter_map(|listed| listed.policy.beyond.as_ref())
        .flat_map(|b| &b.egress_addresses)
    {
        if found.iter().all(|known| known.is_ipv4() != address.is_ipv4()) {
            found.push(*address);
        }
    }
    found.sort_unstable();
    found
}
