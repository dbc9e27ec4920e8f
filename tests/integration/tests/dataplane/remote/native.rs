//! Tests the way to other nodes through the network that the nodes share, with the pods' addresses as they are.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction::{FromPod, FromUplink},
    Verdict,
    flow::{END_LOCAL, END_ROUTED, FLOW_CONFIRMED, FlowEnd},
};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags, checksum},
    patience,
    programs::hex,
    require,
};

use super::scene::{
    A, Ends, FRIEND, LOCAL, MTU, NODE, ONLY_FRIENDS, OTHER, OWN, RED_A, SECOND, STRANGER, Scene, TCP, THEIRS, UNUSED,
    back, families, inside, out, own_underlay, reply, segment, underlay,
};

/// The packet after one more hop.
fn routed(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet[0] >> 4 == 6 {
        packet[7] -= 1;
        return packet;
    }
    packet[8] -= 1;
    packet[10..12].fill(0);
    let header = usize::from(packet[0] & 15) * 4;
    let sum = checksum(&[&packet[..header]]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// Sends a packet of [`A`] and expects it on the fabric, for the host there.
fn goes(scene: &Scene<'_>, packet: &[u8]) -> Result<()> {
    scene.send(A, packet)?;
    let expected = routed(packet);
    let frame = scene.on_fabric(|found| found == expected)?;
    let host = Scene::mac_of(scene.host(), "fabric0")?;
    ensure!(frame[..6] == host, "it went to another host: {}", hex(&frame));
    Ok(())
}

/// Sends a packet of the remote pod to the uplink and expects it at [`A`].
fn comes(scene: &Scene<'_>, packet: &[u8]) -> Result<()> {
    scene.send_outside(packet)?;
    scene.received(A, packet)
}

/// Both families. A node has a row for each, because a next hop has the family of the packets.
fn each(scene: &mut Scene<'_>, mut check: impl FnMut(&mut Scene<'_>, Ends) -> Result<()>) -> Result<()> {
    for ends in families() {
        scene.flush()?;
        scene.enforce(A, 0)?;
        scene.identify(STRANGER)?;
        scene.expose(A, LOCAL)?;
        scene.lead(NODE, underlay(NODE, ends.0.is_ipv4()), false)?;
        check(scene, ends).with_context(|| format!("{} and {}", ends.0, ends.1))?;
    }
    Ok(())
}

#[test]
fn a_pod_and_a_pod_of_another_node_exchange_packets_without_a_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native", |scene| {
        each(scene, |scene, ends| {
            for local_opens in [true, false] {
                scene.flush()?;
                if local_opens {
                    goes(scene, &out(ends, &segment(TcpFlags::SYN)))?;
                } else {
                    comes(scene, &back(ends, &reply(TcpFlags::SYN)))?;
                }
                let found = scene.flow((ends.0, OWN), (ends.1, THEIRS), TCP).context("no flow")?;
                let theirs = FlowEnd {
                    id: NODE,
                    generation: scene.remote_generation(A, NODE)?,
                };
                ensure!(
                    found.local.0 == END_LOCAL && found.local.1.id == A && found.remote == (END_ROUTED, theirs),
                    "{found:?}"
                );
                if local_opens {
                    comes(scene, &back(ends, &reply(TcpFlags::SYN_ACK)))?;
                    goes(scene, &out(ends, &segment(TcpFlags::ACK)))?;
                    comes(scene, &back(ends, &reply(TcpFlags::ACK)))?;
                } else {
                    goes(scene, &out(ends, &segment(TcpFlags::SYN_ACK)))?;
                    comes(scene, &back(ends, &reply(TcpFlags::ACK)))?;
                    goes(scene, &out(ends, &segment(TcpFlags::ACK)))?;
                }
                let found = scene.flow((ends.0, OWN), (ends.1, THEIRS), TCP).context("no flow")?;
                ensure!(found.flags & FLOW_CONFIRMED != 0, "{found:?}");
            }
            ensure!(
                scene.forwarded(A, Verdict::Routed)? > 0,
                "no packet was counted as routed"
            );
            Ok(())
        })
    })
}

