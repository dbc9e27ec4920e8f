//! Converts flows and their explanations to the messages of `kni.runtime.v1`.

use std::net::IpAddr;

use kni_model::{
    flow_view::{ExplainView, FlowView, Onward, PeerView, TrailView},
    policy::{PolicyRef, RuleRef},
};
use kni_proto::runtime::{Arrival, ExplainResponse, Flow, Peer, Policy, PolicyDecision, Rule, SocketAddress};

use super::runtime_answer::protocol_word;

/// A flow event without lost events before it.
pub(super) fn flow(view: &FlowView) -> Flow {
    Flow {
        time_ns: view.time_ns,
        verdict: view.verdict.as_str().to_owned(),
        allowed: !view.is_drop(),
        direction: view.direction.as_str().to_owned(),
        network: view.network.clone(),
        source: Some(peer(&view.source)),
        destination: Some(peer(&view.destination)),
        translated_source: view.translated_source.map(socket_address),
        translated_destination: view.translated_destination.map(socket_address),
        service: view.service.clone().unwrap_or_default(),
        protocol: protocol(view),
        length: view.length,
        ethertype: view.ethertype.into(),
        pod_namespace: view.pod.namespace.clone(),
        pod_name: view.pod.name.clone(),
        ifname: view.ifname.clone(),
        egress: view.egress.as_ref().map(decision),
        ingress: view.ingress.as_ref().map(decision),
        beyond: view.external.as_ref().map(decision),
        explanation: view.explanation.clone(),
        lost: 0,
    }
}

pub(super) fn explanation(view: ExplainView) -> ExplainResponse {
    ExplainResponse {
        allowed: !view.flow.is_drop(),
        flow: Some(flow(&view.flow)),
        steps: view.steps,
        node: view.node,
        onward: view.onward.as_ref().map(onward),
    }
}

fn onward(view: &Onward) -> kni_proto::runtime::Onward {
    let tunnel = |number| Arrival {
        sender: view.sender.map(|sender| sender.to_string()).unwrap_or_default(),
        number,
    };
    kni_proto::runtime::Onward {
        node: view.node.clone().unwrap_or_default(),
        underlay: view.underlay.to_string(),
        tunnel: view.number.map(tunnel),
        tunnel_port: view.tunnel_port.into(),
        mtu: view.mtu,
        source: view.source.to_string(),
        destination: view.destination.to_string(),
        port: view.port.into(),
    }
}

pub(super) fn socket_address((ip, port): (IpAddr, u16)) -> SocketAddress {
    SocketAddress {
        ip: ip.to_string(),
        port: port.into(),
    }
}

pub(super) fn policy(reference: &PolicyRef) -> Policy {
    Policy {
        kind: reference.kind.as_str().to_owned(),
        namespace: reference.namespace.clone(),
        name: reference.name.clone(),
    }
}

pub(super) fn rule(reference: &RuleRef) -> Rule {
    Rule {
        policy: Some(policy(&reference.policy)),
        direction: reference.direction.as_str().to_owned(),
        index: reference.index,
    }
}

fn decision(trail: &TrailView) -> PolicyDecision {
    PolicyDecision {
        allowed: trail.allowed,
        rule: trail.rule.as_ref().map(rule),
        isolating: trail.isolating.iter().map(policy).collect(),
    }
}

fn peer(view: &PeerView) -> Peer {
    let (pod_namespace, pod_name) = match &view.pod {
        Some(pod) => (pod.namespace.clone(), pod.name.clone()),
        None => Default::default(),
    };
    Peer {
        ip: view.ip.map(|ip| ip.to_string()).unwrap_or_default(),
        port: view.port.into(),
        pod_namespace,
        pod_name,
        node: view.node.clone().unwrap_or_default(),
    }
}

/// Empty for a packet that is not IP and has no transport protocol.
fn protocol(view: &FlowView) -> String {
    if view.protocol == 0 && view.source.ip.is_none() {
        String::new()
    } else {
        protocol_word(view.protocol)
    }
}
