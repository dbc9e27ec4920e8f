//! Evaluates network policies directly from the API objects: slow, simple, and without code of the agent.
//!
//! [`World::allowed`] reads the policies again for every question, as the documentation of the API describes it: a pod
//! is isolated in a direction if any policy of that direction selects it, and then only traffic that some rule allows
//! passes.

mod block;
mod port;
mod rules;
mod selector;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use k8s_openapi::api::networking::v1::NetworkPolicy;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// The label that every namespace has automatically; its value is the name.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// A protocol, with or without ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
    /// Neither: rules with ports never match it.
    Icmp,
}

impl Protocol {
    /// The three transports that policies can contain.
    pub const TRANSPORTS: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The name in an object.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
            Self::Icmp => "ICMP",
        }
    }
}

/// A named port of a pod's containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    /// Its name.
    pub name: String,
    /// Its transport.
    pub protocol: Protocol,
    /// Its number.
    pub port: u16,
}

/// One interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The network it has joined.
    pub network: String,
    /// Whether it is the pod's primary one.
    pub primary: bool,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// A pod that is not on the node's own network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
    /// Its named ports.
    pub ports: Vec<NamedPort>,
    /// Its interfaces, at most one per network.
    pub interfaces: Vec<Interface>,
}

impl Pod {
    /// Namespace and name as `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Its interface on a network.
    pub fn on(&self, network: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.network == network)
    }
}

/// A policy with its scope.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// `None`: primary interfaces (`NetworkPolicy`). Otherwise interfaces on these networks (`MultiNetworkPolicy`).
    pub networks: Option<BTreeSet<String>>,
    /// Its spec; both kinds have the same schema.
    pub object: NetworkPolicy,
}

/// All inputs of the decision.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// Namespaces and their labels. An unlisted namespace has only the label [`NAMESPACE_NAME`].
    pub namespaces: BTreeMap<String, Labels>,
    /// All pods.
    pub pods: Vec<Pod>,
    /// All policies.
    pub policies: Vec<Policy>,
}

/// One end of a connection, as in the packet after the translation of services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer<'a> {
    /// A pod, with its interface on this network and the address.
    Pod(&'a Pod, &'a Interface, IpAddr),
    /// A peer that is not a pod.
    Outside(IpAddr),
    /// The pod's own node.
    Node(IpAddr),
}

impl Peer<'_> {
    fn address(self) -> IpAddr {
        match self {
            Self::Pod(_, _, address) | Self::Outside(address) | Self::Node(address) => address,
        }
    }
}

/// A direction of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Traffic to the selected pod.
    Ingress,
    /// Traffic from the selected pod.
    Egress,
}

impl World {
    /// The labels of a namespace, which are stored here and not in an object.
    pub fn namespace_labels(&self, namespace: &str) -> Labels {
        let mut labels = self.namespaces.get(namespace).cloned().unwrap_or_default();
        labels.insert(NAMESPACE_NAME.into(), namespace.into());
        labels
    }

    /// The peer with an address in a network: the pod, or an external peer.
    pub fn peer(&self, network: &str, address: IpAddr) -> Peer<'_> {
        let found = self.pods.iter().find_map(|pod| {
            let interface = pod.on(network)?;
            interface.addresses.contains(&address).then_some((pod, interface))
        });
        match found {
            Some((pod, interface)) => Peer::Pod(pod, interface, address),
            None => Peer::Outside(address),
        }
    }

    /// Whether the first packet of a connection may pass: the source may send it and the destination may receive it.
    /// `port` is the port of the destination after any translation, ignored for ICMP.
    pub fn allowed(&self, from: Peer<'_>, to: Peer<'_>, protocol: Protocol, port: u16) -> bool {
        if let (Peer::Pod(one, ..), Peer::Pod(other, ..)) = (from, to)
            && one == other
        {
            return true;
        }
        self.may(Direction::Egress, from, to, protocol, port) && self.may(Direction::Ingress, to, from, protocol, port)
    }

    /// Whether policies let `selected` send to, or receive from, `other`.
    pub fn may(
        &self,
        direction: Direction,
        selected: Peer<'_>,
        other: Peer<'_>,
        protocol: Protocol,
        port: u16,
    ) -> bool {
        let Peer::Pod(pod, interface, _) = selected else {
            // Policies apply to pods only.
            return true;
        };
        if direction == Direction::Ingress && matches!(other, Peer::Node(_)) {
            return true;
        }
        let mut isolated = false;
        for policy in self.isolating(direction, pod, interface) {
            isolated = true;
            if rules::allows(self, policy, direction, pod, other, (protocol, port)) {
                return true;
            }
        }
        !isolated
    }

    /// The policies that isolate an interface in a direction.
    pub fn isolating(&self, direction: Direction, pod: &Pod, interface: &Interface) -> Vec<&Policy> {
        let isolates = |policy: &&Policy| {
            let about = match &policy.networks {
                None => interface.primary,
                Some(networks) => networks.contains(&interface.network),
            };
            about && rules::selects(&policy.object, pod) && rules::has_direction(&policy.object, direction)
        };
        self.policies.iter().filter(isolates).collect()
    }
}
