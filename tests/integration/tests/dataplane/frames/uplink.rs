//! Tests frames from outside for a port of the node that leads to a pod, and answers to what a pod asked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, IFINDEX_BASE, Verdict};
use kni_dataplane::{EgressRow, EgressSource, HostPort, NetworkRoutes, RouteEgress, host_port_key};
use kni_integration::{
    frames::{Ip, Link, Payload, TcpFlags, checksum},
    model::{ANYBODY, Allowed, Asked, Endpoint, PortRow, Seen},
    programs::{Lockstep, Ran, action_of, hex},
    require,
};
use kni_model::{EndpointId, NetworkId};

use super::{
    policy::select,
    table::{A4, A6, DEFAULT, DEFAULT_A, FREE, OUTSIDE4, OUTSIDE6, endpoint, from, service, virtual_like},
};

/// Addresses of the node.
const NODE4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NODE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// Each end outside with the node's address of the family.
const FAMILIES: [(IpAddr, IpAddr); 2] = [
    (IpAddr::V4(OUTSIDE4), IpAddr::V4(NODE4)),
    (IpAddr::V6(OUTSIDE6), IpAddr::V6(NODE6)),
];
/// A port that leads to the pod, and one that does not.
const OPEN: u16 = 8080;
const OTHER: u16 = 8081;

fn link() -> Link {
    Link::new([2, 9, 9, 9, 9, 1], [2, 9, 9, 9, 9, 2])
}

/// A pod with host ports for UDP and TCP.
fn inside(name: &str, work: impl FnOnce(&mut Lockstep) -> Result<()> + Send) -> Result<()> {
    Lockstep::inside(name, 4096, |step| {
        step.publish(DEFAULT_A, &endpoint(DEFAULT_A))?;
        let target = HostPort {
            endpoint: EndpointId(DEFAULT_A),
            port: 80,
        };
        let keys = FAMILIES
            .into_iter()
            .flat_map(|(_, node)| [6, 17].map(|protocol| (host_port_key(node, protocol, OPEN), target)));
        step.programs().dataplane().set_host_ports(&keys.collect())?;
        work(step)
    })
}

fn arrives(step: &Lockstep, packet: &[u8]) -> Result<Ran> {
    let frame = link().frame(packet);
    step.programs().run(Direction::FromUplink, DEFAULT_A, &frame)
}

#[test]
fn first_fragments_leave_rows_only_where_they_are_for_a_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("fragments-outside", |step| {
        for (rows, (peer, node)) in FAMILIES.into_iter().enumerate() {
            for (what, port, action, more) in [
                ("nobody", OTHER, Verdict::PassedToStack, 0),
                ("a pod", OPEN, Verdict::Redirected, 1),
            ] {
                let mut whole = Ip::new(peer, node);
                whole.id = port;
                for packet in whole.fragments(&Payload::udp(4000, port, &[7; 60]), 24) {
                    let ran = arrives(step, &packet)?;
                    ensure!(ran.action == action_of(action), "fragments for {what}: {}", ran.action);
                }
                let found = step.fragments_from_outside()?;
                ensure!(
                    found == rows + more,
                    "first fragments of {peer} for {what} leave {found} rows"
                );
            }
        }
        Ok(())
    })
}

#[test]
fn the_last_hop_of_a_packet_is_told_to_its_sender() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("last-hop", |step| {
        for (peer, node) in FAMILIES {
            for payload in [
                Payload::udp(4000, OPEN, b"0123456789"),
                Payload::tcp(4000, OPEN, TcpFlags::SYN),
            ] {
                let packet = Ip::new(peer, node).hop_limit(1).packet(&payload);
                let ran = arrives(step, &packet)?;
                let shown = hex(&ran.frame);
                ensure!(
                    ran.action == action_of(Verdict::Redirected),
                    "action {}: {shown}",
                    ran.action
                );
                expired(&ran.frame, &packet, (peer, node)).context(shown)?;
                // The last but one continues.
                let ran = arrives(step, &Ip::new(peer, node).hop_limit(2).packet(&payload))?;
                ensure!(ran.frame[..6] == endpoint(DEFAULT_A).mac, "{}", hex(&ran.frame));
            }
        }
        // An error is not answered with another one, nor is a packet for no pod here: the stack has it.
        let other = Ip::new(OUTSIDE4.into(), NODE4.into()).hop_limit(1);
        let ran = arrives(step, &other.packet(&Payload::udp(4000, OTHER, b"")))?;
        ensure!(ran.action == action_of(Verdict::PassedToStack), "action {}", ran.action);
        Ok(())
    })
}

