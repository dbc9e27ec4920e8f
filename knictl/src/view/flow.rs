//! Defines the documents about flows, enforced policy and services.

use kni_proto::runtime as proto;
use serde::Serialize;

use crate::packet;

views! {
    /// New flows and drops.
    Flows from ListFlowsResponse {} lists { flows: TimedFlow, }

    /// A new flow, a drop, or the explained fate of a packet.
    Flow from Flow {
        time_ns: u64,
        verdict: String,
        allowed: bool,
        direction: String,
        network: String,
        source: Peer,
        destination: Peer,
        service: String,
        protocol: String,
        length: u32,
        ethertype: u32,
        pod_namespace: String,
        pod_name: String,
        ifname: String,
        explanation: String,
        lost: u64,
    } lists {}, optional {
        translated_source: SocketAddress,
        translated_destination: SocketAddress,
        egress: Decision,
        ingress: Decision,
        beyond: Decision,
    }

    /// One end of a flow.
    Peer from Peer { ip: String, port: u32, pod_namespace: String, pod_name: String, } lists {}

    /// An address and a port.
    SocketAddress from SocketAddress { ip: String, port: u32, } lists {}

    /// The decisions of the policies of one end.
    Decision from PolicyDecision { allowed: bool, } lists { isolating: Policy, }, optional { rule: Rule, }

    /// Names a policy.
    Policy from Policy { kind: String, namespace: String, name: String, } lists {}

    /// Names a rule of a policy.
    Rule from Rule { policy: Policy, direction: String, index: u32, } lists {}

    /// The explained fate of a packet.
    Explanation from ExplainResponse { allowed: bool, flow: TimedFlow, steps: Vec<String>, } lists {}

    /// The policy enforced at the interfaces of a pod.
    PodPolicy from GetPolicyResponse {} lists { interfaces: InterfacePolicy, }

    /// The policy enforced at one interface.
    InterfacePolicy from InterfacePolicy {
        ifname: String,
        network: String,
        policy_set: u32,
    } lists { rules: EffectiveRule, }

    /// An enforced rule, or a default deny.
    EffectiveRule from EffectiveRule {
        direction: String,
        peers: String,
        ports: String,
        hits: u64,
    } lists { isolating: Policy, }, optional { rule: Rule, }

    /// The active services.
    Services from ListServicesResponse {} lists { services: ServicePort, }

    /// One port of a service at one address.
    ServicePort from ServicePort {
        service: String,
        network: String,
        address: String,
        port: u32,
        protocol: String,
        affinity_seconds: u32,
        problem: String,
    } lists { backends: SocketAddress, }
}

// Messages that the agent always sets, but that protobuf may omit.
impl From<Option<proto::Peer>> for Peer {
    fn from(peer: Option<proto::Peer>) -> Self {
        peer.unwrap_or_default().into()
    }
}

impl From<Option<proto::Policy>> for Policy {
    fn from(policy: Option<proto::Policy>) -> Self {
        policy.unwrap_or_default().into()
    }
}

impl From<Option<proto::Flow>> for TimedFlow {
    fn from(flow: Option<proto::Flow>) -> Self {
        flow.unwrap_or_default().into()
    }
}

/// A flow with its time in a notation for people and log tools.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TimedFlow {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    #[serde(flatten)]
    pub(crate) flow: Flow,
}

impl From<proto::Flow> for TimedFlow {
    fn from(flow: proto::Flow) -> Self {
        Self {
            time: packet::time(flow.time_ns),
            flow: flow.into(),
        }
    }
}
