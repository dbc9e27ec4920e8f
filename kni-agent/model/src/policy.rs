//! Policies, and the pods they are about, once they have been validated.

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

/// Kind of the object that a policy comes from.
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
    /// What it is about.
    pub direction: PolicyDirection,
    /// Position in the policy's list of that direction, from 0.
    pub index: u32,
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}[{}]", self.policy, self.direction.as_str(), self.index)
    }
}

/// What a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyDirection {
    /// What selected pods send (`kni_common::policy::EGRESS`).
    Egress,
    /// What selected pods receive (`kni_common::policy::INGRESS`).
    Ingress,
    /// What selected pods send beyond the pod networks (`kni_common::policy::EXTERNAL`).
    Beyond,
}

impl PolicyDirection {
    /// The word that operators see: the field of the policy.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::Beyond => "rules",
        }
    }

    /// The number in the dataplane's keys.
    pub const fn code(self) -> u32 {
        match self {
            Self::Egress => kni_common::policy::EGRESS,
            Self::Ingress => kni_common::policy::INGRESS,
            Self::Beyond => kni_common::policy::EXTERNAL,
        }
    }
}

/// A selector over labels: every requirement must hold. Without requirements it selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector {
    /// What must hold.
    pub requirements: Vec<Requirement>,
}

/// One requirement of a selector (apimachinery `labels.Requirement`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// The label's key.
    pub key: String,
    /// What is required of it.
    pub operator: Operator,
}

/// What a requirement asks of a label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// The label is there and has one of these values. `matchLabels` are this with one value.
    In(BTreeSet<String>),
    /// The label is missing or has none of these values.
    NotIn(BTreeSet<String>),
    /// The label is there.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

/// Interfaces that a policy is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyScope {
    /// The primary interface of each selected pod, whatever network it has joined (NetworkPolicy).
    Primary,
    /// Interfaces of selected pods on these networks (MultiNetworkPolicy, EgressPolicy).
    Networks(BTreeSet<NetworkName>),
    /// All interfaces of selected pods (EgressPolicy).
    All,
}

/// A policy. NetworkPolicy and MultiNetworkPolicy fill `ingress` and `egress`, EgressPolicy fills `beyond`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Its name.
    pub reference: PolicyRef,
    /// Which interfaces of the selected pods.
    pub scope: PolicyScope,
    /// Which pods of its namespace.
    pub pods: Selector,
    /// Rules for what selected pods receive; `None`: the policy does not isolate them in this direction, an empty list:
    /// it does and allows nothing.
    pub ingress: Option<Vec<PolicyRule>>,
    /// Rules for what selected pods send, likewise.
    pub egress: Option<Vec<PolicyRule>>,
    /// The rules of an EgressPolicy.
    pub beyond: Option<BeyondRules>,
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
        /// Their namespaces; `None`: the policy's own.
        namespaces: Option<Selector>,
        /// Which pods of these.
        pods: Selector,
    },
    /// Addresses, independent of their owners.
    Block {
        /// The range, host bits zero.
        cidr: IpNet,
        /// Ranges inside it that do not belong to it.
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
    /// The container port of this name, of the pod that receives.
    Named(String),
}

/// The rules of an EgressPolicy about destinations that are no pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeyondRules {
    /// The first rule that matches decides.
    pub rules: Vec<BeyondRule>,
    /// What is decided when none does.
    pub otherwise_allow: bool,
    /// Source address to leave the node with, per family; the network's choice where empty.
    pub egress_addresses: Vec<IpAddr>,
}

/// One rule of an EgressPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeyondRule {
    /// Allow or deny.
    pub allow: bool,
    /// [`PolicyPeer::Block`] only; empty: everything.
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

/// A pod as policy sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyPod {
    /// Its sandbox: the key, as a pod's next sandbox may overlap with its last.
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

/// An interface of a pod as policy sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyInterface {
    /// Number of the endpoint; `None` for a pod on another node.
    pub endpoint: Option<EndpointId>,
    /// Name inside the pod.
    pub ifname: IfName,
    /// Network.
    pub network: NetworkName,
    /// Its number.
    pub network_id: NetworkId,
    /// Whether it is the pod's first interface.
    pub primary: bool,
    /// Its IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}