/// A pod whose packets leave with the node's addresses.
fn masquerade(step: &mut Lockstep) -> Result<()> {
    let dataplane = step.programs().dataplane();
    dataplane.set_uplink(Some(IFINDEX_BASE + FREE))?;
    let routes = NetworkRoutes {
        subnets: vec!["10.0.0.0/24".parse()?, "fd00::/64".parse()?],
        service_subnets: Vec::new(),
        egress: RouteEgress::Masquerade { host_access: false },
    };
    dataplane.set_routes(NetworkId::try_from(DEFAULT)?, &routes)?;
    let source = EgressSource {
        ipv4: Some(NODE4),
        ipv6: Some(NODE6),
        first: 50_000,
        last: 50_999,
        shared_v4: false,
        shared_v6: false,
    };
    dataplane.set_masquerade(EndpointId(DEFAULT_A), &EgressRow::From(source))?;
    let pod = Endpoint {
        host_access: false,
        ..endpoint(DEFAULT_A)
    };
    step.publish(DEFAULT_A, &pod)
}

/// The first packet behind a change of policy may be the answer. The policy is about the port of the peer, whichever
/// direction is evaluated.
#[test]
fn a_reply_behind_a_change_is_evaluated_by_the_port_that_was_asked() -> Result<()> {
    const SET: u32 = 20;
    const NOTHING: u32 = 21;
    const PORTS: u32 = 9;
    require!(root, netns, bpf, ip);
    Lockstep::inside("answers-outside", 4096, |step| {
        masquerade(step)?;
        let allowed = PortRow {
            protocol: Some(17),
            port: (53, 16),
            ordinal: 0,
            allow: true,
        };
        step.set_ports(PORTS, &[allowed])?;
        step.allow(SET, ANYBODY, Asked::Egress, Allowed::Ports(PORTS), 1)?;
        step.allow(SET, ANYBODY, Asked::External, Allowed::Everything, 1)?;
        for (own, (peer, node)) in [IpAddr::from(A4), A6.into()].into_iter().zip(FAMILIES) {
            select(step, DEFAULT_A, SET)?;
            let question = Ip::new(own, peer).packet(&Payload::udp(4000, 53, b"question"));
            let left = step
                .programs()
                .run_as(Seen::from_pod(DEFAULT_A), &from(DEFAULT_A).frame(&question), 0)?;
            ensure!(left.action == action_of(Verdict::Redirected), "{own}: {}", left.action);
            let at = 14 + if own.is_ipv4() { 20 } else { 40 };
            let port = u16::from_be_bytes([left.frame[at], left.frame[at + 1]]);
            let answer = Ip::new(peer, node).packet(&Payload::udp(53, port, b"answer"));
            select(step, DEFAULT_A, SET)?;
            let ran = arrives(step, &answer)?;
            let is_delivered =
                ran.action == action_of(Verdict::Redirected) && ran.frame[..6] == endpoint(DEFAULT_A).mac;
            ensure!(is_delivered, "{own}: the answer behind a change: {}", ran.action);
            select(step, DEFAULT_A, NOTHING)?;
            let ran = arrives(step, &answer)?;
            ensure!(
                ran.action == action_of(Verdict::PolicyEgress),
                "{own}: the answer behind a denial: {}",
                ran.action
            );
        }
        Ok(())
    })
}

/// Both translations at once: the backend for the virtual address, and the node's address and a port of its range for
/// the pod's. The reply is translated back by both.
#[test]
fn a_service_leads_a_masqueraded_flow_to_a_backend_outside_and_back_in_both_families() -> Result<()> {
    /// Makes a payload from its ports.
    type Make<'a> = &'a dyn Fn(u16, u16) -> Payload;
    const BACK: u16 = 8080;
    require!(root, netns, bpf, ip);
    Lockstep::inside("services-outside", 4096, |step| {
        masquerade(step)?;
        for (own, (peer, node)) in [IpAddr::from(A4), A6.into()].into_iter().zip(FAMILIES) {
            let virt = virtual_like(peer);
            for (id, protocol) in [(1, 17), (2, 6)] {
                step.serve((DEFAULT, virt, protocol, 80), &service(id, &[(peer, BACK)]))?;
            }
            let udp = |from, to| Payload::udp(from, to, b"some data");
            let tcp = |flags| move |from, to| Payload::tcp(from, to, flags);
            let kinds: [(&str, Make<'_>, Make<'_>); 2] = [
                ("UDP", &udp, &udp),
                ("TCP", &tcp(TcpFlags::SYN), &tcp(TcpFlags::SYN_ACK)),
            ];
            for (what, asks, answers) in kinds {
                let question = from(DEFAULT_A).frame(&Ip::new(own, virt).packet(&asks(4000, 80)));
                let mut ports = Vec::new();
                // A repeated SYN begins the connection anew, from another port.
                let rounds: &[&str] = if what == "TCP" { &["first"] } else { &["first", "known"] };
                for round in rounds {
                    let left = step.programs().run_as(Seen::from_pod(DEFAULT_A), &question, 0)?;
                    let redirected = left.action == action_of(Verdict::Redirected);
                    ensure!(redirected, "{what} of {own}, {round}: action {}", left.action);
                    let port = source_port(&left.frame, own);
                    ensure!(
                        (50_000..51_000).contains(&port),
                        "{what} of {own}, {round}: port {port}"
                    );
                    carries(&left.frame, (node, peer), &asks(port, BACK))
                        .with_context(|| format!("{what} of {own}, {round}: {}", hex(&left.frame)))?;
                    ports.push(port);
                }
                ports.dedup();
                ensure!(ports.len() == 1, "{what} of {own} leaves from two ports: {ports:?}");
                let ran = arrives(step, &Ip::new(peer, node).packet(&answers(BACK, ports[0])))?;
                let delivered =
                    ran.action == action_of(Verdict::Redirected) && ran.frame[..6] == endpoint(DEFAULT_A).mac;
                ensure!(delivered, "{what}: the answer to {own}: action {}", ran.action);
                carries(&ran.frame, (virt, own), &answers(80, 4000))
                    .with_context(|| format!("{what}: the answer to {own}: {}", hex(&ran.frame)))?;
            }
        }
        Ok(())
    })
}

