//! Tests each drop reason of egress once. `masquerade_ports` is in `ports`, the reasons of XDP are in `xdp`.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{
    Namespaces, Pod,
    frames::{Ip, Link, PacketSocket, Payload},
    require,
    stage::address,
    traffic::{NoAnswer, new_token, udp_ask},
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

const SHORT: Duration = Duration::from_millis(300);

/// Sends a packet from a pod unchanged.
async fn send(world: &World, pod: &Pod, packet: &[u8]) -> Result<()> {
    let [own, gateway] = world.stage.macs(pod, "eth0").await?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    Ok(socket.send(&Link::new(own, gateway).frame(packet))?)
}

#[tokio::test(flavor = "multi_thread")]
async fn protocols_without_ports_and_too_many_hops() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("protocol", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("protocol").await?;
    for (count, v4) in FAMILIES.into_iter().enumerate() {
        let count = u64::try_from(count)?;
        let ip = Ip::new(address(&pod, v4), server(v4).ip());
        // GRE has no ports.
        let tunnelled = Payload::Raw {
            protocol: 47,
            bytes: vec![0; 16],
        };
        send(&world, &pod, &ip.packet(&tunnelled)).await?;
        world
            .stage
            .wait_for_drops(&pod, "from_pod", "masquerade_protocol", count + 1)
            .await?;
        let last = ip.clone().hop_limit(1).packet(&Payload::udp(4000, PORT, b"x"));
        send(&world, &pod, &last).await?;
        world
            .stage
            .wait_for_drops(&pod, "from_pod", "time_exceeded", count + 1)
            .await?;
    }
    udp_ask(&pod.inside, server(true).ip(), PORT, patience()).context("others go on")?;
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_address_of_the_family_nothing_leaves() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("homeless", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("homeless").await?;
    world.stage.node.ip(&[&format!(
        "address del {}/64 dev uplink0",
        kni_integration::node::NODE_V6
    )])?;
    world.wait_for_uplink(|uplink| uplink.sources.len() == 1).await?;
    assert_eq!(
        udp_ask(&pod.inside, server(false).ip(), PORT, SHORT),
        Err(NoAnswer::Timeout)
    );
    world
        .stage
        .wait_for_drops(&pod, "from_pod", "masquerade_address", 1)
        .await?;
    udp_ask(&pod.inside, server(true).ip(), PORT, patience()).context("IPv4 goes on")?;
    // Without the uplink there is no address.
    world.stage.node.ip(&["link set uplink0 down"])?;
    world.wait_for_uplink(|uplink| uplink.ifname.is_empty()).await?;
    assert_eq!(
        udp_ask(&pod.inside, server(true).ip(), PORT, SHORT),
        Err(NoAnswer::Timeout)
    );
    world
        .stage
        .wait_for_drops(&pod, "from_pod", "masquerade_address", 2)
        .await?;
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_big_is_told_and_counted() -> Result<()> {
    require!(root, netns, bpf, ip);
    let manifests = masquerading()
        .into_iter()
        .map(|network| network.spec("mtu: 4000"))
        .collect();
    let world = World::start("big", manifests, &[]).await?;
    let watch = world.watch()?;
    let pod = world.stage.pod("big").await?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    for (count, v4) in FAMILIES.into_iter().enumerate() {
        let token = new_token();
        let data = [token.as_bytes(), &[0; 3000]].concat();
        let mut ip = Ip::new(address(&pod, v4), server(v4).ip());
        ip.v4_fragment = 0x4000;
        send(&world, &pod, &ip.packet(&Payload::udp(4000, PORT, &data))).await?;
        let (at, kind) = if v4 { (34, [3, 4]) } else { (54, [2, 0]) };
        let answer = socket.receive(patience(), |frame| frame.get(at..at + 2) == Some(&kind[..]))?;
        let answer = answer.with_context(|| format!("no error, IPv4: {v4}"))?;
        // The MTU is in the last bytes of the header's second word.
        assert_eq!(answer[at + 6..at + 8], 1500_u16.to_be_bytes(), "{answer:02x?}");
        world
            .stage
            .wait_for_drops(&pod, "from_pod", "too_big", u64::try_from(count)? + 1)
            .await?;
    }
    drop(watch);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_leave_through_the_stack_untranslated_does_not() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("untranslated", masquerading(), &[]).await?;
    let watch = world.watch()?;
    // A subnet on a second interface; the node routes a part of it back through the uplink.
    let beside = Namespaces::fresh_net("untranslated-beside")?;
    world.stage.node.veth("side0", &beside, "host0")?;
    world.stage.node.add_address("side0", "172.30.0.1/16")?;
    world.stage.node.add_address("side0", "fd30::1/64")?;
    world.stage.node.ip(&[
        &format!("route add 172.30.5.0/24 via {}", kni_integration::node::FABRIC_V4),
        &format!("route add fd30::5:0/112 via {}", kni_integration::node::FABRIC_V6),
    ])?;
    for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        let file = format!("/proc/sys/net/{name}");
        world.stage.node.enter(|| fs::write(&file, "1"))??;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let pod = world.stage.pod("untranslated").await?;
    for (count, to) in ["172.30.5.1", "fd30::5:1"].into_iter().enumerate() {
        let to: IpAddr = to.parse()?;
        assert_eq!(udp_ask(&pod.inside, to, PORT, SHORT), Err(NoAnswer::Timeout));
        world
            .stage
            .wait_for_drops(&pod, "to_uplink", "untranslated", u64::try_from(count)? + 1)
            .await?;
    }
    udp_ask(&pod.inside, server(true).ip(), 9, patience()).expect_err("the port is closed, but traffic was seen");
    watch.assert_clean();
    Ok(())
}