#[test]
fn only_pods_of_the_network_beyond_that_interface_come_in() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-forged", |scene| {
        each(scene, |scene, ends| {
            let family = usize::from(ends.0.is_ipv6());
            let refused = |scene: &Scene<'_>, what: &str, source: IpAddr, reason: Verdict| {
                let packet = Ip::new(source, ends.0).packet(&Payload::udp(THEIRS, OWN, b"forged"));
                scene.dropped(what, FromUplink, reason, || scene.send_outside(&packet))
            };
            refused(scene, "a local pod", SECOND[family], Verdict::OwnerUnknown)?;
            refused(scene, "the receiver", ends.0, Verdict::OwnerUnknown)?;
            refused(scene, "no pod", UNUSED[family], Verdict::OwnerUnknown)?;
            let dropped =
                |scene: &Scene<'_>, what: &str, source: IpAddr| refused(scene, what, source, Verdict::ForeignNode);
            // A pod that is reached through the tunnel does not come without it, and the reverse.
            let node = underlay(NODE, ends.0.is_ipv4());
            scene.lead(NODE, node, true)?;
            dropped(scene, "a pod behind the tunnel", ends.1)?;
            scene.route(super::scene::BLUE, NODE, false)?;
            dropped(scene, "by another interface", ends.1)?;
            scene.remove_node(NODE)?;
            dropped(scene, "of no node", ends.1)?;
            // The node's stack gets what was never for a pod: another host, and an address that is not exposed.
            scene.lead(NODE, node, false)?;
            for (source, destination) in [(underlay(OTHER, ends.0.is_ipv4()), ends.0), (ends.1, SECOND[family])] {
                let packet = Ip::new(source, destination).packet(&Payload::udp(THEIRS, OWN, b"other"));
                scene.send_outside(&packet)?;
                comes(scene, &back(ends, &Payload::udp(THEIRS, OWN, b"behind it")))?;
                for id in [A, super::scene::B, RED_A] {
                    let received = scene.next(id, Duration::from_millis(20), |_any| true)?;
                    ensure!(received.is_none(), "pod {id} received {source} to {destination}");
                }
            }
            Ok(())
        })
    })
}

#[test]
fn policies_and_changes_apply_without_a_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-policies", |scene| {
        each(scene, |scene, ends| {
            scene.enforce(A, ONLY_FRIENDS)?;
            let (there, here) = (out(ends, &segment(TcpFlags::SYN)), back(ends, &reply(TcpFlags::SYN)));
            scene.dropped("to a stranger", FromPod, Verdict::PolicyEgress, || {
                scene.send(A, &there)
            })?;
            scene.dropped("from a stranger", FromUplink, Verdict::PolicyIngress, || {
                scene.send_outside(&here)
            })?;
            scene.identify(FRIEND)?;
            goes(scene, &there)?;
            comes(scene, &back(ends, &reply(TcpFlags::SYN_ACK)))?;
            goes(scene, &out(ends, &segment(TcpFlags::ACK)))?;
            scene.identify(STRANGER)?;
            goes(scene, &out(ends, &segment(TcpFlags::ACK)))?;
            scene.renew(NODE)?;
            let packet = out(ends, &segment(TcpFlags::ACK));
            scene.dropped("to a new stranger", FromPod, Verdict::PolicyEgress, || {
                scene.send(A, &packet)
            })?;
            let packet = back(ends, &reply(TcpFlags::ACK));
            scene.dropped("from a new stranger", FromUplink, Verdict::PolicyEgress, || {
                scene.send_outside(&packet)
            })?;
            scene.identify(FRIEND)?;
            comes(scene, &packet)?;
            goes(scene, &out(ends, &segment(TcpFlags::ACK)))
        })
    })
}

