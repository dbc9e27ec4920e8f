//! Tests packets in the name of pods of other nodes that do not come by the way that leads to them: by the node's
//! stack, to ports of the node, and through the node to a third one.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction::{self, FromUplink, ToOverlay, ToPod},
    IFINDEX_BASE, Verdict,
};
use kni_dataplane::{HostPort, host_port_key};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    patience, require,
    traffic::set_option,
};
use kni_model::EndpointId;
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Socket, Type};

use super::scene::{
    A, B, Ends, FRIEND, LOCAL, NODE, NOTHING, ONLY_FRIENDS, OTHER, OVERLAY, OWN, REMOTE, SECOND, STRANGER, Scene, TCP,
    THEIRS, UNUSED, families, inside, own_underlay, underlay,
};

/// A port of the node, and the pod's port that it leads to.
const OUTER: u16 = 54_000;

/// Both families, with a pod that accepts packets of the remote pod only, and that the node's stack reaches.
fn each(scene: &mut Scene<'_>, mut check: impl FnMut(&mut Scene<'_>, Ends) -> Result<()>) -> Result<()> {
    scene.route_by_stack()?;
    scene.own_subnets()?;
    for ends in families() {
        scene.flush()?;
        scene.enforce(A, ONLY_FRIENDS)?;
        scene.identify(FRIEND)?;
        scene.lead(NODE, underlay(NODE, ends.0.is_ipv4()), true)?;
        check(scene, ends).with_context(|| format!("{} and {}", ends.0, ends.1))?;
    }
    Ok(())
}

fn datagram(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    Ip::new(source, destination).packet(&Payload::udp(THEIRS, OWN, b"in another's name"))
}

/// A process of the node sends a datagram from an address that need not be the node's.
fn send_as(source: IpAddr, destination: IpAddr) -> Result<()> {
    let [source, destination] = [(source, THEIRS), (destination, OWN)].map(SocketAddr::from);
    let socket = Socket::new(Domain::for_address(source), Type::DGRAM, None)?;
    let option = if source.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_TRANSPARENT)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND)
    };
    set_option(&socket, option, &1_i32.to_ne_bytes())?;
    socket.set_reuse_address(true)?;
    socket.bind(&source.into())?;
    socket.send_to(b"in another's name", &destination.into())?;
    Ok(())
}

/// The program and its explanation agree about the verdict.
fn expect(scene: &Scene<'_>, what: &str, ingress: u32, packet: &[u8], expected: Verdict) -> Result<()> {
    let found = scene.by_stack(ingress, packet).with_context(|| what.to_owned())?;
    ensure!(
        found == expected,
        "{what}: {}, expected {}",
        found.as_str(),
        expected.as_str()
    );
    Ok(())
}

/// The interfaces that lead to other nodes, and one that does not.
fn interfaces() -> Result<[u32; 3]> {
    Ok([if_nametoindex(OVERLAY)?, if_nametoindex("uplink0")?, IFINDEX_BASE + B])
}

#[test]
fn a_pod_of_another_node_counts_only_by_the_way_that_leads_to_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-ways", |scene| {
        let [tunnel, uplink, pod] = interfaces()?;
        each(scene, |scene, (local, remote)| {
            for payload in [
                Payload::udp(THEIRS, OWN, b"in another's name"),
                Payload::tcp(THEIRS, OWN, TcpFlags::SYN),
                Payload::tcp(THEIRS, OWN, TcpFlags::ACK),
            ] {
                let packet = Ip::new(remote, local).packet(&payload);
                for overlay in [true, false] {
                    scene.lead(NODE, underlay(NODE, local.is_ipv4()), overlay)?;
                    let (way, other) = if overlay { (tunnel, uplink) } else { (uplink, tunnel) };
                    for (what, ingress) in [("another way", other), ("a pod's interface", pod)] {
                        scene.flush()?;
                        expect(scene, what, ingress, &packet, Verdict::ForeignNode)?;
                        ensure!(scene.flows() == 0, "{what}: it opened a flow");
                    }
                    expect(scene, "the way", way, &packet, Verdict::Delivered)?;
                    expect(scene, "the node, in the flow", 0, &packet, Verdict::ForeignNode)?;
                    scene.flush()?;
                    expect(scene, "the node", 0, &packet, Verdict::ForeignNode)?;
                    ensure!(scene.flows() == 0, "the node opened a flow");
                }
                scene.flush()?;
                scene.remove_node(NODE)?;
                for ingress in [tunnel, uplink] {
                    expect(scene, "of no node", ingress, &packet, Verdict::ForeignNode)?;
                }
            }
            Ok(())
        })
    })
}

