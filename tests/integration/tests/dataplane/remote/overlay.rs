//! Tests the way to other nodes through a tunnel, over IPv4 and over IPv6.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction::{FromOverlay, FromPod},
    Verdict,
    flow::{END_LOCAL, END_REMOTE, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND, FLOW_REPLIED, FlowEnd},
};
use kni_dataplane::{HostPort, host_port_key};
use kni_integration::{
    frames::{ETHERTYPE_ARP, Ip, Link, Payload, TcpFlags, checksum},
    patience,
    programs::hex,
    require,
};
use kni_model::EndpointId;

use super::scene::{
    A, B, BLUE, Ends, FRIEND, LOCAL, MTU, NODE, NOTHING, ONLY_FRIENDS, OTHER, OWN, RED, REMOTE, Row, SECOND, STRANGER,
    Scene, TCP, THEIRS, Tunnelled, UNUSED, VXLAN_PORT, back, families, inside, out, own_underlay, reply, segment,
    underlay,
};

const UDP: u8 = 17;

fn datagram(length: usize) -> Payload {
    Payload::udp(OWN, THEIRS, &vec![b'x'; length])
}

fn row(scene: &Scene<'_>, (local, remote): Ends, protocol: u8) -> Result<Row> {
    let found = scene.flow((local, OWN), (remote, THEIRS), protocol);
    found.with_context(|| format!("no flow of {local} and {remote}"))
}

/// Sends a packet of [`A`] and expects it in the tunnel to the node.
fn goes(scene: &Scene<'_>, node: IpAddr, packet: &[u8]) -> Result<()> {
    scene.send(A, packet)?;
    let found = scene.tunnelled(node)?;
    let expected = Tunnelled {
        from: own_underlay(node.is_ipv4()),
        network: BLUE,
        packet: packet.to_vec(),
    };
    ensure!(found == expected, "{found:?}, expected {expected:?}");
    Ok(())
}

/// Sends a packet of the remote pod and expects it at [`A`].
fn comes(scene: &Scene<'_>, node: IpAddr, packet: &[u8]) -> Result<()> {
    scene.tunnel(node, BLUE, packet)?;
    scene.received(A, packet)
}

/// Each family of pods over each family of nodes.
fn each(scene: &mut Scene<'_>, mut check: impl FnMut(&mut Scene<'_>, Ends, IpAddr) -> Result<()>) -> Result<()> {
    for v4 in [true, false] {
        let node = underlay(NODE, v4);
        for ends in families() {
            scene.flush()?;
            scene.enforce(A, 0)?;
            scene.identify(STRANGER)?;
            scene.lead(NODE, node, true)?;
            check(scene, ends, node).with_context(|| format!("{} and {} by {node}", ends.0, ends.1))?;
            scene.quiet()?;
        }
    }
    Ok(())
}

/// Opens a connection of [`A`] to the remote pod.
fn connect(scene: &Scene<'_>, ends: Ends, node: IpAddr) -> Result<()> {
    goes(scene, node, &out(ends, &segment(TcpFlags::SYN)))?;
    comes(scene, node, &back(ends, &reply(TcpFlags::SYN_ACK)))?;
    goes(scene, node, &out(ends, &segment(TcpFlags::ACK)))
}