/// The source port of a frame with a packet of the family of `like`, without options.
fn source_port(frame: &[u8], like: IpAddr) -> u16 {
    let at = 14 + if like.is_ipv4() { 20 } else { 40 };
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

/// Whether the frame has exactly this packet, checksums included, whatever its hop limit.
fn carries(frame: &[u8], (source, destination): (IpAddr, IpAddr), payload: &Payload) -> Result<()> {
    let hops = frame[14 + if source.is_ipv4() { 8 } else { 7 }];
    let expected = Ip::new(source, destination).hop_limit(hops).packet(payload);
    ensure!(frame[14..] == expected, "expected {}", hex(&expected));
    Ok(())
}

/// A flow from outside goes past the policy while nothing has changed; what is known of its peer may.
#[test]
fn another_identity_of_a_peer_outside_reaches_its_established_flows() -> Result<()> {
    const SET: u32 = 20;
    const FRIEND: u32 = 5;
    require!(root, netns, bpf, ip);
    inside("identities-outside", |step| {
        step.allow(SET, FRIEND, Asked::Ingress, Allowed::Everything, 1)?;
        select(step, DEFAULT_A, SET)?;
        for (peer, node) in FAMILIES {
            let packet = Ip::new(peer, node).packet(&Payload::udp(4000, OPEN, b"data"));
            step.identify(DEFAULT, peer.into(), FRIEND)?;
            for what in ["first", "known"] {
                let ran = arrives(step, &packet)?;
                let expected = action_of(Verdict::Redirected);
                ensure!(ran.action == expected, "{what} of {peer}, a friend: {}", ran.action);
            }
            step.identify(DEFAULT, peer.into(), FRIEND + 1)?;
            let ran = arrives(step, &packet)?;
            let expected = action_of(Verdict::PolicyIngress);
            ensure!(ran.action == expected, "from {peer}, a stranger: {}", ran.action);
        }
        Ok(())
    })
}

/// Whether the frame is the error about the packet: back to its sender, from the address it was sent to.
fn expired(frame: &[u8], packet: &[u8], (peer, node): (IpAddr, IpAddr)) -> Result<()> {
    let there = link().frame(&[]);
    ensure!(frame[..6] == there[6..12] && frame[6..12] == there[..6], "another link");
    let ip = &frame[14..];
    let (header, told) = if peer.is_ipv4() { (20, [11, 0]) } else { (40, [3, 0]) };
    let addresses = |at: usize, length: usize| (&ip[at..at + length], &ip[at + length..at + 2 * length]);
    let (ends, protocol) = match (peer, node) {
        (IpAddr::V4(peer), IpAddr::V4(node)) => {
            ensure!(checksum(&[&ip[..20]]) == 0, "the checksum of the header");
            (addresses(12, 4) == (&node.octets(), &peer.octets()), ip[9])
        }
        (IpAddr::V6(peer), IpAddr::V6(node)) => (addresses(8, 16) == (&node.octets(), &peer.octets()), ip[6]),
        _ => (false, 0),
    };
    ensure!(ends && [1, 58].contains(&protocol), "another packet");
    ensure!(ip[header..header + 2] == told, "another error");
    let quoted = &ip[header + 8..];
    // The header of the transport without options, where its checksum is behind the first eight bytes.
    let protocol = packet[if peer.is_ipv4() { 9 } else { 6 }];
    let transport = if protocol == 6 { 20 } else { 8 };
    ensure!(quoted == &packet[..header + transport], "another quote");
    let sum = if peer.is_ipv4() {
        checksum(&[&ip[header..]])
    } else {
        let length = u32::try_from(ip.len() - 40)?.to_be_bytes();
        checksum(&[&ip[8..40], &length, &[0, 0, 0, 58], &ip[40..]])
    };
    ensure!(sum == 0, "the checksum of the error");
    Ok(())
}
