//! Lists the steps of a decision, one line each, in the order of the programs.

use std::net::IpAddr;

use kni_common::{Direction, Verdict};
use kni_dataplane::SupposedTunnel;
use kni_model::flow_view::{FlowView, Onward, PeerView, TrailView};

use super::text::{policies, reason, socket, traffic, who};

/// The other node of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Crossing {
    /// None.
    None,
    /// The node that has the destination.
    Out(Onward),
    /// The node that sends the packet through the tunnel.
    In {
        tunnel: SupposedTunnel,
        /// Name of the node with the tunnel's outer source.
        sender: Option<String>,
        /// The node that has the inner source; `None`: no node is known to.
        owner: Option<Owner>,
    },
}

/// The node that has the source of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) name: Option<String>,
    /// The address by which this node reaches it.
    pub(super) underlay: IpAddr,
    /// Through the tunnel.
    pub(super) overlay: bool,
    /// The source is the node's own address.
    pub(super) is_node: bool,
}

/// The lines. `ingress_ifindex` is the interface on which the node would have received a packet to a pod.
pub(super) fn of(flow: &FlowView, ingress_ifindex: u32, crossing: &Crossing) -> Vec<String> {
    let mut steps = vec![begin(flow, ingress_ifindex, crossing)];
    steps.extend(service(flow));
    if let Crossing::In { tunnel, owner, .. } = crossing {
        steps.extend(arrival(flow, tunnel, owner.as_ref()));
    } else {
        steps.extend(route(flow, crossing));
    }
    if is_hairpin(flow) {
        steps.push(format!("policies: {} may always reach itself", who(&flow.source)));
    } else if was_evaluated(flow) {
        steps.extend(policy_steps(flow, ingress_ifindex));
    }
    if let Crossing::Out(onward) = crossing
        && [Verdict::Tunnelled, Verdict::Routed, Verdict::TooBig].contains(&flow.verdict)
    {
        steps.push(way(flow, onward));
    }
    steps.push(if flow.is_drop() {
        format!("dropped: {}: {}", flow.verdict.as_str(), reason(flow))
    } else {
        format!("{}: {}", flow.verdict.as_str(), flow.verdict.explanation())
    });
    steps
}

/// The policies that the packet passed or failed on this node.
fn policy_steps(flow: &FlowView, ingress_ifindex: u32) -> Vec<String> {
    let mut steps = Vec::new();
    let sender = flow.direction == Direction::FromPod && flow.source.pod.is_some();
    // The ingress of a pod of another node is evaluated there.
    let receives = flow.destination.pod.is_some() && flow.destination.node.is_none();
    let leaves = flow.destination.pod.is_none();
    if sender {
        steps.push(evaluated("egress", &who(&flow.source), flow.egress.as_ref()));
    }
    let denied_before = flow.verdict == Verdict::PolicyEgress;
    if receives && !denied_before {
        steps.push(match (&flow.ingress, flow.direction, ingress_ifindex) {
            (None, Direction::ToPod, 0) => "ingress: the node itself may always reach its pods".to_owned(),
            _ => evaluated("ingress", &who(&flow.destination), flow.ingress.as_ref()),
        });
    } else if sender && leaves && !denied_before {
        steps.push(evaluated("leaving", &who(&flow.source), flow.external.as_ref()));
    }
    steps
}

/// The way to the other node.
fn way(flow: &FlowView, onward: &Onward) -> String {
    let node = known_node(onward.node.as_ref(), onward.underlay);
    let Onward { mtu, .. } = onward;
    match onward.number {
        Some(number) => format!(
            "way: through the tunnel to {node}, UDP port {}, as number {number} (network {}); packets of at most {mtu} \
             bytes",
            onward.tunnel_port, flow.network
        ),
        None => format!("way: through the network of the nodes to {node}; packets of at most {mtu} bytes"),
    }
}

/// `node n2 at 192.0.2.2`.
fn known_node(name: Option<&String>, underlay: IpAddr) -> String {
    match name {
        Some(name) => format!("node {name} at {underlay}"),
        None => format!("an unnamed node at {underlay}"),
    }
}