#[test]
fn a_pod_connects_to_a_pod_of_another_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-out", |scene| {
        each(scene, |scene, ends, node| {
            let before = scene.forwarded(A, Verdict::Tunnelled)?;
            goes(scene, node, &out(ends, &segment(TcpFlags::SYN)))?;
            let found = row(scene, ends, TCP)?;
            let own = FlowEnd {
                id: A,
                generation: scene.generation(A)?,
            };
            let theirs = FlowEnd {
                id: NODE,
                generation: scene.remote_generation(A, NODE)?,
            };
            ensure!(
                found.local == (END_LOCAL, own) && found.remote == (END_REMOTE, theirs),
                "{found:?}"
            );
            ensure!(found.flags & (FLOW_REPLIED | FLOW_CONFIRMED) == 0, "{found:?}");
            comes(scene, node, &back(ends, &reply(TcpFlags::SYN_ACK)))?;
            ensure!(row(scene, ends, TCP)?.flags & FLOW_REPLIED != 0);
            for _ in 0..3 {
                goes(scene, node, &out(ends, &segment(TcpFlags::ACK)))?;
                comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))?;
            }
            ensure!(row(scene, ends, TCP)?.flags & FLOW_CONFIRMED != 0);
            ensure!(scene.flows() == 1, "{} rows", scene.flows());
            let more = scene.forwarded(A, Verdict::Tunnelled)? - before;
            ensure!(more == 4, "{more} packets were counted as tunnelled");
            Ok(())
        })
    })
}

/// Its replies need no permission to send.
#[test]
fn a_pod_of_another_node_connects_to_a_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-in", |scene| {
        each(scene, |scene, ends, node| {
            comes(scene, node, &back(ends, &reply(TcpFlags::SYN)))?;
            let found = row(scene, ends, TCP)?;
            let theirs = FlowEnd {
                id: NODE,
                generation: scene.remote_generation(A, NODE)?,
            };
            ensure!(
                found.local.0 == END_LOCAL && found.local.1.id == A && found.remote == (END_REMOTE, theirs),
                "{found:?}"
            );
            goes(scene, node, &out(ends, &segment(TcpFlags::SYN_ACK)))?;
            comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))?;
            ensure!(row(scene, ends, TCP)?.flags & FLOW_CONFIRMED != 0);
            goes(scene, node, &out(ends, &segment(TcpFlags::ACK)))
        })
    })
}

#[test]
fn only_the_node_that_has_the_sender_may_send_for_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-forged", |scene| {
        each(scene, |scene, ends, node| {
            goes(scene, node, &out(ends, &segment(TcpFlags::SYN)))?;
            let v4 = node.is_ipv4();
            let family = usize::from(ends.0.is_ipv6());
            let answer = back(ends, &reply(TcpFlags::SYN_ACK));
            let forged = |what: &str, from: IpAddr, network: u32, packet: &[u8], reason: Verdict| {
                scene.dropped(what, FromOverlay, reason, || scene.tunnel(from, network, packet))
            };
            forged("another node", underlay(OTHER, v4), BLUE, &answer, Verdict::ForeignNode)?;
            forged(
                "the other family",
                underlay(NODE, !v4),
                BLUE,
                &answer,
                Verdict::ForeignNode,
            )?;
            // The red network has a pod with the same address, and none of its pods is on that node.
            forged("another network", node, RED, &answer, Verdict::OwnerUnknown)?;
            forged("no network", node, 99, &answer, Verdict::UnknownNetwork)?;
            forged(
                "the network of egress addresses",
                node,
                0,
                &answer,
                Verdict::EgressAddress,
            )?;
            for (what, source) in [("a local pod", SECOND), ("the receiver", LOCAL), ("no pod", UNUSED)] {
                let packet = Ip::new(source[family], ends.0).packet(&datagram(8));
                forged(what, node, BLUE, &packet, Verdict::OwnerUnknown)?;
            }
            let packet = Ip::new(ends.1, UNUSED[family]).packet(&datagram(8));
            forged("to no pod", node, BLUE, &packet, Verdict::NoDestination)?;
            comes(scene, node, &answer)
        })
    })
}