#[test]
fn the_node_answers_as_a_router_does() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-router", |scene| {
        each(scene, |scene, ends| {
            let v4 = ends.0.is_ipv4();
            let headers = if v4 { 20 } else { 40 };
            let last_hop = Ip::new(ends.0, ends.1).hop_limit(1).packet(&segment(TcpFlags::SYN));
            let long = out(
                ends,
                &Payload::udp(OWN, THEIRS, &vec![7; usize::try_from(MTU)? - headers - 7]),
            );
            for (packet, expected) in [
                (last_hop, if v4 { [11, 0] } else { [3, 0] }),
                (long.clone(), if v4 { [3, 4] } else { [2, 0] }),
            ] {
                scene.send(A, &packet)?;
                let answer = scene.next(A, patience(), |_any| true)?.context("no answer")?;
                let icmp = &answer[14 + headers..];
                ensure!(icmp[..2] == expected, "{}", hex(&answer));
                ensure!(icmp[8..8 + headers] == packet[..headers], "{}", hex(&answer));
                if expected[1] == 4 || expected[0] == 2 {
                    ensure!(icmp[4..8] == MTU.to_be_bytes(), "{}", hex(&answer));
                }
            }
            ensure!(scene.flows() == 0, "a packet that went no further opened a flow");
            goes(
                scene,
                &out(
                    ends,
                    &Payload::udp(OWN, THEIRS, &vec![7; usize::try_from(MTU)? - headers - 8]),
                ),
            )
        })
    })
}

/// An error of a router about a packet.
fn error(router: IpAddr, receiver: IpAddr, quoted: &[u8], [kind, code]: [u8; 2]) -> Vec<u8> {
    let body = [&MTU.to_be_bytes()[..], quoted].concat();
    Ip::new(router, receiver).packet(&Payload::Icmp { kind, code, body })
}

/// What a router reports to senders: that a packet was too big, and that it was on its last hop.
fn reported(v4: bool) -> [[u8; 2]; 2] {
    if v4 { [[3, 4], [11, 0]] } else { [[2, 0], [3, 0]] }
}

/// Addresses of routers: one of no network that the node knows, one that leads nowhere, and that of another node.
fn routers(v4: bool) -> [IpAddr; 3] {
    let foreign = if v4 { "203.0.113.9" } else { "2001:db8:ffff::9" };
    let foreign = foreign.parse().expect("an address");
    [foreign, UNUSED[usize::from(!v4)], underlay(OTHER, v4)]
}

#[test]
fn routers_between_the_nodes_tell_pods_about_their_packets() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-routers", |scene| {
        each(scene, |scene, ends| {
            for (number, local_opens) in [true, false].into_iter().enumerate() {
                scene.flush()?;
                let port = OWN + u16::try_from(number)?;
                let datagram = Payload::udp(port, THEIRS, b"a packet");
                if !local_opens {
                    comes(scene, &back(ends, &Payload::udp(THEIRS, port, b"question")))?;
                }
                goes(scene, &out(ends, &datagram))?;
                let quoted = routed(&out(ends, &datagram));
                for router in routers(ends.0.is_ipv4()) {
                    for kind in reported(ends.0.is_ipv4()) {
                        comes(scene, &error(router, ends.0, &quoted, kind)).with_context(|| router.to_string())?;
                    }
                }
                // As those of the other pod do.
                comes(scene, &error(ends.1, ends.0, &quoted, reported(ends.0.is_ipv4())[1]))?;
            }
            Ok(())
        })
    })
}

