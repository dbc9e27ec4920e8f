//! Tests dropped packets at the uplink in both modes: the deny list, sources of pod networks, malformed packets, and
//! their counters.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, eventually,
    frames::{Ip, Link, PacketSocket, Payload, parse_mac},
    node::{NODE_V4, NODE_V6},
    require,
    traffic::{NoAnswer, Servers, new_token, ping, tcp_get},
};

use super::{
    FAMILIES, PORT,
    world::{World, patience, server},
};

const SHORT: Duration = Duration::from_millis(300);
/// The server's second addresses, which are denied.
const DENIED: [&str; 2] = ["203.0.113.99", "2001:db8:203::99"];

/// Sends arbitrary packets from the router to the node.
struct Wire {
    socket: PacketSocket,
    link: Link,
}

impl Wire {
    fn open(world: &World) -> Result<Self> {
        let mac = |ns: &kni_integration::Namespaces, link: &str| -> Result<[u8; 6]> {
            let shown: serde_json::Value = serde_json::from_str(&ns.run("ip", &["-j", "link", "show", "dev", link])?)?;
            let text = shown[0]["address"].as_str().context("no MAC address")?;
            parse_mac(text).context("not a MAC address")
        };
        let router = &world.outside.router;
        Ok(Self {
            socket: PacketSocket::open(router, "fabric0")?,
            link: Link::new(mac(router, "fabric0")?, mac(&world.stage.node, "uplink0")?),
        })
    }

    fn send(&self, packet: &[u8]) -> Result<()> {
        Ok(self.socket.send(&self.link.frame(packet))?)
    }
}

async fn wait_for(world: &World, reason: &str, count: u64) -> Result<()> {
    eventually(patience(), async || {
        let counted = world.drops("from_uplink", reason).await?;
        assert!(counted <= count, "{counted} drops for {reason}, not {count}");
        ensure!(counted == count, "{counted} drops for {reason}, not {count}");
        Ok(())
    })
    .await
    .with_context(|| world.stage.knictl(&["drops"]).unwrap_or_default())
}

fn node(v4: bool) -> Result<IpAddr> {
    Ok(if v4 { NODE_V4 } else { NODE_V6 }.parse()?)
}

async fn stays_outside(mode: &str) -> Result<()> {
    let args = [
        "--deny-source",
        "203.0.113.99/32",
        "--deny-source",
        "2001:db8:203::99/128",
        "--drop-bogons",
        "--uplink-xdp",
        mode,
    ];
    let world = World::start(&format!("xdp-{mode}"), Manifest::overlapping(), &args).await?;
    let uplink = world.uplink().await?;
    assert_eq!(uplink.xdp, mode);
    assert_eq!(uplink.programs.len(), 1, "nothing needs the TC programs");
    let _node = Servers::start(&world.stage.node, "node", PORT)?;
    let _servers = world.serve()?;
    let client = &world.outside.server;
    let wire = Wire::open(&world)?;
    let (mut denied, mut bogons, mut malformed, mut truncated) = (0, 0, 0, 0);
    for v4 in FAMILIES {
        let to = node(v4)?;
        tcp_get(client, to, PORT, patience()).context("others are let in")?;
        tcp_get(&world.stage.node, server(v4).ip(), PORT, patience()).context("the node reaches others")?;
        let from: IpAddr = DENIED[usize::from(!v4)].parse()?;
        client.add_address("server0", &format!("{from}/{}", if v4 { 32 } else { 128 }))?;
        let question = Payload::udp(4000, PORT, b"question");
        wire.send(&Ip::new(from, to).packet(&question))?;
        denied += 1;
        wait_for(&world, "deny_listed", denied).await?;
        // Answers to the node's requests are dropped, too.
        let echo = ping(&world.stage.node, from, &new_token(), SHORT);
        assert_eq!(echo, Err(NoAnswer::Timeout));
        denied += 1;
        wait_for(&world, "deny_listed", denied).await?;
        // An address of a network without routes; the default network has routes.
        let pod: IpAddr = if v4 { "10.10.3.4" } else { "fd10::34" }.parse()?;
        wire.send(&Ip::new(pod, to).packet(&question))?;
        bogons += 1;
        wait_for(&world, "bogon_source", bogons).await?;
        let routed: IpAddr = if v4 { "10.244.3.4" } else { "fd00:244::34" }.parse()?;
        wire.send(&Ip::new(routed, to).packet(&question))?;
        // A version that differs from the EtherType, and a length over that of the frame.
        let mut frame = wire.link.frame(&Ip::new(server(v4).ip(), to).packet(&question));
        frame[14] = if v4 { 0x65 } else { 0x40 };
        wire.socket.send(&frame)?;
        malformed += 1;
        wait_for(&world, "malformed", malformed).await?;
        let packet = Ip::new(server(v4).ip(), to).packet(&Payload::udp(4000, PORT, &[0; 600]));
        wire.send(&packet[..packet.len() - 100])?;
        truncated += 1;
        wait_for(&world, "truncated", truncated).await?;
    }
    assert_eq!(
        world.drops("from_uplink", "bogon_source").await?,
        bogons,
        "routed pods may come from outside"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_stay_outside_in_the_driver() -> Result<()> {
    require!(root, netns, bpf, ip);
    stays_outside("native").await
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_stay_outside_in_front_of_the_stack() -> Result<()> {
    require!(root, netns, bpf, ip);
    stays_outside("generic").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_takes_the_program_over_or_away() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut world = World::start(
        "xdp-again",
        Manifest::overlapping(),
        &["--deny-source", "203.0.113.99/32"],
    )
    .await?;
    let before = world.uplink().await?;
    assert_eq!(before.xdp, "native", "the best that the driver has");
    world.stage.agent.kill9()?;
    world.stage.agent.restart()?;
    let after = world.uplink().await?;
    let link = |uplink: &kni_proto::runtime::Uplink| {
        uplink
            .programs
            .iter()
            .map(|program| program.link_id)
            .collect::<Vec<_>>()
    };
    assert_eq!(link(&after), link(&before), "in place");
    // Another agent with a different mode, and then without one.
    for (args, xdp) in [
        (
            &["--deny-source", "203.0.113.99/32", "--uplink-xdp", "generic"][..],
            "generic",
        ),
        (&[], ""),
    ] {
        world.stage.agent.terminate()?;
        let options = kni_integration::AgentOptions::new(Manifest::overlapping(), args);
        world.stage.agent = kni_integration::Agent::start(&world.stage.node, options)?;
        assert_eq!(world.uplink().await?.xdp, xdp);
    }
    let shown = world.stage.node.run("ip", &["link", "show", "dev", "uplink0"])?;
    assert!(!shown.contains("xdp"), "{shown}");
    Ok(())
}