/// Nothing of the tunnel reaches the node's stack.
#[test]
fn what_is_no_packet_for_a_pod_ends_at_the_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-strange", |scene| {
        each(scene, |scene, ends, node| {
            let link = Link::new([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 1, 9]);
            let group: IpAddr = if ends.0.is_ipv4() { "224.0.0.1" } else { "ff02::1" }.parse()?;
            let long = out(ends, &datagram(8));
            for (what, frame, reason) in [
                (
                    "ARP",
                    link.frame_of(ETHERTYPE_ARP, &[0; 28]),
                    Verdict::UnsupportedEthertype,
                ),
                ("LLDP", link.frame_of(0x88cc, &[0; 46]), Verdict::UnsupportedEthertype),
                ("a tag", link.clone().vlan(5).frame(&long), Verdict::VlanTagged),
                ("cut off", link.frame(&long[..long.len() - 1]), Verdict::Truncated),
                (
                    "multicast",
                    link.frame(&Ip::new(ends.1, group).packet(&datagram(8))),
                    Verdict::Multicast,
                ),
                (
                    "the node",
                    link.frame(&Ip::new(ends.1, own_underlay(ends.0.is_ipv4())).packet(&datagram(8))),
                    Verdict::NoDestination,
                ),
            ] {
                scene.dropped(what, FromOverlay, reason, || scene.tunnel_frame(node, BLUE, &frame))?;
            }
            Ok(())
        })
    })
}

#[test]
fn policies_apply_to_pods_of_other_nodes() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-policies", |scene| {
        each(scene, |scene, ends, node| {
            scene.enforce(A, ONLY_FRIENDS)?;
            let (there, here) = (out(ends, &segment(TcpFlags::SYN)), back(ends, &reply(TcpFlags::SYN)));
            scene.dropped("to a stranger", FromPod, Verdict::PolicyEgress, || {
                scene.send(A, &there)
            })?;
            scene.dropped("from a stranger", FromOverlay, Verdict::PolicyIngress, || {
                scene.tunnel(node, BLUE, &here)
            })?;
            ensure!(scene.flows() == 0, "a denied packet opened a flow");
            scene.identify(FRIEND)?;
            goes(scene, node, &there)?;
            scene.flush()?;
            comes(scene, node, &here)
        })
    })
}

/// Sends the packets of a flow both ways, and expects them to arrive or to be dropped.
fn both_ways(scene: &Scene<'_>, ends: Ends, node: IpAddr, reasons: Option<Verdict>) -> Result<()> {
    let (there, here) = (out(ends, &segment(TcpFlags::ACK)), back(ends, &reply(TcpFlags::ACK)));
    let Some(reason) = reasons else {
        goes(scene, node, &there)?;
        return comes(scene, node, &here);
    };
    scene.dropped("to the remote pod", FromPod, reason, || scene.send(A, &there))?;
    scene.dropped("from the remote pod", FromOverlay, reason, || {
        scene.tunnel(node, BLUE, &here)
    })
}

#[test]
fn flows_are_judged_again_when_the_node_changes() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-again", |scene| {
        each(scene, |scene, ends, node| {
            for (local_opens, reason) in [(true, Verdict::PolicyEgress), (false, Verdict::PolicyIngress)] {
                scene.flush()?;
                scene.identify(FRIEND)?;
                scene.enforce(A, ONLY_FRIENDS)?;
                if local_opens {
                    connect(scene, ends, node)?;
                } else {
                    comes(scene, node, &back(ends, &reply(TcpFlags::SYN)))?;
                    goes(scene, node, &out(ends, &segment(TcpFlags::SYN_ACK)))?;
                    comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))?;
                }
                // Nothing shows the flow that its peer is another pod now.
                scene.identify(STRANGER)?;
                both_ways(scene, ends, node, None)?;
                scene.renew(NODE)?;
                both_ways(scene, ends, node, Some(reason))?;
                // The flow is not lost by it, and is renewed by a packet of either side.
                scene.identify(FRIEND)?;
                for first_local in [true, false] {
                    scene.renew(NODE)?;
                    let expected = scene.remote_generation(A, NODE)?;
                    if first_local {
                        goes(scene, node, &out(ends, &segment(TcpFlags::ACK)))?;
                    } else {
                        comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))?;
                    }
                    let found = row(scene, ends, TCP)?;
                    ensure!(found.remote.1.generation == expected, "{found:?}, not {expected}");
                    ensure!(found.flags & FLOW_CONFIRMED != 0, "{found:?}");
                }
                both_ways(scene, ends, node, None)?;
                // So it is when the pod's own policy changes.
                scene.enforce(A, NOTHING)?;
                both_ways(scene, ends, node, Some(reason))?;
            }
            Ok(())
        })
    })
}

