//! Turns a record of the programs into a view for operators: names for numbers, and translated addresses.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kni_common::{Direction, Verdict, address::to_ip};
use kni_dataplane::FlowRecord;
use kni_model::{
    EndpointId, NetworkId, PodRef,
    flow_view::{FlowView, PeerView},
    policy::PolicyDirection,
};
use nix::time::{ClockId, clock_gettime};

use super::{Naming, text};

/// TCP, UDP and SCTP: the corresponding fields of other protocols mean nothing to operators.
pub(super) const WITH_PORTS: [u8; 3] = [6, 17, 132];

/// Names a record. A pod that was deleted meanwhile has no name any more.
pub(super) fn flow(record: &FlowRecord, naming: &dyn Naming) -> FlowView {
    let FlowRecord {
        event,
        direction,
        verdict,
    } = *record;
    let network = NetworkId::try_from(event.network).ok();
    let protocol = u8::try_from(event.protocol).unwrap_or(u8::MAX);
    let owner = naming.owner(EndpointId(event.endpoint));
    let (pod, ifname) = owner.map(|owner| (owner.pod, owner.ifname)).unwrap_or_default();
    let port = |bytes: [u8; 2]| {
        if WITH_PORTS.contains(&protocol) {
            u16::from_be_bytes(bytes)
        } else {
            0
        }
    };
    let (before, after) = (event.ports, event.translated_ports);
    let source = end(event.source, port(before.source));
    let destination = end(event.destination, port(before.destination));
    let translated =
        |there: [u8; 16], port: u16, here: End| end(there, port).filter(|end| here.is_some() && Some(*end) != here);
    let allowed = |reason: Verdict| verdict != reason;
    let mut flow = FlowView {
        time_ns: wall_clock(event.time_ns),
        verdict,
        direction,
        network: network
            .and_then(|network| naming.network_name(network))
            .map(|name| name.to_string())
            .unwrap_or_default(),
        source: peer(source),
        destination: peer(destination),
        translated_source: translated(event.translated_source, port(after.source), source),
        translated_destination: translated(event.translated_destination, port(after.destination), destination),
        service: naming.service_name(event.service).filter(|_| event.service != 0),
        protocol,
        length: event.length,
        ethertype: event.ethertype,
        pod,
        ifname,
        egress: naming.trail(&event.egress, PolicyDirection::Egress, allowed(Verdict::PolicyEgress)),
        ingress: naming.trail(
            &event.ingress,
            PolicyDirection::Ingress,
            allowed(Verdict::PolicyIngress),
        ),
        external: naming.trail(
            &event.beyond,
            PolicyDirection::External,
            allowed(Verdict::PolicyExternal),
        ),
        explanation: String::new(),
    };
    name_pods(&mut flow, network, EndpointId(event.peer), naming);
    flow.explanation = text::explanation(&flow);
    flow
}

/// Address and port of one end, where they were read.
type End = Option<(IpAddr, u16)>;

fn end(address: [u8; 16], port: u16) -> End {
    (address != [0; 16]).then(|| (to_ip(address), port))
}

fn peer(end: End) -> PeerView {
    PeerView {
        ip: end.map(|(ip, _)| ip),
        port: end.map_or(0, |(_, port)| port),
        pod: None,
        node: None,
    }
}

/// The peer that the program found takes precedence over the owner of the address: behind a service it is the backend.
fn name_pods(flow: &mut FlowView, network: Option<NetworkId>, peer: EndpointId, naming: &dyn Naming) {
    let pod_of = |endpoint: EndpointId| naming.owner(endpoint).map(|owner| owner.pod);
    let pod_at = |ip: Option<IpAddr>| -> Option<PodRef> { pod_of(naming.endpoint_at(network?, ip?)?) };
    let found = (peer != EndpointId(0)).then(|| pod_of(peer)).flatten();
    let (near, far) = match flow.direction {
        Direction::FromPod | Direction::ToUplink | Direction::ToOverlay => (&mut flow.source, &mut flow.destination),
        Direction::ToPod | Direction::FromUplink | Direction::FromOverlay => (&mut flow.destination, &mut flow.source),
    };
    near.pod = pod_at(near.ip);
    far.pod = found.or_else(|| pod_at(far.ip));
    // A packet that is sent to a service is for its backend.
    let after = flow.translated_destination.map(|(ip, _)| ip);
    name_remote(&mut flow.source, None, network, naming);
    name_remote(&mut flow.destination, after, network, naming);
}

/// Names a pod of another node, or a node, by the address; `after`: the address after the translation.
fn name_remote(peer: &mut PeerView, after: Option<IpAddr>, network: Option<NetworkId>, naming: &dyn Naming) {
    let Some(ip) = after.or(peer.ip).filter(|_| peer.pod.is_none()) else {
        return;
    };
    if let Some(remote) = network.and_then(|network| naming.remote_at(network, ip)) {
        peer.pod = Some(remote.pod.clone());
        peer.node = Some(remote.node.clone());
    } else {
        peer.node = naming.node_at(network, ip);
    }
}

/// Nanoseconds since the Unix epoch for a time of `CLOCK_MONOTONIC`; now for no time.
fn wall_clock(monotonic_ns: u64) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let monotonic = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default();
    let age = if monotonic_ns == 0 {
        Duration::ZERO
    } else {
        monotonic.saturating_sub(Duration::from_nanos(monotonic_ns))
    };
    u64::try_from(wall.saturating_sub(age).as_nanos()).unwrap_or(u64::MAX)
}
