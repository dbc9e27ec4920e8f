//! Tests ports of the node that lead to pods, as pods of other nodes reach them through the tunnel.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction::{FromOverlay, FromPod},
    Verdict,
    flow::{END_LOCAL, END_REMOTE, FLOW_CONFIRMED, FLOW_TRANSLATED, FlowEnd},
};
use kni_dataplane::{HostPort, host_port_key};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    programs::hex,
    require,
};
use kni_model::EndpointId;

use super::scene::{
    A, BLUE, FRIEND, LOCAL, NODE, ONLY_FRIENDS, OTHER, RED, RED_A, REMOTE, SECOND, STRANGER, Scene, TCP, THEIRS,
    Tunnelled, UNUSED, inside, own_underlay, underlay,
};

const UDP: u8 = 17;
/// A port of the node, and the pod's port that it leads to.
const OUTER: u16 = 54_000;
const INNER: u16 = 8080;

/// The parties of one family, and the address of the other node.
#[derive(Debug, Clone, Copy)]
struct Parties {
    /// [`A`].
    pod: IpAddr,
    client: IpAddr,
    /// The node's address of the family of the pods.
    own: IpAddr,
    node: IpAddr,
}

impl Parties {
    /// From the client to the node, and as the pod gets it.
    fn question(&self, of: impl Fn(u16) -> Payload) -> [Vec<u8>; 2] {
        [(self.own, OUTER), (self.pod, INNER)].map(|(to, port)| Ip::new(self.client, to).packet(&of(port)))
    }

    /// From the pod, and as the client gets it.
    fn answer(&self, of: impl Fn(u16) -> Payload) -> [Vec<u8>; 2] {
        [(self.pod, INNER), (self.own, OUTER)].map(|(from, port)| Ip::new(from, self.client).packet(&of(port)))
    }

    /// Sends what the client sends, and expects it at the pod.
    fn comes(&self, scene: &Scene<'_>, [sent, received]: [Vec<u8>; 2]) -> Result<()> {
        scene.tunnel(self.node, BLUE, &sent)?;
        scene.received(A, &received)
    }

    /// Sends what the pod sends, and expects it in the tunnel to the client's node.
    fn goes(&self, scene: &Scene<'_>, [sent, packet]: [Vec<u8>; 2]) -> Result<()> {
        scene.send(A, &sent)?;
        let found = scene.tunnelled(self.node)?;
        let expected = Tunnelled {
            from: own_underlay(self.node.is_ipv4()),
            network: BLUE,
            packet,
        };
        ensure!(found == expected, "{found:?}, expected {expected:?}");
        Ok(())
    }
}

fn asks(flags: TcpFlags) -> impl Fn(u16) -> Payload {
    move |port| Payload::tcp(THEIRS, port, flags)
}

fn answers(flags: TcpFlags) -> impl Fn(u16) -> Payload {
    move |port| Payload::tcp(port, THEIRS, flags)
}

fn datagram(port: u16) -> Payload {
    Payload::udp(THEIRS, port, b"a question")
}

fn returned(port: u16) -> Payload {
    Payload::udp(port, THEIRS, b"an answer")
}

/// Lets the port of both protocols at the node's addresses lead to an endpoint.
fn lead(scene: &Scene<'_>, endpoint: u32) -> Result<()> {
    let target = HostPort {
        endpoint: EndpointId(endpoint),
        port: INNER,
    };
    let ports = [true, false].into_iter().flat_map(|v4| {
        let address = own_underlay(v4);
        [TCP, UDP].map(|protocol| (host_port_key(address, protocol, OUTER), target))
    });
    Ok(scene.dataplane().set_host_ports(&ports.collect())?)
}

/// Each family of pods over each family of nodes.
fn each(scene: &mut Scene<'_>, mut check: impl FnMut(&mut Scene<'_>, Parties) -> Result<()>) -> Result<()> {
    scene.route_own()?;
    for v4 in [true, false] {
        let node = underlay(NODE, v4);
        for (family, (pod, client)) in LOCAL.into_iter().zip(REMOTE).enumerate() {
            let own = own_underlay(family == 0);
            scene.flush()?;
            scene.enforce(A, 0)?;
            scene.identify(STRANGER)?;
            scene.lead(NODE, node, true)?;
            lead(scene, A)?;
            let parties = Parties { pod, client, own, node };
            check(scene, parties).with_context(|| format!("{parties:?}"))?;
            scene.quiet()?;
        }
    }
    Ok(())
}