/// The flow's row follows: it names the node that has the pod now.
#[test]
fn a_pod_that_moves_to_another_node_is_followed() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-moved", |scene| {
        each(scene, |scene, ends, node| {
            connect(scene, ends, node)?;
            let v4 = node.is_ipv4();
            let there = underlay(OTHER, v4);
            scene.lead(OTHER, there, true)?;
            scene.renew(NODE)?;
            goes(scene, there, &out(ends, &segment(TcpFlags::ACK)))?;
            let found = row(scene, ends, TCP)?;
            ensure!(found.remote.1.id == OTHER, "{found:?}");
            comes(scene, there, &back(ends, &reply(TcpFlags::ACK)))?;
            let late = back(ends, &reply(TcpFlags::ACK));
            scene.dropped("from the former node", FromOverlay, Verdict::ForeignNode, || {
                scene.tunnel(node, BLUE, &late)
            })
        })
    })
}

#[test]
fn a_node_that_is_not_known_gets_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-unknown", |scene| {
        each(scene, |scene, ends, node| {
            connect(scene, ends, node)?;
            scene.remove_node(NODE)?;
            for (what, flags) in [("of a flow", TcpFlags::ACK), ("of a new flow", TcpFlags::SYN)] {
                let packet = out(ends, &segment(flags));
                scene.dropped(what, FromPod, Verdict::NoNode, || scene.send(A, &packet))?;
            }
            let packet = back(ends, &reply(TcpFlags::ACK));
            scene.dropped("from there", FromOverlay, Verdict::OwnerUnknown, || {
                scene.tunnel(node, BLUE, &packet)
            })?;
            // Outside of the table.
            scene.route(BLUE, 1 << 20, true)?;
            let packet = out(ends, &segment(TcpFlags::SYN));
            scene.dropped("no such number", FromPod, Verdict::NoNode, || scene.send(A, &packet))
        })
    })
}

/// Checks the error that a pod receives about its packet, and returns the MTU in it.
fn exceeded(frame: &[u8], packet: &[u8], ends: Ends) -> Result<u32> {
    let shown = || hex(frame);
    let ip = if ends.0.is_ipv4() { 20 } else { 40 };
    let (header, icmp) = frame[14..].split_at_checked(ip).with_context(shown)?;
    let expected = if ends.0.is_ipv4() { [3, 4] } else { [2, 0] };
    ensure!(icmp[..2] == expected, "{}", shown());
    ensure!(icmp[8..8 + ip] == packet[..ip], "it quotes another packet: {}", shown());
    if ends.0.is_ipv4() {
        ensure!(
            checksum(&[header]) == 0 && checksum(&[icmp]) == 0,
            "checksum: {}",
            shown()
        );
    }
    Ok(u32::from_be_bytes([icmp[4], icmp[5], icmp[6], icmp[7]]))
}

#[test]
fn a_packet_that_is_too_big_is_told_to_its_sender() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-mtu", |scene| {
        each(scene, |scene, ends, node| {
            let headers = if ends.0.is_ipv4() { 28 } else { 48 };
            let fits = usize::try_from(MTU)? - headers;
            for flow_exists in [false, true] {
                let packet = out(ends, &datagram(fits + 1));
                scene.send(A, &packet)?;
                let answered = scene.next(A, patience(), |_any| true)?;
                let mtu = exceeded(&answered.context("no answer")?, &packet, ends)?;
                ensure!(mtu == MTU, "the answer says {mtu}");
                scene.quiet()?;
                ensure!(scene.flow((ends.0, OWN), (ends.1, THEIRS), UDP).is_some() == flow_exists);
                goes(scene, node, &out(ends, &datagram(fits)))?;
            }
            Ok(())
        })
    })
}

