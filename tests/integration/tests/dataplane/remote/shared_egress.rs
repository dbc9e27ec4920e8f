//! Tests an egress address that pods of several nodes leave with: at a node with such pods, and at the node that
//! answers for the address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction::{FromOverlay, FromPod, FromUplink},
    Verdict,
    uplink::ports_of,
};
use kni_dataplane::{
    Answering, EgressRow, EgressShares, EgressSource, FabricRows, Hop, NetworkRoutes, RouteEgress, TunnelEnds, Way,
};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    programs::hex,
    require,
};
use kni_model::{EndpointId, NetworkId};
use nix::net::if_::if_nametoindex;

use super::scene::{
    A, BLUE, LOCAL, MTU, NODE, OTHER, OWN, REMOTE, Scene, THEIRS, UNUSED, VXLAN_PORT, inside, own_underlay, underlay,
};

/// Egress addresses, one of each family, and an external host behind the uplink.
const EGRESS: [&str; 2] = ["198.51.100.25", "2001:db8:100::25"];
const SERVER: [&str; 2] = ["203.0.113.80", "2001:db8:203::80"];
/// The units of this node, of [`NODE`] and of [`OTHER`].
const OURS: u8 = 5;
const NODES: u8 = 6;
const OTHERS: u8 = 63;
/// The unit of a node to which no way is known.
const LOST: u8 = 7;
/// In place of the id of a network: the virtual network of egress addresses.
const EGRESS_NETWORK: u32 = 0;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn way(node: u32, v4: bool) -> Way {
    Way {
        underlay: underlay(node, v4),
        overlay: true,
    }
}

/// Makes known who answers for both addresses: a node, or this one, over IPv4 or IPv6.
fn answering(scene: &Scene<'_>, node: Option<u32>, over_v4: bool) -> Result<()> {
    let hop = Hop {
        ifindex: Some(if_nametoindex("overlay0")?),
        mtu: MTU,
        stamp: 1,
    };
    let shares = EgressShares {
        answering: node.map_or(Answering::Here, |node| Answering::There(way(node, over_v4))),
        unit: Some(OURS),
        others: [
            (NODES, Some(way(NODE, over_v4))),
            (OTHERS, Some(way(OTHER, over_v4))),
            (LOST, None),
        ]
        .into(),
    };
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (own_underlay(true), own_underlay(false)) else {
        unreachable!("one address of each family")
    };
    scene.dataplane().set_fabric(&FabricRows {
        tunnel: Some(TunnelEnds {
            ipv4: Some(ipv4),
            ipv6: Some(ipv6),
            port: VXLAN_PORT,
            host_network: None,
        }),
        ways: [NODE, OTHER].map(|node| (way(node, over_v4), hop)).into(),
        networks: BTreeMap::new(),
        egress: EGRESS.map(|address| (ip(address), shares.clone())).into(),
    })?;
    Ok(())
}

/// Lets [`A`] leave with the egress addresses, which are on the uplink if `held`.
fn prepare(scene: &Scene<'_>, held: bool) -> Result<()> {
    let dataplane = scene.dataplane();
    dataplane.set_uplink(Some(if_nametoindex("uplink0")?))?;
    let routes = NetworkRoutes {
        subnets: vec!["10.0.0.0/16".parse()?, "fd00::/48".parse()?],
        service_subnets: Vec::new(),
        egress: RouteEgress::Masquerade { host_access: false },
    };
    dataplane.set_routes(NetworkId::try_from(BLUE)?, &routes)?;
    let [IpAddr::V4(ipv4), IpAddr::V6(ipv6)] = EGRESS.map(ip) else {
        unreachable!("one address of each family")
    };
    let source = EgressSource {
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        first: 1024,
        last: u16::MAX,
        shared_v4: true,
        shared_v6: true,
    };
    dataplane.set_masquerade(EndpointId(A), &EgressRow::From(source))?;
    let held = if held { EGRESS.map(ip).into() } else { BTreeSet::new() };
    Ok(dataplane.set_held_addresses(&held)?)
}