#[test]
fn a_pod_of_another_node_reaches_a_port_of_the_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-in", |scene| {
        each(scene, |scene, parties| {
            parties.comes(scene, parties.question(asks(TcpFlags::SYN)))?;
            let theirs = FlowEnd {
                id: NODE,
                generation: scene.remote_generation(A, NODE)?,
            };
            for own in [(parties.own, OUTER), (parties.pod, INNER)] {
                let found = scene.flow(own, (parties.client, THEIRS), TCP).context("no flow")?;
                ensure!(
                    found.local.0 == END_LOCAL
                        && found.local.1.id == A
                        && found.remote == (END_REMOTE, theirs)
                        && found.flags & FLOW_TRANSLATED != 0,
                    "{found:?}"
                );
            }
            parties.goes(scene, parties.answer(answers(TcpFlags::SYN_ACK)))?;
            for _ in 0..3 {
                parties.comes(scene, parties.question(asks(TcpFlags::ACK)))?;
                parties.goes(scene, parties.answer(answers(TcpFlags::ACK)))?;
            }
            let found = scene.flow((parties.own, OUTER), (parties.client, THEIRS), TCP);
            ensure!(found.context("no flow")?.flags & FLOW_CONFIRMED != 0);
            ensure!(scene.flows() == 2, "{} rows", scene.flows());
            parties.comes(scene, parties.question(datagram))?;
            parties.goes(scene, parties.answer(returned))
        })
    })
}

#[test]
fn the_policies_of_the_pod_apply_at_a_port_of_the_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-policies", |scene| {
        each(scene, |scene, parties| {
            scene.enforce(A, ONLY_FRIENDS)?;
            let [syn, _] = parties.question(asks(TcpFlags::SYN));
            scene.dropped("a stranger", FromOverlay, Verdict::PolicyIngress, || {
                scene.tunnel(parties.node, BLUE, &syn)
            })?;
            ensure!(scene.flows() == 0, "a denied packet opened a flow");
            scene.identify(FRIEND)?;
            parties.comes(scene, parties.question(asks(TcpFlags::SYN)))?;
            parties.goes(scene, parties.answer(answers(TcpFlags::SYN_ACK)))?;
            parties.comes(scene, parties.question(asks(TcpFlags::ACK)))?;
            // The connection is evaluated again, whichever side sends.
            scene.identify(STRANGER)?;
            scene.renew(NODE)?;
            let [ack, _] = parties.question(asks(TcpFlags::ACK));
            scene.dropped("a new stranger", FromOverlay, Verdict::PolicyIngress, || {
                scene.tunnel(parties.node, BLUE, &ack)
            })?;
            let [back, _] = parties.answer(answers(TcpFlags::ACK));
            scene.dropped("to a new stranger", FromPod, Verdict::PolicyIngress, || {
                scene.send(A, &back)
            })?;
            scene.identify(FRIEND)?;
            parties.comes(scene, parties.question(asks(TcpFlags::ACK)))?;
            scene.renew(NODE)?;
            parties.goes(scene, parties.answer(answers(TcpFlags::ACK)))
        })
    })
}

/// What is not for a pod of the network stays with the node's stack, and senders are checked as before.
#[test]
fn a_port_of_the_node_takes_only_what_is_for_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-others", |scene| {
        each(scene, |scene, parties| {
            let v4 = parties.node.is_ipv4();
            let family = usize::from(parties.pod.is_ipv6());
            let from = |source: IpAddr, port| Ip::new(source, parties.own).packet(&datagram(port));
            let packet = from(parties.client, OUTER);
            let refused = |what: &str, at: IpAddr, network: u32, packet: &[u8], reason: Verdict| {
                scene.dropped(what, FromOverlay, reason, || scene.tunnel(at, network, packet))
            };
            refused("another node", underlay(OTHER, v4), BLUE, &packet, Verdict::ForeignNode)?;
            refused("another network", parties.node, RED, &packet, Verdict::NoDestination)?;
            for source in [SECOND, LOCAL, UNUSED] {
                let packet = from(source[family], OUTER);
                refused("no pod of the node", parties.node, BLUE, &packet, Verdict::OwnerUnknown)?;
            }
            let verdict = |scene: &Scene<'_>, packet: &[u8]| -> Result<Option<Verdict>> {
                let event = scene.explain(Some((parties.node, BLUE)), packet)?;
                Ok(Verdict::from_code(event.verdict))
            };
            let stack = Some(Verdict::PassedToStack);
            ensure!(
                verdict(scene, &packet)? == Some(Verdict::Redirected),
                "the port leads to the pod"
            );
            ensure!(
                verdict(scene, &from(parties.client, OUTER + 1))? == stack,
                "another port"
            );
            let echo = Payload::echo_request(parties.pod.is_ipv4(), OUTER, 1, b"");
            ensure!(
                verdict(scene, &Ip::new(parties.client, parties.own).packet(&echo))? == stack,
                "an echo"
            );
            lead(scene, RED_A)?;
            ensure!(verdict(scene, &packet)? == stack, "a pod of another network");
            scene.dataplane().set_host_ports(&BTreeMap::new())?;
            ensure!(verdict(scene, &packet)? == stack, "no pod");
            lead(scene, A)?;
            parties.comes(scene, parties.question(datagram))
        })
    })
}