#[test]
fn no_host_has_an_address_that_no_node_is_known_to_have() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-unowned", |scene| {
        let ingresses = interfaces()?;
        each(scene, |scene, (local, _)| {
            scene.enforce(A, 0)?;
            let family = usize::from(local.is_ipv6());
            for ingress in ingresses {
                let packet = datagram(UNUSED[family], local);
                expect(scene, "no pod", ingress, &packet, Verdict::OwnerUnknown)?;
            }
            // What is not of the network is evaluated as before: hosts, and the nodes themselves, by their addresses.
            scene.route_node()?;
            let [tunnel, uplink, _] = ingresses;
            let v4 = local.is_ipv4();
            for (what, source) in [
                ("another host", underlay(OTHER, v4)),
                ("another node", underlay(NODE, v4)),
            ] {
                for ingress in [tunnel, uplink] {
                    scene.flush()?;
                    expect(scene, what, ingress, &datagram(source, local), Verdict::Delivered)?;
                }
            }
            Ok(())
        })
    })
}

/// Any process may have a socket with any address in IPv6 (`IPV6_FREEBIND`), and one with `CAP_NET_ADMIN` in both
/// families (`IP_TRANSPARENT`).
#[test]
fn the_node_has_the_address_of_no_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-own", |scene| {
        scene.route_own()?;
        each(scene, |scene, (local, remote)| {
            let (v4, family) = (local.is_ipv4(), usize::from(local.is_ipv6()));
            let forged = [
                ("a pod of another node", remote, Verdict::ForeignNode),
                ("a pod of this node", SECOND[family], Verdict::SourceAddress),
                ("no pod", UNUSED[family], Verdict::OwnerUnknown),
            ];
            for (what, source, reason) in forged {
                scene.flush()?;
                expect(scene, what, 0, &datagram(source, local), reason)?;
                ensure!(scene.flows() == 0, "{what}: it opened a flow");
                for (direction, to) in [(ToPod, local), (ToOverlay, REMOTE[family])] {
                    // Only from another socket than that of the destination.
                    if source != to {
                        scene.dropped(what, direction, reason, || send_as(source, to))?;
                    }
                }
            }
            scene.flush()?;
            let own = own_underlay(v4);
            expect(scene, "the node", 0, &datagram(own, local), Verdict::Delivered)?;
            send_as(own, REMOTE[family])?;
            let arrived = scene.tunnelled(underlay(NODE, v4))?;
            let addresses = if v4 { 12..20 } else { 8..40 };
            let expected = datagram(own, REMOTE[family]);
            ensure!(
                arrived.packet.get(addresses.clone()) == expected.get(addresses),
                "another packet came through the tunnel"
            );
            Ok(())
        })
    })
}

/// Once an address is that of a pod of another node, a flow that another one has opened with it does not continue.
#[test]
fn an_older_flow_does_not_become_that_of_a_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-later", |scene| {
        let [tunnel, uplink, _] = interfaces()?;
        each(scene, |scene, (local, remote)| {
            let packet = datagram(remote, local);
            scene.lead(NODE, underlay(NODE, local.is_ipv4()), false)?;
            expect(scene, "by the uplink", uplink, &packet, Verdict::Delivered)?;
            scene.lead(NODE, underlay(NODE, local.is_ipv4()), true)?;
            // Another generation of the receiver: the flow is evaluated again.
            scene.enforce(A, ONLY_FRIENDS)?;
            expect(scene, "by the uplink still", uplink, &packet, Verdict::ForeignNode)?;
            expect(scene, "by the tunnel", tunnel, &packet, Verdict::Delivered)
        })
    })
}

/// Each packet of a flow comes by the way of the first one, or is evaluated anew.
#[test]
fn no_packet_takes_part_in_a_flow_by_another_way() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-flows", |scene| {
        let [tunnel, uplink, _] = interfaces()?;
        each(scene, |scene, (local, remote)| {
            let packet = datagram(remote, local);
            expect(scene, "by the tunnel", tunnel, &packet, Verdict::Delivered)?;
            for _ in 0..2 {
                expect(scene, "by the uplink", uplink, &packet, Verdict::ForeignNode)?;
                expect(scene, "by the tunnel again", tunnel, &packet, Verdict::Delivered)?;
            }
            // The way there changes, and the flow continues.
            scene.lead(NODE, underlay(NODE, local.is_ipv4()), false)?;
            scene.enforce(A, ONLY_FRIENDS)?;
            expect(scene, "by the tunnel still", tunnel, &packet, Verdict::ForeignNode)?;
            expect(scene, "by the uplink now", uplink, &packet, Verdict::Delivered)?;
            expect(scene, "by the tunnel still", tunnel, &packet, Verdict::ForeignNode)?;
            expect(scene, "by the uplink", uplink, &packet, Verdict::Delivered)?;
            ensure!(scene.flows() == 1, "{} rows", scene.flows());
            Ok(())
        })
    })
}

