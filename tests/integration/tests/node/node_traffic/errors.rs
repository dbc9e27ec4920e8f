//! Tests that ICMP errors reach the sender: closed ports and expired hops.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Namespaces, Node, Stage,
    frames::{Ip, Link, PacketSocket, Payload},
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    require,
    stage::{address, forwarding},
    traffic::{NoAnswer, new_token, tcp_get, udp_ask},
    wait::patience,
};

use super::FAMILIES;

const CLOSED: u16 = 9;

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_port_refuses() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("closed")?;
    forwarding(&node)?;
    let stage = Stage::on(node, Manifest::overlapping()).await?;
    let pods = [stage.pod("closed-1").await?, stage.pod("closed-2").await?];
    let blue = [
        stage.pod_in("blue", "blue-1", "10.10.0.11,fd10::11").await?,
        stage.pod_in("blue", "blue-2", "10.10.0.12,fd10::12").await?,
    ];
    let refused = |from: &Namespaces, to: IpAddr| {
        let what = format!("from {} to {to}", from.name());
        let udp = udp_ask(from, to, CLOSED, patience());
        assert_eq!(udp, Err(NoAnswer::Refused), "UDP {what}");
        let tcp = tcp_get(from, to, CLOSED, patience());
        assert_eq!(tcp, Err(NoAnswer::Refused), "TCP {what}");
    };
    for v4 in FAMILIES {
        refused(&pods[0].inside, address(&pods[1], v4));
        refused(&blue[0].inside, address(&blue[1], v4));
        refused(&stage.node, address(&pods[0], v4));
        refused(&pods[0].inside, if v4 { NODE_V4 } else { NODE_V6 }.parse()?);
        refused(&pods[0].inside, if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse()?);
        refused(stage.node.fabric(), address(&pods[0], v4));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_packet_is_told_of() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("expired")?;
    forwarding(&node)?;
    let stage = Stage::on(node, Manifest::overlapping()).await?;
    let pod = stage.pod("expired").await?;
    let [own, gateway] = stage.macs(&pod, "eth0").await?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    for v4 in FAMILIES {
        let (to, router): (IpAddr, IpAddr) = if v4 {
            (FABRIC_V4.parse()?, NODE_V4.parse()?)
        } else {
            (FABRIC_V6.parse()?, NODE_V6.parse()?)
        };
        let token = new_token();
        let packet =
            Ip::new(address(&pod, v4), to)
                .hop_limit(1)
                .packet(&Payload::udp(40_000, 33_434, token.as_bytes()));
        socket.send(&Link::new(own, gateway).frame(&packet))?;
        // Time exceeded; the packet is quoted.
        let (at, kind) = if v4 { (14 + 20, 11) } else { (14 + 40, 3) };
        let answer = socket.receive(patience(), |frame| {
            frame.get(at) == Some(&kind) && frame[at..].windows(token.len()).any(|w| w == token.as_bytes())
        })?;
        let answer = answer.with_context(|| format!("no time exceeded from {router}"))?;
        let source = if v4 { &answer[26..30] } else { &answer[22..38] };
        let expected = match router {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        assert_eq!(source, expected, "the router that told");
    }
    Ok(())
}