/// Both connections of a client would have the same replies.
#[test]
fn connections_to_the_pod_and_to_the_port_are_not_mixed() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-mixed", |scene| {
        each(scene, |scene, parties| {
            let [by_port, direct] = parties.question(asks(TcpFlags::SYN));
            let [answer, _] = parties.answer(answers(TcpFlags::SYN_ACK));
            let open = |scene: &Scene<'_>, first: &[u8], second: &[u8]| {
                scene.tunnel(parties.node, BLUE, first)?;
                scene.received(A, &direct)?;
                scene.send(A, &answer)?;
                scene.tunnelled(parties.node)?;
                scene.dropped("the second one", FromOverlay, Verdict::TupleInUse, || {
                    scene.tunnel(parties.node, BLUE, second)
                })
            };
            open(scene, &by_port, &direct)?;
            scene.flush()?;
            open(scene, &direct, &by_port)
        })
    })
}

#[test]
fn fragments_for_a_port_of_the_node_follow_their_first() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-fragments", |scene| {
        each(scene, |scene, parties| {
            let [sent, received] = [(parties.own, OUTER), (parties.pod, INNER)]
                .map(|(to, port)| Ip::new(parties.client, to).fragments(&Payload::udp(THEIRS, port, &[7; 60]), 24));
            for pair in sent.into_iter().zip(received) {
                parties.comes(scene, pair.into())?;
            }
            Ok(())
        })
    })
}

/// Port unreachable about a packet.
fn unreachable(v4: bool, quoted: &[u8]) -> Payload {
    let (kind, code) = if v4 { (3, 3) } else { (1, 4) };
    let body = [&[0; 4][..], quoted].concat();
    Payload::Icmp { kind, code, body }
}

/// The header and the ports of a datagram. The quoted checksum is unchanged: that of `sum`'s datagram.
fn quote(packet: &[u8], sum: &[u8]) -> Vec<u8> {
    let head = if packet[0] >> 4 == 4 { 20 } else { 40 };
    let mut quoted = packet[..head + 8].to_vec();
    quoted[head + 6..].copy_from_slice(&sum[head + 6..head + 8]);
    quoted
}

#[test]
fn errors_at_a_port_of_the_node_are_translated() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-errors", |scene| {
        each(scene, |scene, parties| {
            let Parties { pod, client, own, node } = parties;
            let asked = parties.question(datagram);
            let answered = parties.answer(returned);
            let error = |from: IpAddr, to: IpAddr, quoted: &[u8]| {
                Ip::new(from, to).packet(&unreachable(from.is_ipv4(), quoted))
            };
            // Without a flow the node's stack gets it.
            let early = error(client, own, &quote(&answered[1], &answered[1]));
            scene.tunnel(node, BLUE, &early)?;
            let none = scene.next(A, Duration::from_millis(50), |_any| true)?;
            ensure!(none.is_none(), "{}", hex(&none.unwrap_or_default()));

            parties.comes(scene, asked.clone())?;
            let sent = error(pod, client, &quote(&asked[1], &asked[1]));
            let expected = error(own, client, &quote(&asked[0], &asked[1]));
            parties.goes(scene, [sent, expected])?;

            parties.goes(scene, answered.clone())?;
            let sent = error(client, own, &quote(&answered[1], &answered[1]));
            let expected = error(client, pod, &quote(&answered[0], &answered[1]));
            parties.comes(scene, [sent, expected])
        })
    })
}