/// What the receiver's node checks before its policies, in the order of the program.
fn arrival(flow: &FlowView, tunnel: &SupposedTunnel, owner: Option<&Owner>) -> Vec<String> {
    let number = tunnel.number;
    if flow.network.is_empty() {
        return vec![format!("number: {number} is that of no network of this node")];
    }
    let mut steps = vec![format!("number: {number} is that of network {}", flow.network)];
    if let Some(ip) = flow.destination.ip {
        let here = match (&flow.destination.pod, &flow.destination.node) {
            (Some(pod), None) => format!("pod {pod} of this node"),
            _ if flow.verdict == Verdict::PassedToStack => "this node itself".to_owned(),
            _ => format!("no pod of this node on network {}", flow.network),
        };
        steps.push(format!("destination: {ip} is {here}"));
    }
    let missed = [Verdict::NoDestination, Verdict::DestinationNotReady].contains(&flow.verdict);
    if let (Some(ip), false) = (flow.source.ip, missed) {
        steps.push(match owner {
            None => format!("source: no node is known to have {ip}"),
            Some(owner) => source(ip, owner, tunnel),
        });
    }
    if was_evaluated(flow) && owner.is_some_and(|owner| !owner.is_node) {
        steps.push(identity(&flow.source));
    }
    steps
}

fn source(ip: IpAddr, owner: &Owner, tunnel: &SupposedTunnel) -> String {
    let node = known_node(owner.name.as_ref(), owner.underlay);
    match (owner.overlay, owner.underlay == tunnel.sender) {
        (true, true) => format!("source: {node} has {ip}"),
        (true, false) => format!("source: {node} has {ip}, not {}", tunnel.sender),
        (false, _) => format!("source: {node} has {ip}, and sends its packets without a tunnel"),
    }
}

fn identity(peer: &PeerView) -> String {
    match (&peer.pod, peer.ip) {
        (Some(pod), Some(ip)) => format!("identity: {ip} is the confirmed pod {pod}"),
        (_, ip) => format!(
            "identity: {} is no confirmed pod: rules that select pods do not apply to it",
            end(ip)
        ),
    }
}

fn begin(flow: &FlowView, ingress_ifindex: u32, crossing: &Crossing) -> String {
    let traffic = requested_traffic(flow);
    let (source, destination) = (end(flow.source.ip), end(flow.destination.ip));
    if let Crossing::In { tunnel, sender, .. } = crossing {
        return format!(
            "{traffic} from {source} to {destination} arrives through the tunnel from {}",
            known_node(sender.as_ref(), tunnel.sender)
        );
    }
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

fn route(flow: &FlowView, crossing: &Crossing) -> Option<String> {
    let ip = flow.translated_destination.map(|(ip, _)| ip).or(flow.destination.ip)?;
    if flow.direction == Direction::ToPod {
        return None;
    }
    let PeerView { pod, node, .. } = &flow.destination;
    match (crossing, pod, node) {
        (Crossing::Out(_), Some(pod), Some(node)) => Some(format!("{ip} is pod {pod} of node {node}")),
        (Crossing::Out(_), None, Some(node)) => Some(format!("{ip} is node {node}")),
        (Crossing::Out(onward), ..) => Some(format!(
            "{ip} is an address of {}, and that of no confirmed pod",
            known_node(onward.node.as_ref(), onward.underlay)
        )),
        (_, Some(pod), None) => Some(format!("{ip} is pod {pod} of this node")),
        _ if was_evaluated(flow) => Some(format!("{ip} is no pod of this node on network {}", flow.network)),
        _ => None,
    }
}

/// Whether a service leads the pod back to itself.
fn is_hairpin(flow: &FlowView) -> bool {
    flow.translated_source.is_some() && flow.source.pod.is_some() && flow.source.pod == flow.destination.pod
}

/// Whether the packet reached the policies.
fn was_evaluated(flow: &FlowView) -> bool {
    let behind = [
        Verdict::Redirected,
        Verdict::PassedToStack,
        Verdict::Delivered,
        Verdict::Tunnelled,
        Verdict::Routed,
        Verdict::TooBig,
        Verdict::PolicyEgress,
        Verdict::PolicyIngress,
        Verdict::PolicyExternal,
        Verdict::TupleInUse,
        Verdict::FlowQuota,
        Verdict::FlowTableFull,
    ];
    behind.contains(&flow.verdict)
}

fn evaluated(what: &str, whose: &str, trail: Option<&TrailView>) -> String {
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
