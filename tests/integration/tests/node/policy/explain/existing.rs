//! Tests that a question is about a new connection, whatever flows exist.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use kni_integration::{
    eventually_sync,
    frames::{Ip, Link, PacketSocket, Payload, parse_mac},
    patience, require,
    world::{NinePods, index_of},
};
use serde_json::Value;

use super::super::{at, enforce};

/// Lifetime of a UDP flow of one datagram, or of one and its answer.
const UNANSWERED: Duration = Duration::from_secs(10);

/// Sends datagrams of one pod to another one from any port, without a socket for each.
struct Sender {
    socket: PacketSocket,
    link: Link,
    way: Ip,
    port: u16,
}

impl Sender {
    async fn open(world: &NinePods, from: &str, to: &str, port: u16) -> Result<Self> {
        let member = world.member(index_of(from));
        let interfaces = world.stage.interfaces().await?;
        let eth0 = interfaces
            .into_iter()
            .find(|interface| interface.sandbox_id == member.sandbox && interface.ifname == "eth0")
            .with_context(|| format!("eth0 of {from} is not listed"))?;
        let mac = |text: &str| parse_mac(text).with_context(|| format!("not a MAC address: {text:?}"));
        Ok(Self {
            socket: PacketSocket::open(&member.inside, "eth0")?,
            link: Link::new(mac(&eth0.mac)?, mac(&eth0.host_mac)?),
            way: Ip::new(at(world, from, true, port).ip(), at(world, to, true, port).ip()),
            port,
        })
    }

    fn send(&self, from: u16) -> Result<()> {
        let packet = self.way.packet(&Payload::udp(from, self.port, b"from each port"));
        Ok(self.socket.send(&self.link.frame(&packet))?)
    }
}

/// The source ports that explanations use.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 49_152..=60_999;

#[tokio::test(flavor = "multi_thread")]
async fn knictl_explain_asks_about_a_connection_that_does_not_exist() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("explain-new").await?;
    let allow_one =
        "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{protocol: UDP, port: 81}]}]}";
    enforce(&mut world, &[("x", allow_one)]).await?;
    let sender = Sender::open(&world, "x/a", "y/a", 81).await?;
    let ask = || world.stage.knictl(&["explain", "x/a", "y/a", "udp/81", "-o", "json"]);
    let unused = 55_555;
    // A packet of any other port follows its flow: no policy decides about it.
    let mut asked = 0;
    eventually_sync(patience(), || {
        while asked < 5 {
            let begun = Instant::now();
            for port in SOURCE_PORTS.filter(|port| *port != unused) {
                sender.send(port)?;
            }
            let answer: Value = serde_json::from_str(&ask()?)?;
            // Later, the first of the flows may have expired.
            ensure!(
                begun.elapsed() < UNANSWERED / 2,
                "the flows and the answer took too long"
            );
            if answer["flow"]["source"]["port"] != unused
                || answer["flow"]["egress"]["isolating"][0]["namespace"] != "x"
            {
                return Ok(Err(anyhow!("the port of another flow, or not judged: {answer:#}")));
            }
            asked += 1;
        }
        Ok(Ok(()))
    })??;
    let refused = eventually_sync(patience(), || {
        let begun = Instant::now();
        for port in SOURCE_PORTS {
            sender.send(port)?;
        }
        let answer = ask();
        ensure!(
            begun.elapsed() < UNANSWERED / 2,
            "the flows and the answer took too long"
        );
        Ok(answer.err())
    })?;
    let refused = refused.context("every port has a flow, and there is an answer")?;
    let refused = format!("{refused:#}");
    ensure!(
        refused.contains("each of the source ports 49152 to 60999 has a flow"),
        "{refused}"
    );
    Ok(())
}
