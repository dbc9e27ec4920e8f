//! Defines the views of flows, enforced policy and services: plain values without any wire type.

use std::net::IpAddr;

use kni_common::{Direction, Verdict};

use super::{
    IfName, NetworkName, PodRef,
    policy::{PolicyDirection, PolicyRef, RuleRef},
};

/// A new flow, a drop, or what would become of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowView {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The verdict; a forwarding one reports a new flow.
    pub verdict: Verdict,
    /// Which program decided.
    pub direction: Direction,
    /// Network, empty where the packet met no endpoint.
    pub network: String,
    /// The sender, as in the packet.
    pub source: PeerView,
    /// To whom, before any translation.
    pub destination: PeerView,
    /// Source behind the translation; `None` when it was not translated.
    pub translated_source: Option<(IpAddr, u16)>,
    /// Destination behind the translation; `None` when it was not translated.
    pub translated_destination: Option<(IpAddr, u16)>,
    /// The service that was asked for, `namespace/name:port`.
    pub service: Option<String>,
    /// Transport protocol number.
    pub protocol: u8,
    /// Bytes from the Ethernet header on.
    pub length: u32,
    /// EtherType in host byte order.
    pub ethertype: u16,
    /// Pod whose interface the program runs on, empty for none.
    pub pod: PodRef,
    /// Name of that interface in the pod, empty where unknown.
    pub ifname: String,
    /// The decision of the sender's policies on sending; `None` when they were not consulted.
    pub egress: Option<TrailView>,
    /// The decision of the receiver's policies on receiving; `None` when they were not consulted.
    pub ingress: Option<TrailView>,
    /// The decision of the sender's egress policies on leaving; `None` when they were not consulted.
    pub beyond: Option<TrailView>,
    /// One line for people: what happened and which policy or rule decided.
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
    /// Address; `None` where it was not read.
    pub ip: Option<IpAddr>,
    /// Port, 0 for none.
    pub port: u16,
    /// The pod of this node that has the address in the flow's network.
    pub pod: Option<PodRef>,
}

/// The decision of the policies of one end about a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrailView {
    /// Whether they let it pass.
    pub allowed: bool,
    /// The rule that decided; `None` for a default deny, and where no policy isolates.
    pub rule: Option<RuleRef>,
    /// The policies that isolate the pod in this direction.
    pub isolating: Vec<PolicyRef>,
}

/// Which flows are asked for; empty fields select all.
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
    /// Whether the flow is asked for. A pod is involved as source, as destination, or as the owner of the interface.
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

/// What would become of a packet?
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExplainQuestion {
    /// `namespace/pod`, `namespace/pod@interface`, or an address.
    pub source: String,
    /// Likewise.
    pub destination: String,
    /// Transport protocol number; 1 and 58 both mean an echo request of the destination's family.
    pub protocol: u8,
    /// Destination port, 0 for a protocol without ports.
    pub port: u16,
    /// Network; `None`: that of the named interface, else of the pod's first one.
    pub network: Option<String>,
}

/// The answer to an [`ExplainQuestion`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainView {
    /// The packet and what was decided about it.
    pub flow: FlowView,
    /// What the decision went through, in order, one line each.
    pub steps: Vec<String>,
}

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// A field of the question makes no sense.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// It is about something that is not there.
    #[error("{what} is not attached on this node")]
    NotFound {
        /// What was named.
        what: String,
    },
    /// The dataplane could not be asked.
    #[error("{0}")]
    Failed(String),
}

/// A rule enforced at an interface, or its default deny.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveRuleView {
    /// What it is about.
    pub direction: PolicyDirection,
    /// The rule; `None` for the default deny.
    pub rule: Option<RuleRef>,
    /// The policies that isolate the interface in this direction.
    pub isolating: Vec<PolicyRef>,
    /// Its peers, for people.
    pub peers: String,
    /// Its ports, for people.
    pub ports: String,
    /// New flows that it decided about.
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
    /// Where it leads.
    pub backends: Vec<(IpAddr, u16)>,
    /// Seconds for which a client keeps its backend.
    pub affinity_seconds: Option<u32>,
    /// Why it has no backends, or is not active; empty means healthy.
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
            beyond: None,
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
