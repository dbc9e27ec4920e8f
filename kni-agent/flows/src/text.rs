//! Renders the fate of a packet as one line, with the deciding policy or rule.

use std::fmt::Write as _;

use kni_common::Verdict;
use kni_model::{
    flow_view::{FlowView, PeerView, TrailView},
    policy::PolicyRef,
};

/// For example `dropped: policy_ingress: NetworkPolicy x/deny isolates x/a (ingress) and no rule allows y/b TCP 80`.
pub(super) fn explanation(flow: &FlowView) -> String {
    if flow.is_drop() {
        return format!("dropped: {}: {}", flow.verdict.as_str(), reason(flow));
    }
    let mut text = format!("{}: {}", flow.verdict.as_str(), flow.verdict.explanation());
    if let (Some(service), Some((ip, port))) = (&flow.service, flow.translated_destination) {
        append(&mut text, &format!("service {service} leads to {}", socket(ip, port)));
    }
    for (word, trail) in [
        ("egress", &flow.egress),
        ("ingress", &flow.ingress),
        ("leaving", &flow.external),
    ] {
        if let Some(rule) = trail.as_ref().and_then(|trail| trail.rule.as_ref()) {
            append(&mut text, &format!("{word} allowed by {rule}"));
        }
    }
    text
}

/// The details of a drop, without the name of its reason.
pub(super) fn reason(flow: &FlowView) -> String {
    let (source, destination) = (who(&flow.source), who(&flow.destination));
    let denied = if flow.verdict == Verdict::PolicyEgress {
        flow.egress
            .as_ref()
            .and_then(|trail| denial(trail, &source, "egress", &destination, flow))
    } else if flow.verdict == Verdict::PolicyIngress {
        flow.ingress
            .as_ref()
            .and_then(|trail| denial(trail, &destination, "ingress", &source, flow))
    } else if flow.verdict == Verdict::PolicyExternal {
        flow.external
            .as_ref()
            .and_then(|trail| denial(trail, &source, "leaving", &destination, flow))
    } else {
        None
    };
    denied.unwrap_or_else(|| flow.verdict.explanation().to_owned())
}

fn denial(trail: &TrailView, isolated: &str, direction: &str, peer: &str, flow: &FlowView) -> Option<String> {
    let traffic = traffic(flow);
    if let Some(rule) = &trail.rule {
        return Some(format!("{rule} denies {peer} {traffic} to {isolated}"));
    }
    let verb = if trail.isolating.len() == 1 {
        "isolates"
    } else {
        "isolate"
    };
    (!trail.isolating.is_empty()).then(|| {
        let policies = policies(&trail.isolating);
        format!("{policies} {verb} {isolated} ({direction}) and no rule allows {peer} {traffic}")
    })
}

/// Names of policies in one line.
pub(super) fn policies(policies: &[PolicyRef]) -> String {
    let names: Vec<String> = policies.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// The pod, else `node/NAME`, else the address.
pub(super) fn who(peer: &PeerView) -> String {
    match (&peer.pod, &peer.node, peer.ip) {
        (Some(pod), ..) => pod.to_string(),
        (None, Some(node), _) => format!("node/{node}"),
        (None, None, Some(ip)) => ip.to_string(),
        (None, None, None) => "an unknown address".to_owned(),
    }
}

/// Protocol and destination port after translation, which policies match.
pub(super) fn traffic(flow: &FlowView) -> String {
    let name = match flow.protocol {
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        132 => "SCTP".to_owned(),
        number => format!("protocol {number}"),
    };
    let port = flow
        .translated_destination
        .map_or(flow.destination.port, |(_, port)| port);
    if port == 0 { name } else { format!("{name} {port}") }
}

/// Address and port in the usual notation.
pub(super) fn socket(ip: std::net::IpAddr, port: u16) -> String {
    if port == 0 {
        ip.to_string()
    } else {
        std::net::SocketAddr::new(ip, port).to_string()
    }
}

fn append(text: &mut String, more: &str) {
    // Writing to a string cannot fail.
    let _cannot_fail = write!(text, "; {more}").is_err();
}