#[test]
fn fragments_follow_their_first() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-fragments", |scene| {
        each(scene, |scene, ends, node| {
            let there = Ip::new(ends.0, ends.1).fragments(&datagram(60), 24);
            for fragment in &there {
                goes(scene, node, fragment)?;
            }
            let here = Ip::new(ends.1, ends.0).fragments(&Payload::udp(THEIRS, OWN, &[7; 60]), 24);
            for fragment in &here {
                comes(scene, node, fragment)?;
            }
            let mut late = Ip::new(ends.1, ends.0);
            late.id = 0x4321;
            let late = late.fragments(&Payload::udp(THEIRS, OWN, &[7; 60]), 24);
            let later = late.last().context("several fragments")?;
            scene.dropped("without its first", FromOverlay, Verdict::FragmentWithoutFirst, || {
                scene.tunnel(node, BLUE, later)
            })
        })
    })
}

/// Port unreachable about a packet.
fn unreachable((local, remote): Ends, quoted: &[u8]) -> Vec<u8> {
    let (kind, code) = if local.is_ipv4() { (3, 3) } else { (1, 4) };
    let body = [&[0; 4][..], quoted].concat();
    Ip::new(remote, local).packet(&Payload::Icmp { kind, code, body })
}

#[test]
fn errors_follow_the_flow_that_they_are_about() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-errors", |scene| {
        each(scene, |scene, ends, node| {
            let packet = out(ends, &datagram(8));
            let error = unreachable(ends, &packet);
            scene.dropped("about no flow", FromOverlay, Verdict::IcmpUnrelated, || {
                scene.tunnel(node, BLUE, &error)
            })?;
            goes(scene, node, &packet)?;
            comes(scene, node, &error)?;
            let packet = back(ends, &Payload::udp(THEIRS, OWN, b"question"));
            comes(scene, node, &packet)?;
            goes(scene, node, &unreachable((ends.1, ends.0), &packet))
        })
    })
}

/// Packets that leave the flow as it is take the straight path, which reads neither addresses nor routes.
#[test]
fn an_established_flow_is_followed_from_its_node_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-straight", |scene| {
        each(scene, |scene, ends, node| {
            connect(scene, ends, node)?;
            let v4 = node.is_ipv4();
            let here = back(ends, &reply(TcpFlags::ACK));
            for (what, from, network, reason) in [
                ("another node", underlay(OTHER, v4), BLUE, Verdict::ForeignNode),
                ("the other family", underlay(NODE, !v4), BLUE, Verdict::ForeignNode),
                ("another network", node, RED, Verdict::OwnerUnknown),
                ("no network", node, 99, Verdict::UnknownNetwork),
            ] {
                comes(scene, node, &here)?;
                scene.dropped(what, FromOverlay, reason, || scene.tunnel(from, network, &here))?;
            }
            // The flow's end is its node by number: another address there needs another generation, and both are
            // checked.
            scene.lead(NODE, underlay(OTHER, v4), true)?;
            scene.dropped("its former address", FromOverlay, Verdict::ForeignNode, || {
                scene.tunnel(node, BLUE, &here)
            })?;
            comes(scene, underlay(OTHER, v4), &here)?;
            scene.lead(NODE, node, true)?;
            comes(scene, node, &back(ends, &reply(TcpFlags::FIN_ACK)))?;
            let fins = FLOW_FIN_FIRST | FLOW_FIN_SECOND;
            ensure!(
                row(scene, ends, TCP)?.flags & fins != 0,
                "the packet did not change the flow"
            );
            comes(scene, node, &here)
        })
    })
}