/// A pod of the node reaches another one by the stack where another process has translated a virtual address.
#[test]
fn pods_of_the_node_reach_each_other_by_the_stack() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-local", |scene| {
        let [tunnel, uplink, pod] = interfaces()?;
        each(scene, |scene, (local, _)| {
            let packet = datagram(SECOND[usize::from(local.is_ipv6())], local);
            for policy in [0, NOTHING, 0, 0] {
                scene.enforce(A, policy)?;
                let allowed = if policy == 0 {
                    Verdict::Delivered
                } else {
                    Verdict::PolicyIngress
                };
                expect(scene, "by its interface", pod, &packet, allowed)?;
            }
            scene.flush()?;
            for ingress in [tunnel, uplink] {
                expect(scene, "by another one", ingress, &packet, Verdict::SourceAddress)?;
            }
            Ok(())
        })
    })
}

/// Real frames on the wire between the nodes, through the node's stack.
#[test]
fn the_wire_carries_no_pod_of_another_node_past_the_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-wire", |scene| {
        scene.route_own()?;
        each(scene, |scene, (local, remote)| {
            let family = usize::from(local.is_ipv6());
            let refused = |scene: &Scene<'_>, what: &str, direction: Direction, reason: Verdict, packet: Vec<u8>| {
                scene.dropped(what, direction, reason, || scene.send_outside(&packet))
            };
            refused(
                scene,
                "a pod of another node",
                ToPod,
                Verdict::ForeignNode,
                datagram(remote, local),
            )?;
            refused(
                scene,
                "a pod of this node",
                ToPod,
                Verdict::SourceAddress,
                datagram(SECOND[family], local),
            )?;
            refused(
                scene,
                "no pod",
                ToPod,
                Verdict::OwnerUnknown,
                datagram(UNUSED[family], local),
            )?;
            // Through this node to another one, which would believe it.
            let packet = |source| datagram(source, REMOTE[family]);
            refused(
                scene,
                "this node's pod",
                ToOverlay,
                Verdict::SourceAddress,
                packet(LOCAL[family]),
            )?;
            refused(
                scene,
                "no pod",
                ToOverlay,
                Verdict::OwnerUnknown,
                packet(UNUSED[family]),
            )?;
            refused(
                scene,
                "that node's pod",
                ToOverlay,
                Verdict::ForeignNode,
                packet(remote),
            )?;
            scene.quiet()
        })
    })
}

#[test]
fn a_port_of_the_node_takes_pods_of_other_nodes_by_their_way_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("past-ports", |scene| {
        scene.dataplane().set_uplink(Some(if_nametoindex("uplink0")?))?;
        each(scene, |scene, (local, remote)| {
            let v4 = local.is_ipv4();
            let family = usize::from(!v4);
            let target = HostPort {
                endpoint: EndpointId(A),
                port: OWN,
            };
            let port = host_port_key(own_underlay(v4), TCP, OUTER);
            scene.dataplane().set_host_ports(&[(port, target)].into())?;
            let to_port =
                |source: IpAddr, flags| Ip::new(source, own_underlay(v4)).packet(&Payload::tcp(THEIRS, OUTER, flags));
            let refused = |scene: &Scene<'_>, what: &str, source, reason| {
                let packet = to_port(source, TcpFlags::SYN);
                scene.dropped(what, FromUplink, reason, || scene.send_outside(&packet))
            };
            refused(scene, "a pod behind the tunnel", remote, Verdict::ForeignNode)?;
            refused(scene, "no pod", UNUSED[family], Verdict::OwnerUnknown)?;
            refused(scene, "a pod of this node", SECOND[family], Verdict::OwnerUnknown)?;
            refused(scene, "a host", underlay(OTHER, v4), Verdict::PolicyIngress)?;
            // Without a tunnel they come by the uplink.
            scene.lead(NODE, underlay(NODE, v4), false)?;
            let comes = |scene: &Scene<'_>, flags: TcpFlags| -> Result<()> {
                scene.send_outside(&to_port(remote, flags))?;
                let expected = Ip::new(remote, local).packet(&Payload::tcp(THEIRS, OWN, flags));
                let hops = if v4 { 8 } else { 7 };
                let found = scene.next(A, patience(), |frame| frame.len() > 14)?;
                let found = found.context("nothing came")?;
                ensure!(found[14 + hops] == expected[hops] - 1, "it was not forwarded");
                Ok(())
            };
            comes(scene, TcpFlags::SYN)?;
            comes(scene, TcpFlags::ACK)?;
            // The flow is evaluated again when there is a tunnel.
            scene.lead(NODE, underlay(NODE, v4), true)?;
            scene.enforce(A, ONLY_FRIENDS)?;
            let packet = to_port(remote, TcpFlags::ACK);
            scene.dropped("the older flow", FromUplink, Verdict::ForeignNode, || {
                scene.send_outside(&packet)
            })?;
            scene.identify(STRANGER)
        })
    })
}
