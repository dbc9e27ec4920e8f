//! Evaluates policies directly for each question, independent of the compiler.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use kni_model::policy::{
    ContainerPort, ExternalRule, Labels, Operator, Policy, PolicyDirection, PolicyInterface, PolicyPeer, PolicyPod,
    PolicyPort, PolicyScope, PortMatch, Selector,
};

/// The inputs of the engine.
#[derive(Debug, Clone, Default)]
pub(super) struct World {
    pub(super) namespaces: BTreeMap<String, Labels>,
    pub(super) pods: Vec<PolicyPod>,
    pub(super) policies: Vec<Policy>,
}

/// The remote end of a flow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Other<'a> {
    pub(super) address: IpAddr,
    pub(super) pod: Option<&'a PolicyPod>,
}

impl World {
    /// Whether the policies that select an interface allow traffic with the remote end.
    pub(super) fn allows(
        &self,
        direction: PolicyDirection,
        pod: &PolicyPod,
        interface: &PolicyInterface,
        other: Other<'_>,
        what: (u8, u16),
    ) -> bool {
        let about: Vec<&Policy> = self
            .policies
            .iter()
            .filter(|policy| selects(policy, pod, interface))
            .collect();
        if direction == PolicyDirection::External {
            return about.iter().all(|policy| self.lets_leave(policy, other, what));
        }
        let of = |policy: &Policy| match direction {
            PolicyDirection::Ingress => policy.ingress.clone(),
            PolicyDirection::Egress => policy.egress.clone(),
            PolicyDirection::External => None,
        };
        let isolating: Vec<_> = about.iter().filter_map(|policy| Some((policy, of(policy)?))).collect();
        if isolating.is_empty() {
            return true;
        }
        let receiver = match direction {
            PolicyDirection::Ingress => &pod.ports[..],
            PolicyDirection::Egress | PolicyDirection::External => other.pod.map_or(&[][..], |pod| &pod.ports[..]),
        };
        isolating.iter().any(|(policy, rules)| {
            rules
                .iter()
                .any(|rule| self.any_peer(policy, &rule.peers, other) && any_port(&rule.ports, receiver, what))
        })
    }

    fn lets_leave(&self, policy: &Policy, other: Other<'_>, what: (u8, u16)) -> bool {
        let Some(external) = &policy.external else { return true };
        let matching =
            |rule: &&ExternalRule| self.any_peer(policy, &rule.to, other) && any_port(&rule.ports, &[], what);
        external
            .rules
            .iter()
            .find(matching)
            .map_or(external.otherwise_allow, |rule| rule.allow)
    }

    fn any_peer(&self, policy: &Policy, peers: &[PolicyPeer], other: Other<'_>) -> bool {
        peers.is_empty() || peers.iter().any(|peer| self.is_peer(policy, peer, other))
    }

    fn is_peer(&self, policy: &Policy, peer: &PolicyPeer, other: Other<'_>) -> bool {
        match (peer, other.pod) {
            (PolicyPeer::Block { cidr, except }, _) => {
                inside(cidr, other.address) && !except.iter().any(|range| inside(range, other.address))
            }
            (PolicyPeer::Pods { .. }, None) => false,
            (PolicyPeer::Pods { namespaces, pods }, Some(pod)) => {
                let namespace = &pod.pod.namespace;
                let mut labels = self.namespaces.get(namespace).cloned().unwrap_or_default();
                labels.insert("kubernetes.io/metadata.name".into(), namespace.clone());
                let there = match namespaces {
                    None => *namespace == policy.reference.namespace,
                    Some(namespaces) => holds(namespaces, &labels),
                };
                there && holds(pods, &pod.labels)
            }
        }
    }
}

fn selects(policy: &Policy, pod: &PolicyPod, interface: &PolicyInterface) -> bool {
    let there = match &policy.scope {
        PolicyScope::Primary => interface.primary,
        PolicyScope::Networks(networks) => networks.contains(&interface.network),
        PolicyScope::Named(names) => names.iter().any(|named| {
            let definition = format!("{}/{}", named.namespace, named.name);
            named.name == interface.network || interface.definition == Some(definition)
        }),
        PolicyScope::All => true,
    };
    there && policy.reference.namespace == pod.pod.namespace && holds(&policy.pods, &pod.labels)
}

fn holds(selector: &Selector, labels: &Labels) -> bool {
    for requirement in &selector.requirements {
        let value = labels.get(&requirement.key);
        let holds = match (&requirement.operator, value) {
            (Operator::In(values), Some(value)) => values.contains(value),
            (Operator::In(_) | Operator::Exists, None) | (Operator::DoesNotExist, Some(_)) => false,
            (Operator::NotIn(values), Some(value)) => !values.contains(value),
            (Operator::NotIn(_) | Operator::DoesNotExist, None) | (Operator::Exists, Some(_)) => true,
        };
        if !holds {
            return false;
        }
    }
    true
}

/// Compares bit by bit.
fn inside(range: &IpNet, address: IpAddr) -> bool {
    let differing = match (range.addr(), address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
    };
    differing >= u32::from(range.prefix_len())
}

fn any_port(ports: &[PolicyPort], receiver: &[ContainerPort], (protocol, number): (u8, u16)) -> bool {
    ports.is_empty()
        || ports.iter().any(|entry| {
            entry.protocol == protocol
                && match &entry.port {
                    PortMatch::Any => true,
                    PortMatch::Range(first, last) => (*first..=*last).contains(&number),
                    PortMatch::Named(name) => receiver
                        .iter()
                        .any(|port| port.name == *name && port.protocol == protocol && port.port == number),
                }
        })
}