#[test]
fn an_established_flow_ends_with_its_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-ended", |scene| {
        let node = underlay(NODE, true);
        let [ends, _] = families();
        scene.lead(NODE, node, true)?;
        connect(scene, ends, node)?;
        let here = back(ends, &reply(TcpFlags::ACK));
        comes(scene, node, &here)?;
        scene.withdraw(A)?;
        scene.dropped("withdrawn", FromOverlay, Verdict::NoDestination, || {
            scene.tunnel(node, BLUE, &here)
        })
    })
}

/// Otherwise the pod would receive what all nodes send to each other.
#[test]
fn a_port_of_a_pod_on_the_node_does_not_take_the_packets_of_the_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-host-port", |scene| {
        each(scene, |scene, ends, node| {
            let address = own_underlay(node.is_ipv4());
            let ports = [UDP, TCP].map(|protocol| {
                let port = HostPort {
                    endpoint: EndpointId(B),
                    port: OWN,
                };
                (host_port_key(address, protocol, VXLAN_PORT), port)
            });
            scene.dataplane().set_host_ports(&ports.into())?;
            connect(scene, ends, node)?;
            comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))?;
            // The port of another protocol is not the tunnel's.
            let segment = Ip::new(node, address).packet(&Payload::tcp(THEIRS, VXLAN_PORT, TcpFlags::SYN));
            scene.send_outside(&segment)?;
            let ports = if node.is_ipv4() { 34..38 } else { 54..58 };
            let expected = [THEIRS.to_be_bytes(), OWN.to_be_bytes()].concat();
            let received = scene.next(B, patience(), |frame| frame.get(ports.clone()) == Some(&expected))?;
            ensure!(received.is_some(), "the segment did not reach the pod");
            scene.dataplane().set_host_ports(&BTreeMap::new())?;
            Ok(())
        })
    })
}

/// A pod's own node delivers to it while the rows say so, whatever its address was before.
#[test]
fn a_pod_that_is_gone_receives_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-gone", |scene| {
        scene.lead(NODE, underlay(NODE, true), true)?;
        let [remote, _] = REMOTE;
        let [second, _] = SECOND;
        let packet = Ip::new(remote, second).packet(&datagram(8));
        scene.tunnel(underlay(NODE, true), BLUE, &packet)?;
        scene.received(B, &packet)?;
        scene.withdraw(B)?;
        scene.dropped("withdrawn", FromOverlay, Verdict::NoDestination, || {
            scene.tunnel(underlay(NODE, true), BLUE, &packet)
        })
    })
}

/// A node is a destination outside of the pod networks, in both directions of a flow.
#[test]
fn egress_to_a_node_that_is_revoked_stays_revoked_whoever_speaks_first() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("overlay-revoked", |scene| {
        each(scene, |scene, (local, _), node| {
            let ends = (local, underlay(NODE, local.is_ipv4()));
            scene.route_node()?;
            scene.identify_at([true, false].map(|v4| underlay(NODE, v4)), FRIEND)?;
            connect(scene, ends, node)?;
            // It allows its friends among pods, and nothing outside.
            scene.enforce(A, ONLY_FRIENDS)?;
            for _ in 0..2 {
                let answer = back(ends, &reply(TcpFlags::ACK));
                scene.dropped("from the node", FromOverlay, Verdict::PolicyExternal, || {
                    scene.tunnel(node, BLUE, &answer)
                })?;
                let packet = out(ends, &segment(TcpFlags::ACK));
                scene.dropped("to the node", FromPod, Verdict::PolicyExternal, || {
                    scene.send(A, &packet)
                })?;
            }
            // What the node opens is no egress of the pod.
            scene.flush()?;
            comes(scene, node, &back(ends, &reply(TcpFlags::SYN)))?;
            goes(scene, node, &out(ends, &segment(TcpFlags::SYN_ACK)))?;
            comes(scene, node, &back(ends, &reply(TcpFlags::ACK)))
        })
    })
}
