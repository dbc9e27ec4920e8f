//! Defines the views of flows, enforced policy and services: plain values without any wire type.

use std::net::IpAddr;

use kni_common::{Direction, Verdict};

use super::{
    IfName, NetworkName, PodRef,
    policy::{PolicyDirection, PolicyRef, RuleRef},
};

/// A new flow, a drop, or the simulated result of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowView {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The verdict; a forwarding one reports a new flow.
    pub verdict: Verdict,
    /// The direction of the program that decided.
    pub direction: Direction,
    /// Network, empty if the packet has no endpoint.
    pub network: String,
    /// The source, as in the packet.
    pub source: PeerView,
    /// The destination, before any translation.
    pub destination: PeerView,
    /// Source after the translation; `None` if it was not translated.
    pub translated_source: Option<(IpAddr, u16)>,
    /// Destination after the translation; `None` if it was not translated.
    pub translated_destination: Option<(IpAddr, u16)>,
    /// The service that the packet was sent to, `namespace/name:port`.
    pub service: Option<String>,
    /// Transport protocol number.
    pub protocol: u8,
    /// Bytes from the Ethernet header on.
    pub length: u32,
    /// EtherType in host byte order.
    pub ethertype: u16,
    /// Pod of the interface that the program is attached to, empty for none.
    pub pod: PodRef,
    /// Name of that interface in the pod, empty where unknown.
    pub ifname: String,
    /// The decision of the sender's policies on sending; `None` when they were not consulted.
    pub egress: Option<TrailView>,
    /// The decision of the receiver's policies on receiving; `None` when they were not consulted.
    pub ingress: Option<TrailView>,
    /// The decision of the sender's egress policies about the external destination; `None` when they were not
    /// consulted.
    pub external: Option<TrailView>,
    /// One line for operators: the result, and the policy or rule that decided.
    pub explanation: String,
}

impl FlowView {
    /// Whether the packet was dropped.
    pub fn is_drop(&self) -> bool {
        self.verdict.is_drop()
    }
}

/// One end of a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerView {
    /// Address; `None` if it was not parsed.
    pub ip: Option<IpAddr>,
    /// Port, 0 for none.
    pub port: u16,
    /// The pod that has the address in the flow's network: of this node, or a confirmed one of another node.
    pub pod: Option<PodRef>,
    /// The node of a pod of another node; without a pod the node, this one or another, whose own address it is.
    pub node: Option<String>,
}

/// The decision of the policies of one end about a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrailView {
    /// Whether they allow it.
    pub allowed: bool,
    /// The rule that decided; `None` for a default deny, and where no policy isolates.
    pub rule: Option<RuleRef>,
    /// The policies that isolate the pod in this direction.
    pub isolating: Vec<PolicyRef>,
}

/// The requested flows; empty fields select all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// Namespace of a pod at either end.
    pub pod_namespace: String,
    /// Name of that pod.
    pub pod_name: String,
    /// Network.
    pub network: String,
    /// Drops only.
    pub drops_only: bool,
}

impl FlowFilter {
    /// Whether the filter selects the flow. A pod is involved as source, as destination, or as the owner of the
    /// interface.
    pub fn selects(&self, flow: &FlowView) -> bool {
        let peers = [flow.source.pod.as_ref(), flow.destination.pod.as_ref(), Some(&flow.pod)];
        (!self.drops_only || flow.is_drop())
            && (self.network.is_empty() || self.network == flow.network)
            && peers.into_iter().flatten().any(|pod| self.selects_pod(pod))
    }

    fn selects_pod(&self, pod: &PodRef) -> bool {
        (self.pod_namespace.is_empty() || self.pod_namespace == pod.namespace)
            && (self.pod_name.is_empty() || self.pod_name == pod.name)
    }
}

/// The packet to explain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExplainQuestion {
    /// `namespace/pod`, `namespace/pod@interface`, or an address.
    pub source: String,
    /// In the same forms.
    pub destination: String,
    /// Transport protocol number; 1 and 58 both mean an echo request of the destination's family.
    pub protocol: u8,
    /// Destination port, 0 for a protocol without ports.
    pub port: u16,
    /// Network; `None`: that of the named interface, else of the pod's first one.
    pub network: Option<String>,
    /// Bytes of the IP packet; `None`: as few as possible.
    pub length: Option<u16>,
    /// The tunnel that the packet comes through; both ends are addresses then. `None`: the packet begins on this node,
    /// or comes the way on which its source is.
    pub arrival: Option<Arrival>,
}

/// The tunnel of a packet that another node sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Address of the sending node in the underlay.
    pub sender: IpAddr,
    /// Number of the virtual network.
    pub number: u32,
}

/// The answer to an [`ExplainQuestion`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainView {
    /// The packet and the decision about it.
    pub flow: FlowView,
    /// The steps of the decision, in order, one line each.
    pub steps: Vec<String>,
    /// Name of this node, empty where it has none.
    pub node: String,
    /// Where the packet goes next, if another node decides the rest.
    pub onward: Option<Onward>,
}