/// Each family of addresses over each family of nodes.
fn each(
    scene: &mut Scene<'_>,
    answers: Option<u32>,
    mut check: impl FnMut(&Scene<'_>, usize, bool) -> Result<()>,
) -> Result<()> {
    for over_v4 in [true, false] {
        for family in [0, 1] {
            scene.flush()?;
            answering(scene, answers, over_v4)?;
            check(scene, family, over_v4)
                .with_context(|| format!("{} over {}", EGRESS[family], underlay(NODE, over_v4)))?;
            scene.quiet()?;
        }
    }
    Ok(())
}

/// Offset of the transport header.
const fn transport(family: usize) -> usize {
    if family == 0 { 20 } else { 40 }
}

fn port_at(packet: &[u8], at: usize) -> Result<u16> {
    let bytes = packet.get(at..at + 2).context("a port")?;
    Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// [`A`] sends a segment to the server; it comes through the tunnel to the node, with a port of this node's unit, which
/// is returned.
fn leaves(scene: &Scene<'_>, family: usize, node: IpAddr, own: u16, flags: TcpFlags) -> Result<u16> {
    let packet = Ip::new(LOCAL[family], ip(SERVER[family])).packet(&Payload::tcp(own, THEIRS, flags));
    scene.send(A, &packet)?;
    let found = scene.tunnelled(node)?;
    let port = port_at(&found.packet, transport(family))?;
    let (first, last) = ports_of(OURS);
    ensure!((first..=last).contains(&port), "port {port}");
    let expected = Ip::new(ip(EGRESS[family]), ip(SERVER[family]))
        .hop_limit(63)
        .packet(&Payload::tcp(port, THEIRS, flags));
    ensure!(
        found.network == EGRESS_NETWORK && found.packet == expected,
        "{}, expected {}",
        hex(&found.packet),
        hex(&expected)
    );
    Ok(port)
}

/// The server's segment to a port of the egress address.
fn reply(family: usize, port: u16, flags: TcpFlags) -> Vec<u8> {
    Ip::new(ip(SERVER[family]), ip(EGRESS[family])).packet(&Payload::tcp(THEIRS, port, flags))
}

/// A node sends the server's segment to a port, and [`A`] receives it.
fn returns(scene: &Scene<'_>, family: usize, node: IpAddr, port: u16, flags: TcpFlags) -> Result<()> {
    scene.tunnel(node, EGRESS_NETWORK, &reply(family, port, flags))?;
    let translated = Ip::new(ip(SERVER[family]), LOCAL[family]).hop_limit(63);
    scene.received(A, &translated.packet(&Payload::tcp(THEIRS, OWN, flags)))
}

#[test]
fn packets_leave_by_the_node_that_answers_and_return_from_it_alone() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-away", |scene| {
        prepare(scene, false)?;
        each(scene, Some(NODE), |scene, family, over_v4| {
            let (node, other) = (underlay(NODE, over_v4), underlay(OTHER, over_v4));
            let port = leaves(scene, family, node, OWN, TcpFlags::SYN)?;
            returns(scene, family, node, port, TcpFlags::SYN_ACK)?;
            ensure!(leaves(scene, family, node, OWN, TcpFlags::ACK)? == port);
            returns(scene, family, node, port, TcpFlags::ACK)?;
            let back = |port| reply(family, port, TcpFlags::ACK);
            scene.dropped("from another node", FromOverlay, Verdict::ForeignNode, || {
                scene.tunnel(other, EGRESS_NETWORK, &back(port))
            })?;
            let (first, last) = ports_of(OURS);
            let unused = if port == first { last } else { first };
            scene.dropped("a port without a flow", FromOverlay, Verdict::NoFlow, || {
                scene.tunnel(node, EGRESS_NETWORK, &back(unused))
            })?;
            scene.dropped("an unknown connection", FromOverlay, Verdict::NoFlow, || {
                scene.tunnel(node, EGRESS_NETWORK, &reply(family, port, TcpFlags::SYN))
            })?;
            let (foreign, _) = ports_of(NODES);
            scene.dropped("a port of another node", FromOverlay, Verdict::EgressAddress, || {
                scene.tunnel(node, EGRESS_NETWORK, &back(foreign))
            })?;
            scene.dropped("in the pod's network", FromOverlay, Verdict::UnknownNetwork, || {
                scene.tunnel(node, 77, &back(port))
            })?;
            let forged = Ip::new(ip(EGRESS[family]), ip(SERVER[family]));
            scene.dropped("forged by the pod", FromPod, Verdict::SourceAddress, || {
                scene.send(A, &forged.packet(&Payload::tcp(port, THEIRS, TcpFlags::ACK)))
            })
        })
    })
}

