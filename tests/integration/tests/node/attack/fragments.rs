//! Tests floods of first fragments without later ones: datagrams of others arrive whole, also those whose later
//! fragments are late.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    echo::pattern,
    frames::{Ip, Payload},
    long, patience, require,
    stage::address,
};

use super::{
    PORT,
    scene::{Scene, Sender, node, paced},
};

const PROTOCOL_UDP: u8 = 17;
/// Ports of the bystanders' fragmented datagrams.
const PORTS: [u16; 2] = [9001, 9002];

fn size() -> (u32, u32) {
    if long() {
        (1_000_000, 100_000)
    } else {
        (30_000, 100_000)
    }
}

/// A first fragment of its own datagram; `number` makes it different from all others.
fn first(ends: [IpAddr; 2], number: u32) -> Vec<u8> {
    let [.., high, low] = number.to_be_bytes();
    let mut ip = Ip::new(ends[0], ends[1]);
    ip.id = u16::from_be_bytes([high, low]);
    // The protocol's ports differ where the identification repeats.
    let port = u16::try_from(20_000 + (number >> 16)).unwrap_or(u16::MAX);
    let datagram = Payload::udp(port, PORT, &[0; 40]).to_bytes((ends[0], ends[1]));
    ip.fragment(PROTOCOL_UDP, &datagram, 0, true)
}

/// Sends a datagram in two fragments from the left to the right bystander, with `between` in between.
async fn late(scene: &Scene, between: impl FnOnce() -> Result<()>) -> Result<()> {
    let sender = scene.inside(&scene.left).await?;
    let ends = [&scene.left, &scene.right].map(|pod| address(pod, true));
    let to = SocketAddr::new(ends[1], PORTS[1]);
    let socket = scene.right.enter(|| UdpSocket::bind(to))??;
    socket.set_read_timeout(Some(patience()))?;
    let data = pattern(2000);
    let mut ip = Ip::new(ends[0], ends[1]);
    ip.id = 0x4242;
    let fragments = ip.fragments(&Payload::udp(PORTS[0], PORTS[1], &data), 1000);
    sender.send(&fragments[0])?;
    between()?;
    for fragment in &fragments[1..] {
        sender.send(fragment)?;
    }
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).context("the datagram is lost")?;
    ensure!(buffer[..length] == data, "the datagram arrived changed");
    Ok(())
}

fn flood(what: &str, sender: &Sender, ends: [IpAddr; 2]) -> Result<u32> {
    let (count, rate) = size();
    paced(what, count, rate, |number| sender.send(&first(ends, number)))?;
    Ok(count)
}

#[tokio::test(flavor = "multi_thread")]
async fn fragments_from_outside_that_lead_nowhere_displace_no_others() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("fragments-outside", &[]).await?;
    let bystanders = scene.bystanders()?;
    let outside = scene.outside()?;
    let ends = ["198.18.0.1".parse()?, node()?];
    late(&scene, || {
        flood("first fragments from outside", &outside, ends).map(drop)
    })
    .await?;
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_fragments_of_a_pod_displace_no_others() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("fragments-inside", &[]).await?;
    let bystanders = scene.bystanders()?;
    let attacker = scene.inside(&scene.attacker).await?;
    // No pod has this address.
    let ends = [address(&scene.attacker, true), "10.244.255.254".parse()?];
    let mut sent = 0;
    late(&scene, || {
        sent = flood("refused first fragments of a pod", &attacker, ends)?;
        Ok(())
    })
    .await?;
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    let stage = &scene.world.stage;
    let dropped = stage.drops(&scene.attacker, "from_pod", "no_destination").await?;
    ensure!(
        dropped == u64::from(sent),
        "{dropped} of {sent} fragments are counted as the attacker's"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn datagrams_of_others_pass_beside_a_flood_of_fragments() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("fragments-beside", &[]).await?;
    let bystanders = scene.bystanders()?;
    let attacker = scene.inside(&scene.attacker).await?;
    let ends = [&scene.attacker, &scene.victim].map(|pod| address(pod, true));
    let (left, right) = (scene.left.inside.clone(), scene.right.inside.clone());
    let to = SocketAddr::new(address(&scene.right, true), PORTS[1]);
    let flooding = std::thread::spawn(move || flood("first fragments of a pod", &attacker, ends));
    let mut datagrams = 0;
    while !flooding.is_finished() || datagrams == 0 {
        kni_integration::echo::udp_echo(&left, to, &right, PORTS[1], 4000)?;
        datagrams += 1;
    }
    flooding.join().expect("a sender does not panic")?;
    println!("{datagrams} fragmented datagrams there and back meanwhile");
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await
}
