//! Tests floods of new connections: from outside to a port of the node, answered by the pod or completed, and from a
//! pod.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Result, ensure};
use fastrand::Rng;
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    long, require,
    stage::address,
};

use super::{
    PORT,
    scene::{NODE_PORT, Scene, mute, node, paced},
};

/// Arguments of the agent, connections, and connections per second: more than the share of a pod, a quarter of the
/// table.
///
/// Rows of unanswered connections end after seconds: a slow machine must exceed the share as well, so that it is small.
fn size() -> (&'static [&'static str], u32, u32) {
    if long() {
        (&[], 1_000_000, 100_000)
    } else {
        (&["--max-flows", "16384"], 20_000, 20_000)
    }
}

/// A source that answers nothing.
fn unrouted(number: u32) -> IpAddr {
    let first = Ipv4Addr::new(198, 18, 0, 1).to_bits();
    Ipv4Addr::from_bits(first + number % 0x1_0000).into()
}

fn port(number: u32) -> u16 {
    // A different port for each round of the sources.
    u16::try_from(1024 + number / 0x1_0000).unwrap_or(u16::MAX)
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_connections_from_outside_leave_the_pod_its_own() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let (args, count, rate) = size();
    let scene = Scene::start("syn-outside", args).await?;
    let bystanders = scene.bystanders()?;
    let (outside, to) = (scene.outside()?, node()?);
    paced("SYN from outside", count, rate, |number| {
        let segment = Payload::tcp(port(number), NODE_PORT, TcpFlags::SYN);
        outside.send(&Ip::new(unrouted(number), to).packet(&segment))
    })?;
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    let refused = scene.refused(&scene.victim, "from_uplink").await?;
    ensure!(refused > 0, "no packet of the flood was refused");
    ensure!(
        scene.refused(&scene.victim, "from_pod").await? == 0,
        "the victim's own share is used up"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn completed_connections_from_outside_leave_the_pod_its_own() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("open-outside", size().0).await?;
    // The test answers in place of the pod's stack, which cannot hold so many connections.
    mute(&scene.victim, &format!("tcp dport {PORT}"))?;
    let bystanders = scene.bystanders()?;
    let (outside, victim, to) = (scene.outside()?, scene.inside(&scene.victim).await?, node()?);
    let own = address(&scene.victim, true);
    paced("connections from outside", 20_000, 20_000, |number| {
        let (client, from) = (unrouted(number), port(number));
        for flags in [TcpFlags::SYN, TcpFlags::SYN_ACK, TcpFlags::ACK] {
            if flags == TcpFlags::SYN_ACK {
                victim.send(&Ip::new(own, client).packet(&Payload::tcp(PORT, from, flags)))?;
            } else {
                outside.send(&Ip::new(client, to).packet(&Payload::tcp(from, NODE_PORT, flags)))?;
            }
        }
        Ok(())
    })?;
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    ensure!(
        scene.refused(&scene.victim, "from_uplink").await? > 0,
        "no connection was refused"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_pod_use_up_its_own_share_only() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let (args, count, rate) = size();
    let scene = Scene::start("syn-inside", args).await?;
    // Its stack would reset the connections that it does not know.
    mute(&scene.attacker, "tcp sport 8080")?;
    let bystanders = scene.bystanders()?;
    let attacker = scene.inside(&scene.attacker).await?;
    let ends = [&scene.attacker, &scene.victim].map(|pod| address(pod, true));
    let mut rng = Rng::with_seed(1);
    paced("SYN from a pod", 2 * count, rate, |number| {
        // Half of them to ports without a server.
        let to = if number % 2 == 0 { PORT } else { rng.u16(10_000..) };
        let segment = Payload::tcp(rng.u16(1024..), to, TcpFlags::SYN);
        attacker.send(&Ip::new(ends[0], ends[1]).packet(&segment))
    })?;
    let other = scene.world.stage.pod("other").await?;
    Scene::talks_out(&scene.victim, &other)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    ensure!(
        scene.refused(&scene.attacker, "from_pod").await? > 0,
        "the attacker is not named"
    );
    ensure!(scene.refused(&scene.victim, "from_pod").await? == 0, "the victim pays");
    Ok(())
}