#[test]
fn a_connection_goes_on_by_the_next_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-moves", |scene| {
        prepare(scene, false)?;
        each(scene, Some(NODE), |scene, family, over_v4| {
            let (node, other) = (underlay(NODE, over_v4), underlay(OTHER, over_v4));
            let port = leaves(scene, family, node, OWN, TcpFlags::SYN)?;
            returns(scene, family, node, port, TcpFlags::SYN_ACK)?;
            answering(scene, Some(OTHER), over_v4)?;
            ensure!(leaves(scene, family, other, OWN, TcpFlags::ACK)? == port);
            returns(scene, family, other, port, TcpFlags::ACK)?;
            scene.dropped("the former one", FromOverlay, Verdict::ForeignNode, || {
                scene.tunnel(node, EGRESS_NETWORK, &reply(family, port, TcpFlags::ACK))
            })?;
            // This node is to answer, and does not have the address yet.
            answering(scene, None, over_v4)?;
            let segment = Ip::new(LOCAL[family], ip(SERVER[family]));
            scene.dropped("no node answers", FromPod, Verdict::EgressAddress, || {
                scene.send(A, &segment.packet(&Payload::tcp(OWN, THEIRS, TcpFlags::ACK)))
            })?;
            answering(scene, Some(NODE), over_v4)?;
            ensure!(leaves(scene, family, node, OWN, TcpFlags::ACK)? == port);
            Ok(())
        })
    })
}

/// Every connection to one server has a port of its own, until the unit is full.
#[test]
fn a_full_unit_is_refused_and_takes_no_port_of_others() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-full", |scene| {
        prepare(scene, false)?;
        answering(scene, Some(NODE), true)?;
        let node = underlay(NODE, true);
        let mut ports = BTreeSet::new();
        let count = || -> Result<u64> {
            let drops = scene.dataplane().drops()?;
            let full = drops.iter().filter(|drop| drop.reason == Verdict::MasqueradePorts);
            Ok(full.map(|drop| drop.count.packets).sum())
        };
        for own in 10_000..12_000 {
            let datagram = Ip::new(LOCAL[0], ip(SERVER[0])).packet(&Payload::udp(own, THEIRS, b"x"));
            scene.send_unexplained(A, &datagram)?;
            if count()? > 0 {
                break;
            }
            let port = port_at(&scene.tunnelled(node)?.packet, transport(0))?;
            let (first, last) = ports_of(OURS);
            ensure!(
                (first..=last).contains(&port) && ports.insert(port),
                "port {port} again"
            );
        }
        // 32 ports are tried for a flow: with 600 of 1024 in use, one flow in 27 million finds none that is free.
        ensure!(count()? == 1 && ports.len() > 600, "{} ports", ports.len());
        Ok(())
    })
}

/// Expects a packet on the wire of the uplink.
fn on_wire(scene: &Scene<'_>, packet: &[u8]) -> Result<()> {
    let found = scene.on_fabric(|found| found == packet);
    found.map(drop).with_context(|| hex(packet))
}

/// A claim goes before the address, or the address before the claim.
fn what_no_claim_explains_is_dropped(scene: &Scene<'_>) -> Result<()> {
    // The claim is gone, and the uplink still has the addresses.
    scene.dataplane().set_fabric(&FabricRows::default())?;
    for family in [0, 1] {
        for port in [ports_of(NODES).0, ports_of(40).0] {
            scene.dropped("an address without a claim", FromUplink, Verdict::NoNode, || {
                scene.send_outside(&reply(family, port, TcpFlags::ACK))
            })?;
        }
    }
    scene.dataplane().set_held_addresses(&BTreeSet::new())?;
    let packet = Ip::new(ip(EGRESS[0]), ip(SERVER[0]));
    let packet = packet.packet(&Payload::tcp(ports_of(NODES).0, THEIRS, TcpFlags::ACK));
    answering(scene, None, true)?;
    scene.dropped("not on the uplink", FromOverlay, Verdict::EgressAddress, || {
        scene.tunnel(underlay(NODE, true), EGRESS_NETWORK, &packet)
    })
}

