//! Converts the agent's views to the messages of `kni.runtime.v1`.

use std::net::IpAddr;

use kni_model::{
    NetworkName,
    flow_view::TunnelProbe,
    view::{
        Count, DropEventView, DropView, InterfaceView, MapView, NetworkView, ProgramView, RefusedManifest, UplinkView,
    },
};
use kni_proto::runtime::{
    Address, Counter, DropCount, DropEvent, Interface, Map, NetworkStatus, ProbeTunnelResponse, ProbedNode, Program,
    RefusedManifest as WireRefused, Uplink,
};

pub(super) fn network(view: &NetworkView) -> NetworkStatus {
    let spec = &view.network.spec;
    NetworkStatus {
        name: spec.name.to_string(),
        id: view.network.id.get(),
        default: spec.default,
        ready: view.ready,
        reason: view.reason.clone(),
        subnets: spec.subnets.iter().map(ToString::to_string).collect(),
        mtu: spec.mtu,
        attachments: view.attachments,
        total_addresses: view.total_addresses.to_string(),
        used_addresses: view.used_addresses.to_string(),
        origin: view.origin.clone(),
        provider: spec.provider.as_str().to_owned(),
        features: view
            .features
            .iter()
            .map(|feature| feature.as_str().to_owned())
            .collect(),
        number: view.number.unwrap_or(0),
        number_problem: view
            .number_problem
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    }
}

pub(super) fn refused(manifest: RefusedManifest) -> WireRefused {
    let RefusedManifest {
        file,
        line,
        field,
        reason,
    } = manifest;
    WireRefused {
        file,
        line,
        field,
        reason,
    }
}

pub(super) fn interface(view: InterfaceView) -> Interface {
    let InterfaceView {
        sandbox,
        attachment,
        programs,
        counts,
        problems,
        provisional: _,
    } = view;
    let v4 = attachment.ipv4.map(|ip| address("IPv4", ip.into()));
    let v6 = attachment.ipv6.map(|ip| address("IPv6", ip.into()));
    Interface {
        pod_namespace: sandbox.pod.namespace.clone(),
        pod_name: sandbox.pod.name.clone(),
        pod_uid: sandbox.pod.uid.clone(),
        sandbox_id: sandbox.id.to_string(),
        network: attachment.network.to_string(),
        network_id: attachment.network_id.get(),
        endpoint_id: attachment.endpoint.0,
        ifname: attachment.ifname.to_string(),
        ifindex: attachment.ifindex,
        // Kinds without a host end have no host index.
        host_ifname: if attachment.host_ifindex == 0 {
            String::new()
        } else {
            attachment.host_ifname.to_string()
        },
        host_ifindex: attachment.host_ifindex,
        netns_path: sandbox.netns.display().to_string(),
        netns_inode: sandbox.netns_identity.inode,
        mac: attachment.mac.to_string(),
        host_mac: attachment.host_mac.to_string(),
        mtu: attachment.mtu,
        addresses: v4.into_iter().chain(v6).collect(),
        programs: programs.into_iter().map(program).collect(),
        from_pod: Some(counter(counts.from_pod)),
        to_pod: Some(counter(counts.to_pod)),
        dropped: Some(counter(counts.dropped)),
        healthy: problems.is_empty(),
        problems,
        default_route: attachment.default_route,
        host_access: attachment.host_access,
        kind: attachment.kind.as_str().to_owned(),
        policy_enforced: attachment.kind.has_row(),
    }
}

pub(super) fn drop_count(view: DropView) -> DropCount {
    DropCount {
        network: network_name(view.network),
        pod_namespace: view.pod.namespace,
        pod_name: view.pod.name,
        ifname: view.ifname,
        direction: view.direction.as_str().to_owned(),
        reason: view.reason.as_str().to_owned(),
        count: Some(counter(view.count)),
        explanation: view.reason.explanation().to_owned(),
    }
}

pub(super) fn drop_event(view: &DropEventView) -> DropEvent {
    let ip = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
    DropEvent {
        time_ns: view.time_ns,
        network: network_name(view.network.clone()),
        pod_namespace: view.pod.namespace.clone(),
        pod_name: view.pod.name.clone(),
        ifname: view.ifname.clone(),
        direction: view.direction.as_str().to_owned(),
        reason: view.reason.as_str().to_owned(),
        source: ip(view.source),
        destination: ip(view.destination),
        protocol: protocol(view),
        source_port: view.source_port.into(),
        destination_port: view.destination_port.into(),
        length: view.length,
        lost: 0,
        ethertype: view.ethertype.into(),
        explanation: view.reason.explanation().to_owned(),
    }
}

pub(super) fn map(view: MapView) -> Map {
    Map {
        name: view.name,
        id: view.id,
        kind: view.kind,
        key_size: view.key_size,
        value_size: view.value_size,
        max_entries: view.max_entries,
        entries: view.entries,
        pin: view.pin.display().to_string(),
        purpose: view.purpose,
    }
}

pub(super) fn tunnel_probe(view: TunnelProbe) -> ProbeTunnelResponse {
    let nodes = view.nodes.into_iter().map(|node| ProbedNode {
        node: node.node,
        underlay: node.underlay.to_string(),
        answers: node.answers,
        answers_through_tunnel: node.answers_through_tunnel,
    });
    ProbeTunnelResponse {
        nodes: nodes.collect(),
        others: u32::try_from(view.others).unwrap_or(u32::MAX),
        port: view.port.into(),
        obstacle: view.obstacle,
    }
}

pub(super) fn uplink(view: UplinkView) -> Uplink {
    let texts = |addresses: Vec<IpAddr>| addresses.iter().map(ToString::to_string).collect();
    Uplink {
        ifname: view.ifname,
        ifindex: view.ifindex,
        sources: texts(view.sources),
        dedicated: texts(view.dedicated),
        programs: view.programs.into_iter().map(program).collect(),
        xdp: view.xdp,
        host_ports: view.host_ports,
        warning: view.warning,
    }
}

/// Name of the transport protocol; empty for a packet that is not IP.
fn protocol(view: &DropEventView) -> String {
    match (view.protocol, view.source) {
        (0, None) => String::new(),
        (number, _) => protocol_word(number),
    }
}

/// Name of a transport protocol, or its number.
pub(super) fn protocol_word(number: u8) -> String {
    let word = match number {
        1 => "ICMP",
        6 => "TCP",
        17 => "UDP",
        58 => "ICMPv6",
        132 => "SCTP",
        _ => return number.to_string(),
    };
    word.to_owned()
}

fn network_name(name: Option<NetworkName>) -> String {
    name.map(String::from).unwrap_or_default()
}

fn address(family: &str, ip: IpAddr) -> Address {
    Address {
        family: family.to_owned(),
        ip: ip.to_string(),
    }
}

fn program(view: ProgramView) -> Program {
    let ProgramView {
        name,
        id,
        hook,
        link_id,
    } = view;
    Program {
        name,
        id,
        hook,
        link_id,
    }
}

fn counter(count: Count) -> Counter {
    Counter {
        packets: count.packets,
        bytes: count.bytes,
    }
}
