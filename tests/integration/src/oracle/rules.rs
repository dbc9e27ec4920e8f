//! Evaluates one policy: the selected pods, the isolated directions, and the allowed traffic.

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};

use super::{Direction, NamedPort, Peer, Pod, Policy, Protocol, World, block, port, selector};

/// Whether the policy selects the pod.
pub(super) fn selects(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let Some(spec) = &policy.spec else { return false };
    let named = spec.pod_selector.as_ref();
    namespace(policy) == pod.namespace && named.is_none_or(|pods| selector::matches(pods, &pod.labels))
}

/// Whether the policy isolates in a direction: by its types; without types ingress always, and egress if there are
/// egress rules.
pub(super) fn has_direction(policy: &NetworkPolicy, direction: Direction) -> bool {
    let Some(spec) = &policy.spec else { return false };
    let types = spec.policy_types.iter().flatten();
    let types: Vec<&str> = types.map(String::as_str).collect();
    match direction {
        Direction::Ingress if types.is_empty() => true,
        Direction::Egress if types.is_empty() => spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()),
        Direction::Ingress => types.contains(&"Ingress"),
        Direction::Egress => types.contains(&"Egress"),
    }
}

/// Whether some rule allows traffic in the direction between `pod`, which the policy selects, and `other`.
pub(super) fn allows(
    world: &World,
    policy: &Policy,
    direction: Direction,
    pod: &Pod,
    other: Peer<'_>,
    (protocol, number): (Protocol, u16),
) -> bool {
    let Some(spec) = &policy.object.spec else { return false };
    let own = namespace(&policy.object);
    let matches = |peers: Option<&Vec<NetworkPolicyPeer>>, ports: Option<&Vec<NetworkPolicyPort>>| {
        peers_match(world, own, peers, other) && ports_match(ports, receiver(direction, pod, other), protocol, number)
    };
    match direction {
        Direction::Ingress => {
            let mut rules = spec.ingress.iter().flatten();
            rules.any(|rule| matches(rule.from.as_ref(), rule.ports.as_ref()))
        }
        Direction::Egress => {
            let mut rules = spec.egress.iter().flatten();
            rules.any(|rule| matches(rule.to.as_ref(), rule.ports.as_ref()))
        }
    }
}

/// The named ports of the receiver: the selected pod, or the peer that it sends to.
fn receiver<'a>(direction: Direction, selected: &'a Pod, other: Peer<'a>) -> &'a [NamedPort] {
    match (direction, other) {
        (Direction::Ingress, _) => &selected.ports,
        (Direction::Egress, Peer::Pod(pod, ..)) => &pod.ports,
        (Direction::Egress, Peer::Outside(_) | Peer::Node(_)) => &[],
    }
}

/// An absent or empty list matches every peer.
fn peers_match(world: &World, own: &str, peers: Option<&Vec<NetworkPolicyPeer>>, other: Peer<'_>) -> bool {
    let mut peers = peers.into_iter().flatten().peekable();
    peers.peek().is_none() || peers.any(|peer| peer_matches(world, own, peer, other))
}

fn peer_matches(world: &World, own: &str, peer: &NetworkPolicyPeer, other: Peer<'_>) -> bool {
    if let Some(range) = &peer.ip_block {
        return block::contains(range, other.address());
    }
    let Peer::Pod(pod, ..) = other else { return false };
    let in_namespace = match &peer.namespace_selector {
        Some(namespaces) => selector::matches(namespaces, &world.namespace_labels(&pod.namespace)),
        None => pod.namespace == own,
    };
    let pods = peer.pod_selector.as_ref();
    assert!(
        pods.is_some() || peer.namespace_selector.is_some(),
        "a peer that says nothing is not valid"
    );
    in_namespace && pods.is_none_or(|pods| selector::matches(pods, &pod.labels))
}

/// An absent or empty list matches every port of every protocol.
fn ports_match(ports: Option<&Vec<NetworkPolicyPort>>, named: &[NamedPort], protocol: Protocol, number: u16) -> bool {
    let mut ports = ports.into_iter().flatten().peekable();
    ports.peek().is_none() || ports.any(|entry| port::matches(entry, named, protocol, number))
}

fn namespace(policy: &NetworkPolicy) -> &str {
    policy.metadata.namespace.as_deref().unwrap_or("default")
}
