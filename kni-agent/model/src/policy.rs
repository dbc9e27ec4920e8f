//! Defines validated policies and the pods that they apply to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{EndpointId, IfName, NetworkId, NetworkName, PodRef, SandboxId};

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Kind of the object that defines a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyKind {
    /// networking.k8s.io/v1.
    NetworkPolicy,
    /// k8s.cni.cncf.io/v1beta1 and v1beta2.
    MultiNetworkPolicy,
    /// kni.dev/v1alpha1.
    EgressPolicy,
}

impl PolicyKind {
    /// The kind as written in a manifest.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NetworkPolicy => "NetworkPolicy",
            Self::MultiNetworkPolicy => "MultiNetworkPolicy",
            Self::EgressPolicy => "EgressPolicy",
        }
    }
}

/// Names a policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyRef {
    /// Kind.
    pub kind: PolicyKind,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for PolicyRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.as_str(), self.namespace, self.name)
    }
}

/// Names one rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleRef {
    /// The policy.
    pub policy: PolicyRef,
    /// The direction of the rule.
    pub direction: PolicyDirection,
    /// Position in the policy's list of that direction, from 0.
    pub index: u32,
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}[{}]", self.policy, self.direction.as_str(), self.index)
    }
}

/// The direction of traffic that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyDirection {
    /// Traffic that selected pods send (`kni_common::policy::EGRESS`).
    Egress,
    /// Traffic that selected pods receive (`kni_common::policy::INGRESS`).
    Ingress,
    /// Traffic that selected pods send to destinations outside the pod networks (`kni_common::policy::EXTERNAL`).
    External,
}

impl PolicyDirection {
    /// The name for operators: the field of the policy.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::External => "rules",
        }
    }

    /// The number in the dataplane's keys.
    pub const fn code(self) -> u32 {
        match self {
            Self::Egress => kni_common::policy::EGRESS,
            Self::Ingress => kni_common::policy::INGRESS,
            Self::External => kni_common::policy::EXTERNAL,
        }
    }
}

/// A selector over labels: every requirement must hold. Without requirements it selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Selector {
    /// The requirements; all must hold.
    pub requirements: Vec<Requirement>,
}

impl Selector {
    /// Whether all requirements hold. An empty selector matches everything.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// One requirement of a selector (apimachinery `labels.Requirement`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Requirement {
    /// The label's key.
    pub key: String,
    /// The operator with its values.
    pub operator: Operator,
}

/// The condition of a requirement on a label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Operator {
    /// The label is present and has one of these values. An entry of `matchLabels` is this with one value.
    In(BTreeSet<String>),
    /// The label is missing or has none of these values.
    NotIn(BTreeSet<String>),
    /// The label is present.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

/// The interfaces that a policy applies to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyScope {
    /// The primary interface of each selected pod, whatever network it has joined (NetworkPolicy).
    Primary,
    /// Interfaces of selected pods on these networks (EgressPolicy).
    Networks(BTreeSet<NetworkName>),
    /// Interfaces of selected pods that these names stand for (MultiNetworkPolicy).
    Named(BTreeSet<NamedNetwork>),
    /// All interfaces of selected pods (EgressPolicy).
    All,
}

/// A name by which pods join a network: its own, or that of a definition of another tool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedNetwork {
    /// Namespace of the definition. Networks have none.
    pub namespace: String,
    /// The name.
    pub name: NetworkName,
}

impl NamedNetwork {
    /// Whether the name stands for an interface: it is on the network of this name, or the pod named the network by the
    /// definition of this name.
    pub fn stands_for(&self, interface: &PolicyInterface) -> bool {
        let Self { namespace, name } = self;
        let by = interface.definition.as_deref().and_then(|by| by.split_once('/'));
        interface.network == *name || by == Some((namespace.as_str(), name.as_str()))
    }
}

/// A policy. NetworkPolicy and MultiNetworkPolicy fill `ingress` and `egress`, EgressPolicy fills `external`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Its name.
    pub reference: PolicyRef,
    /// The interfaces of the selected pods.
    pub scope: PolicyScope,
    /// Selects pods of its namespace.
    pub pods: Selector,
    /// Rules for traffic that selected pods receive; `None`: the policy does not isolate them in this direction; an
    /// empty list: it isolates them and allows nothing.
    pub ingress: Option<Vec<PolicyRule>>,
    /// Rules for traffic that selected pods send, likewise.
    pub egress: Option<Vec<PolicyRule>>,
    /// The rules of an EgressPolicy.
    pub external: Option<ExternalRules>,
}

/// An allow rule: any of the peers, on any of the ports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyRule {
    /// Empty: every peer.
    pub peers: Vec<PolicyPeer>,
    /// Empty: every port of every protocol.
    pub ports: Vec<PolicyPort>,
}

/// Peers of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyPeer {
    /// Pods.
    Pods {
        /// Selects their namespaces; `None`: the namespace of the policy.
        namespaces: Option<Selector>,
        /// Selects pods in these namespaces.
        pods: Selector,
    },
    /// Addresses, independent of their owners.
    Block {
        /// The range, host bits zero.
        cidr: IpNet,
        /// Excluded ranges inside it.
        except: Vec<IpNet>,
    },
}

/// Ports of a rule. The protocol is an IANA number: 6, 17 or 132.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyPort {
    /// Transport.
    pub protocol: u8,
    /// Ports of it.
    pub port: PortMatch,
}

/// Which ports of a protocol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortMatch {
    /// All.
    Any,
    /// From the first to the last, both included; first is not larger than last.
    Range(u16, u16),
    /// The container port with this name, of the receiving pod.
    Named(String),
}

/// The rules of an EgressPolicy about external destinations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalRules {
    /// The rules in order; the first one that matches decides.
    pub rules: Vec<ExternalRule>,
    /// The decision when no rule matches.
    pub otherwise_allow: bool,
    /// Source addresses for egress, at most one per family; without one, that of the network.
    pub egress_addresses: Vec<IpAddr>,
}

/// One rule of an EgressPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalRule {
    /// Allow or deny.
    pub allow: bool,
    /// [`PolicyPeer::Block`] only; empty: every destination.
    pub to: Vec<PolicyPeer>,
    /// Empty: every port of every protocol.
    pub ports: Vec<PolicyPort>,
}

/// A named port of a pod's container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerPort {
    /// Its name.
    pub name: String,
    /// IANA number of the transport.
    pub protocol: u8,
    /// The port.
    pub port: u16,
}

/// A pod with the properties that policies use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyPod {
    /// Its sandbox, which is the key, because the next sandbox of a pod may overlap with the previous one.
    pub sandbox: SandboxId,
    /// Its name.
    pub pod: PodRef,
    /// Its labels.
    pub labels: Labels,
    /// Named ports of its containers.
    pub ports: Vec<ContainerPort>,
    /// Its interfaces.
    pub interfaces: Vec<PolicyInterface>,
}

/// An interface of a pod with the properties that policies use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyInterface {
    /// Number of the endpoint; `None` for a pod on another node.
    pub endpoint: Option<EndpointId>,
    /// Name inside the pod.
    pub ifname: IfName,
    /// Network.
    pub network: NetworkName,
    /// The definition of another tool by which the pod named the network, as `namespace/name`. Not known of a pod on
    /// another node.
    pub definition: Option<String>,
    /// Number of the network.
    pub network_id: NetworkId,
    /// Whether it is the pod's first interface.
    pub primary: bool,
    /// Its IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}