/// A packet that leaves for another node, as that node gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Onward {
    /// Name of the other node, if it is known.
    pub node: Option<String>,
    /// Its address in the underlay.
    pub underlay: IpAddr,
    /// The address that this node sends with; `None` without a tunnel.
    pub sender: Option<IpAddr>,
    /// Number of the virtual network; `None` without a tunnel.
    pub number: Option<u32>,
    /// UDP port of the tunnel, 0 without one.
    pub tunnel_port: u16,
    /// Largest IP packet of this way, in bytes.
    pub mtu: u32,
    /// Source address after the translation.
    pub source: IpAddr,
    /// Destination address after the translation.
    pub destination: IpAddr,
    /// Destination port after the translation, 0 for none.
    pub port: u16,
}

/// Whether other nodes answer through the tunnel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TunnelProbe {
    /// The nodes that were asked, by name.
    pub nodes: Vec<ProbedNode>,
    /// Number of nodes that were not asked: there are too many.
    pub others: usize,
    /// UDP port of the tunnel.
    pub port: u16,
    /// Why no node was asked; empty if some were, or there are none.
    pub obstacle: String,
}

/// A node that was asked for echo replies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbedNode {
    /// Its name.
    pub node: String,
    /// Its address in the underlay.
    pub underlay: IpAddr,
    /// It answered a request by the underlay.
    pub answers: bool,
    /// It answered a request through the tunnel.
    pub answers_through_tunnel: bool,
}

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// A field of the question is invalid.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// The violated rule and a valid value.
        reason: String,
    },
    /// The question refers to a pod or interface that is not attached.
    #[error("{what} is not attached on this node")]
    NotFound {
        /// The name in the question.
        what: String,
    },
    /// The dataplane could not be queried.
    #[error("{0}")]
    Failed(String),
}

/// A rule enforced at an interface, or its default deny.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveRuleView {
    /// The direction of the rule.
    pub direction: PolicyDirection,
    /// The rule; `None` for the default deny.
    pub rule: Option<RuleRef>,
    /// The policies that isolate the interface in this direction.
    pub isolating: Vec<PolicyRef>,
    /// Its peers as text for operators.
    pub peers: String,
    /// Its ports as text for operators.
    pub ports: String,
    /// New flows that it decided.
    pub hits: u64,
}

/// The policy at an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyOfInterface {
    /// Name inside the pod.
    pub ifname: IfName,
    /// Network.
    pub network: NetworkName,
    /// The dataplane's number of the policy set, 0 when no policy selects the interface.
    pub policy_set: u32,
    /// The enforced rules, in the order of the policies' names.
    pub rules: Vec<EffectiveRuleView>,
}

/// A port of a service, at one virtual address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceView {
    /// `namespace/name:port`.
    pub service: String,
    /// Network.
    pub network: String,
    /// Virtual address.
    pub address: IpAddr,
    /// Virtual port.
    pub port: u16,
    /// Transport protocol number.
    pub protocol: u8,
    /// Addresses and ports of its backends.
    pub backends: Vec<(IpAddr, u16)>,
    /// Seconds for which a client keeps its backend.
    pub affinity_seconds: Option<u32>,
    /// The reason why it has no backends or is not active; empty means healthy.
    pub problem: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, name: &str) -> PodRef {
        PodRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        }
    }

    fn flow(verdict: Verdict) -> FlowView {
        FlowView {
            time_ns: 1,
            verdict,
            direction: Direction::FromPod,
            network: "blue".to_owned(),
            source: PeerView {
                pod: Some(pod("x", "a")),
                ..PeerView::default()
            },
            destination: PeerView {
                pod: Some(pod("y", "b")),
                ..PeerView::default()
            },
            translated_source: None,
            translated_destination: None,
            service: None,
            protocol: 6,
            length: 60,
            ethertype: 0x0800,
            pod: pod("x", "a"),
            ifname: "eth0".to_owned(),
            egress: None,
            ingress: None,
            external: None,
            explanation: String::new(),
        }
    }

    fn of_pod(namespace: &str, name: &str) -> FlowFilter {
        FlowFilter {
            pod_namespace: namespace.to_owned(),
            pod_name: name.to_owned(),
            ..FlowFilter::default()
        }
    }

    #[test]
    fn filters_match_either_end_but_never_half_of_two_pods() {
        let flow = flow(Verdict::Redirected);
        assert!(FlowFilter::default().selects(&flow));
        assert!(of_pod("x", "a").selects(&flow));
        assert!(of_pod("y", "b").selects(&flow));
        assert!(of_pod("", "b").selects(&flow));
        assert!(!of_pod("x", "b").selects(&flow));
        let network = |name: &str| FlowFilter {
            network: name.to_owned(),
            ..FlowFilter::default()
        };
        assert!(network("blue").selects(&flow));
        assert!(!network("red").selects(&flow));
    }

    #[test]
    fn drops_only_leaves_flows_out() {
        let filter = FlowFilter {
            drops_only: true,
            ..FlowFilter::default()
        };
        assert!(!filter.selects(&flow(Verdict::Redirected)));
        assert!(filter.selects(&flow(Verdict::PolicyIngress)));
    }
}