/// The node's stack, which routes nothing to these pods, gets them, as without pods.
#[test]
fn errors_about_no_current_flow_reach_no_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-unrelated", |scene| {
        each(scene, |scene, ends| {
            let v4 = ends.0.is_ipv4();
            let family = usize::from(!v4);
            let [kind, _] = reported(v4);
            let [router, ..] = routers(v4);
            let mark = Payload::udp(THEIRS, OWN, b"behind it");
            let nothing = |scene: &Scene<'_>, what: &str, packet: &[u8]| -> Result<()> {
                scene.send_outside(packet)?;
                let mark = back(ends, &mark);
                scene.send_outside(&mark)?;
                let next = scene.next(A, patience(), |_any| true)?;
                let next = next.with_context(|| format!("{what}: nothing came behind it"))?;
                ensure!(next[14..] == mark, "{what}: the pod received {}", hex(&next));
                for id in [super::scene::B, RED_A] {
                    let received = scene.next(id, Duration::from_millis(20), |_any| true)?;
                    ensure!(received.is_none(), "{what}: pod {id} received it");
                }
                Ok(())
            };
            let sent = out(ends, &Payload::udp(OWN, THEIRS, b"a packet"));
            let about = |quoted: &[u8]| error(router, ends.0, quoted, kind);
            nothing(scene, "no flow", &about(&sent))?;
            scene.flush()?;
            goes(scene, &sent)?;
            for (what, quoted) in [
                ("another port", out(ends, &Payload::udp(OWN + 1, THEIRS, b"a packet"))),
                ("another protocol", out(ends, &segment(TcpFlags::ACK))),
                (
                    "a packet to the pod",
                    back(ends, &Payload::udp(THEIRS, OWN, b"a packet")),
                ),
                (
                    "a packet of another pod",
                    Ip::new(SECOND[family], ends.1).packet(&Payload::udp(OWN, THEIRS, b"a packet")),
                ),
                ("nothing", vec![0; 8]),
            ] {
                nothing(scene, what, &about(&quoted))?;
            }
            // A change that the flow was not evaluated again for.
            comes(scene, &about(&sent))?;
            scene.enforce(A, ONLY_FRIENDS)?;
            scene.identify(FRIEND)?;
            nothing(scene, "an earlier policy", &about(&sent))?;
            // The pod's answer and the question have one flow, which the question has renewed.
            comes(scene, &about(&sent))?;
            // A flow through a tunnel has no routers.
            scene.lead(NODE, underlay(NODE, v4), true)?;
            scene.send(A, &sent)?;
            scene.tunnelled(underlay(NODE, v4))?;
            scene.send_outside(&about(&sent))?;
            let mark = back(ends, &mark);
            scene.tunnel(underlay(NODE, v4), super::scene::BLUE, &mark)?;
            let next = scene.next(A, patience(), |_any| true)?;
            let next = next.context("nothing came through the tunnel")?;
            ensure!(next[14..] == mark, "the pod received {}", hex(&next));
            Ok(())
        })
    })
}

/// The kernel would take the IPv4 address for a part of an IPv6 one.
#[test]
fn a_next_hop_of_ipv4_gets_no_ipv6_packets() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-hop", |scene| {
        each(scene, |scene, ends| {
            let packet = out(ends, &segment(TcpFlags::SYN));
            scene.lead(NODE, underlay(NODE, !ends.0.is_ipv4()), false)?;
            if ends.0.is_ipv4() {
                return goes(scene, &packet);
            }
            scene.dropped("IPv6", FromPod, Verdict::NoNode, || scene.send(A, &packet))
        })
    })
}

/// A packet with a pod's address that the programs have not sent stays inside.
#[test]
fn the_uplink_lets_out_only_what_was_sent_to_another_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("native-guard", |scene| {
        each(scene, |scene, ends| {
            goes(scene, &out(ends, &segment(TcpFlags::SYN)))?;
            let own = own_underlay(ends.0.is_ipv4());
            let packet = Ip::new(ends.0, own).packet(&segment(TcpFlags::SYN));
            scene.dropped("to the node", FromPod, Verdict::NoRoute, || scene.send(A, &packet))
        })
    })
}

/// A tag without a VLAN has a priority only; in any other VLAN there is another network.
#[test]
fn packets_of_a_vlan_reach_no_pod() -> Result<()> {
    const PRIORITY: u16 = 5 << 13;
    require!(root, netns, bpf, ip);
    inside("native-tags", |scene| {
        each(scene, |scene, ends| {
            for tags in [&[7][..], &[0, 7], &[PRIORITY, PRIORITY + 7]] {
                let packet = back(ends, &Payload::udp(THEIRS, OWN, b"of another network"));
                scene.send_tagged_outside(tags, &packet)?;
                let packet = back(ends, &Payload::udp(THEIRS, OWN, b"behind it"));
                scene.send_tagged_outside(&[PRIORITY], &packet)?;
                let found = scene.next(A, patience(), |_any| true)?;
                let found = found.with_context(|| format!("{tags:?}: nothing came behind it"))?;
                ensure!(found[14..] == packet, "{tags:?}: the pod received {}", hex(&found));
            }
            Ok(())
        })
    })
}