#[test]
fn the_node_that_answers_forwards_without_a_flow() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-here", |scene| {
        prepare(scene, true)?;
        each(scene, None, |scene, family, over_v4| {
            let (node, other) = (underlay(NODE, over_v4), underlay(OTHER, over_v4));
            let (port, last) = ports_of(NODES);
            let to_server = Ip::new(ip(EGRESS[family]), ip(SERVER[family]));
            let segment = |port| Payload::tcp(port, THEIRS, TcpFlags::ACK);
            for port in [port, last] {
                scene.tunnel(node, EGRESS_NETWORK, &to_server.packet(&segment(port)))?;
                on_wire(scene, &to_server.clone().hop_limit(63).packet(&segment(port)))?;
                let back = reply(family, port, TcpFlags::ACK);
                scene.send_outside(&back)?;
                let found = scene.tunnelled(node)?;
                ensure!(found.network == EGRESS_NETWORK && found.packet == back, "{found:?}");
            }
            ensure!(scene.flows() == 0, "{} rows of flows", scene.flows());
            let of_other = ports_of(OTHERS).0;
            for (what, from, port, reason) in [
                ("another node's unit", other, port, Verdict::ForeignNode),
                ("another node's unit", node, of_other, Verdict::ForeignNode),
                ("this node's own unit", node, ports_of(OURS).0, Verdict::EgressAddress),
                ("the unit of a lost node", node, ports_of(LOST).0, Verdict::ForeignNode),
                ("no node's unit", node, ports_of(40).0, Verdict::EgressAddress),
                ("no unit", node, 80, Verdict::EgressAddress),
            ] {
                scene.dropped(what, FromOverlay, reason, || {
                    scene.tunnel(from, EGRESS_NETWORK, &to_server.packet(&segment(port)))
                })?;
            }
            let tunnel = Payload::udp(port, VXLAN_PORT, b"forged");
            scene.dropped("a forged tunnel", FromOverlay, Verdict::OverlayPort, || {
                scene.tunnel(node, EGRESS_NETWORK, &to_server.packet(&tunnel))
            })?;
            let last_hop = to_server.clone().hop_limit(1).packet(&segment(port));
            scene.dropped("the last hop", FromOverlay, Verdict::TimeExceeded, || {
                scene.tunnel(node, EGRESS_NETWORK, &last_hop)
            })?;
            let other_source = Ip::new(ip(SERVER[family]), ip(SERVER[family])).packet(&segment(port));
            scene.dropped("no egress address", FromOverlay, Verdict::EgressAddress, || {
                scene.tunnel(node, EGRESS_NETWORK, &other_source)
            })?;
            // The stack would reset the connection.
            scene.dropped("to a lost node", FromUplink, Verdict::NoNode, || {
                scene.send_outside(&reply(family, ports_of(LOST).0, TcpFlags::ACK))
            })?;
            // The stack has what belongs to no other node.
            scene.send_outside(&reply(family, ports_of(40).0, TcpFlags::ACK))?;
            scene.quiet()
        })?;
        what_no_claim_explains_is_dropped(scene)
    })
}

/// What leaves by this node leaves the cluster: pods reach nodes and pods with their own addresses, which policies
/// know.
#[test]
fn nothing_inside_is_reached_with_an_egress_address() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-inside", |scene| {
        prepare(scene, true)?;
        let (port, _) = ports_of(NODES);
        for over_v4 in [true, false] {
            answering(scene, None, over_v4)?;
            scene.route_own()?;
            scene.route(BLUE, NODE, true)?;
            for (family, egress) in EGRESS.into_iter().enumerate() {
                for (what, to) in [
                    ("this node", own_underlay(family == 0)),
                    ("a pod of this node", LOCAL[family]),
                    ("no pod", UNUSED[family]),
                    ("a pod of another node", REMOTE[family]),
                ] {
                    let packet = Ip::new(ip(egress), to).packet(&Payload::tcp(port, THEIRS, TcpFlags::SYN));
                    scene.dropped(what, FromOverlay, Verdict::NoDestination, || {
                        scene.tunnel(underlay(NODE, over_v4), EGRESS_NETWORK, &packet)
                    })?;
                }
            }
        }
        scene.quiet()
    })
}

