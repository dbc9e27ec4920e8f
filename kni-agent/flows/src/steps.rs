//! Lists the steps of a decision, one line each, in the order of the programs.

use kni_common::{Direction, Verdict};
use kni_model::flow_view::{FlowView, TrailView};

use super::text::{policies, reason, socket, traffic, who};

/// The lines. `ingress_ifindex` is the interface on which the node would have received a packet to a pod.
pub(super) fn of(flow: &FlowView, ingress_ifindex: u32) -> Vec<String> {
    let mut steps = vec![begin(flow, ingress_ifindex)];
    steps.extend(service(flow));
    steps.extend(route(flow));
    if is_hairpin(flow) {
        steps.push(format!("policies: {} may always reach itself", who(&flow.source)));
    } else if was_judged(flow) {
        let sender = flow.direction == Direction::FromPod && flow.source.pod.is_some();
        if sender {
            steps.push(judged("egress", &who(&flow.source), flow.egress.as_ref()));
        }
        let denied_before = flow.verdict == Verdict::PolicyEgress;
        if flow.destination.pod.is_some() && !denied_before {
            steps.push(match (&flow.ingress, flow.direction, ingress_ifindex) {
                (None, Direction::ToPod, 0) => "ingress: the node itself may always reach its pods".to_owned(),
                _ => judged("ingress", &who(&flow.destination), flow.ingress.as_ref()),
            });
        } else if sender && !denied_before {
            steps.push(judged("leaving", &who(&flow.source), flow.external.as_ref()));
        }
    }
    steps.push(if flow.is_drop() {
        format!("dropped: {}: {}", flow.verdict.as_str(), reason(flow))
    } else {
        format!("{}: {}", flow.verdict.as_str(), flow.verdict.explanation())
    });
    steps
}

fn begin(flow: &FlowView, ingress_ifindex: u32) -> String {
    let traffic = requested_traffic(flow);
    let (source, destination) = (end(flow.source.ip), end(flow.destination.ip));
    match (flow.direction, ingress_ifindex) {
        (Direction::FromPod | Direction::ToUplink | Direction::ToOverlay, _) => format!(
            "{} sends {traffic} from {source} to {destination} by {} (network {})",
            flow.pod, flow.ifname, flow.network
        ),
        (Direction::ToPod, 0) => format!(
            "the node sends {traffic} from {source} to {} at {destination} by {} (network {})",
            flow.pod, flow.ifname, flow.network
        ),
        (Direction::ToPod | Direction::FromUplink | Direction::FromOverlay, _) => format!(
            "{traffic} from {source}, outside the node's pods, arrives for {} at {destination} by {} (network {})",
            flow.pod, flow.ifname, flow.network
        ),
    }
}

fn end(ip: Option<std::net::IpAddr>) -> String {
    ip.map_or_else(|| "an unknown address".to_owned(), |ip| ip.to_string())
}

/// Protocol and port as requested, before any translation.
fn requested_traffic(flow: &FlowView) -> String {
    traffic(&FlowView {
        translated_destination: None,
        ..flow.clone()
    })
}

fn service(flow: &FlowView) -> Option<String> {
    let service = flow.service.as_ref()?;
    let asked = flow
        .destination
        .ip
        .map(|ip| socket(ip, flow.destination.port))
        .unwrap_or_default();
    Some(match flow.translated_destination {
        Some((ip, port)) => format!("{asked} is service {service}, which leads to {}", socket(ip, port)),
        None => format!("{asked} is service {service}"),
    })
}

fn route(flow: &FlowView) -> Option<String> {
    let ip = flow.translated_destination.map(|(ip, _)| ip).or(flow.destination.ip)?;
    if flow.direction == Direction::ToPod {
        return None;
    }
    match (&flow.destination.pod, was_judged(flow)) {
        (Some(pod), _) => Some(format!("{ip} is pod {pod} of this node")),
        (None, true) => Some(format!("{ip} is no pod of this node on network {}", flow.network)),
        (None, false) => None,
    }
}

/// Whether a service leads the pod back to itself.
fn is_hairpin(flow: &FlowView) -> bool {
    flow.translated_source.is_some() && flow.source.pod.is_some() && flow.source.pod == flow.destination.pod
}

/// Whether the packet reached the policies.
fn was_judged(flow: &FlowView) -> bool {
    let behind = [
        Verdict::Redirected,
        Verdict::PassedToStack,
        Verdict::Delivered,
        Verdict::PolicyEgress,
        Verdict::PolicyIngress,
        Verdict::PolicyExternal,
        Verdict::TupleInUse,
        Verdict::FlowQuota,
        Verdict::FlowTableFull,
    ];
    behind.contains(&flow.verdict)
}

fn judged(what: &str, whose: &str, trail: Option<&TrailView>) -> String {
    let Some(trail) = trail else {
        return format!("{what}: no policy selects {whose}");
    };
    match (&trail.rule, trail.allowed, trail.isolating.as_slice()) {
        (Some(rule), true, _) => format!("{what}: {rule} allows it"),
        (Some(rule), false, _) => format!("{what}: {rule} denies it"),
        (None, true, _) => format!("{what}: no policy isolates {whose} in this direction"),
        (None, false, []) => format!("{what}: denied"),
        (None, false, isolating) => format!("{what}: isolated by {}, and no rule allows it", policies(isolating)),
    }
}