#[test]
fn fragments_follow_their_first_in_both_directions() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-parts", |scene| {
        prepare(scene, true)?;
        each(scene, None, |scene, family, over_v4| {
            let node = underlay(NODE, over_v4);
            let (port, _) = ports_of(NODES);
            let mut out = Ip::new(ip(EGRESS[family]), ip(SERVER[family]));
            let mut back = Ip::new(ip(SERVER[family]), ip(EGRESS[family]));
            (out.id, back.id) = (77 + u16::from(over_v4), 88 + u16::from(over_v4));
            let parts = |ip: &Ip, from: u16, to: u16| ip.fragments(&Payload::udp(from, to, &[7; 60]), 24);
            let late = &parts(&out, port, THEIRS)[1];
            scene.dropped("before the first", FromOverlay, Verdict::FragmentWithoutFirst, || {
                scene.tunnel(node, EGRESS_NETWORK, late)
            })?;
            let sent = parts(&out, port, THEIRS);
            let wire = parts(&out.clone().hop_limit(63), port, THEIRS);
            for (sent, wire) in sent.iter().zip(&wire) {
                scene.tunnel(node, EGRESS_NETWORK, sent)?;
                on_wire(scene, wire)?;
            }
            for part in parts(&back, THEIRS, port) {
                scene.send_outside(&part)?;
                let found = scene.tunnelled(node)?;
                ensure!(found.packet == part, "{}", hex(&found.packet));
            }
            Ok(())
        })
    })
}

/// An error of a router about a packet, which it quotes.
fn about(family: usize, packet: &[u8]) -> Payload {
    let kind = if family == 0 { 3 } else { 1 };
    let body = [&[0; 4][..], packet.get(..transport(family) + 8).unwrap_or(packet)].concat();
    Payload::Icmp { kind, code: 1, body }
}

#[test]
fn errors_and_echoes_find_the_node_by_the_quoted_port_and_the_identifier() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("egress-icmp", |scene| {
        prepare(scene, true)?;
        each(scene, None, |scene, family, over_v4| {
            let (node, v4) = (underlay(NODE, over_v4), family == 0);
            let (port, _) = ports_of(NODES);
            let (egress, server) = (ip(EGRESS[family]), ip(SERVER[family]));
            let sent = Ip::new(egress, server).packet(&Payload::udp(port, THEIRS, b"x"));
            let error = Ip::new(server, egress).packet(&about(family, &sent));
            scene.send_outside(&error)?;
            let found = scene.tunnelled(node)?;
            ensure!(found.packet == error, "{}", hex(&found.packet));
            // The pod's own error about a reply.
            let got = Ip::new(server, egress).packet(&Payload::udp(THEIRS, port, b"x"));
            let error = Ip::new(egress, server);
            scene.tunnel(node, EGRESS_NETWORK, &error.packet(&about(family, &got)))?;
            on_wire(scene, &error.hop_limit(63).packet(&about(family, &got)))?;
            let echo = Ip::new(egress, server);
            let request = Payload::echo_request(v4, port, 1, b"ping");
            scene.tunnel(node, EGRESS_NETWORK, &echo.packet(&request))?;
            on_wire(scene, &echo.hop_limit(63).packet(&request))?;
            let Payload::Icmp { body, .. } = request else {
                unreachable!("an echo")
            };
            let kind = if v4 { 0 } else { 129 };
            let answer = Ip::new(server, egress).packet(&Payload::Icmp { kind, code: 0, body });
            scene.send_outside(&answer)?;
            let found = scene.tunnelled(node)?;
            ensure!(found.packet == answer, "{}", hex(&found.packet));
            Ok(())
        })
    })
}
