//! Tests that ICMP errors from outside reach the pod's socket (closed port, no route, too big), and the hops of a
//! traceroute.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Outside,
    echo::tcp_echo,
    frames::{Ip, Link, PacketSocket, Payload},
    require,
    stage::address,
    traffic::{NoAnswer, assert_path_limit, new_token, ping, tcp_get, udp_ask},
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

const CLOSED: u16 = 9;

#[tokio::test(flavor = "multi_thread")]
async fn closed_ports_and_missing_ways_are_told() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("refused", masquerading(), &[]).await?;
    let watch = world.watch()?;
    world.outside.router.ip(&[
        // A prohibit route causes an error that sockets report; an unreachable route causes one that they only record.
        "route add prohibit 198.18.0.0/16",
        "route add prohibit 2001:db8:bad::/48",
    ])?;
    let pods = [
        world.stage.pod("refused").await?,
        world
            .stage
            .pod_in("blue", "refused-blue", "10.10.0.11,fd10::11")
            .await?,
    ];
    for v4 in FAMILIES {
        let nowhere: IpAddr = if v4 { "198.18.0.1" } else { "2001:db8:bad::1" }.parse()?;
        for pod in &pods {
            let from = &pod.inside;
            assert_eq!(
                udp_ask(from, server(v4).ip(), CLOSED, patience()),
                Err(NoAnswer::Refused)
            );
            assert_eq!(
                tcp_get(from, server(v4).ip(), CLOSED, patience()),
                Err(NoAnswer::Refused)
            );
            assert_eq!(udp_ask(from, nowhere, PORT, patience()), Err(NoAnswer::Unreachable));
            assert_eq!(tcp_get(from, nowhere, PORT, patience()), Err(NoAnswer::Unreachable));
            // Linux sends a burst of five such errors to one address, and then one per second.
            tokio::time::sleep(Duration::from_millis(1100)).await;
            let echo = ping(from, nowhere, &new_token(), patience());
            assert_eq!(echo, Err(NoAnswer::Unreachable));
        }
    }
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_mtu_of_the_path_is_found() -> Result<()> {
    require!(root, netns, bpf, ip);
    let manifests = masquerading()
        .into_iter()
        .map(|network| network.spec("mtu: 9000"))
        .collect();
    let world = World::start("path", manifests, &[]).await?;
    let watch = world.watch()?;
    world.outside.set_inner_mtu(1300)?;
    let pods = [
        world.stage.pod("path").await?,
        world.stage.pod_in("blue", "path-blue", "10.10.0.11,fd10::11").await?,
    ];
    for v4 in FAMILIES {
        for pod in &pods {
            // Too big for the uplink, which the node reports, then for the link behind the router, which the router
            // reports.
            let to = SocketAddr::new(server(v4).ip(), PORT);
            tcp_echo(&pod.inside, to, &world.outside.server, PORT, 4 << 20)
                .with_context(|| format!("{} to {to}", pod.name))?;
            let router = SocketAddr::new(Outside::router_address(v4)?, PORT);
            assert_path_limit(&pod.inside, router, 4000).context("beyond the uplink's 1500")?;
            // The limit is cached per destination, so a different one is used.
            let inner: IpAddr = if v4 { "203.0.113.81" } else { "2001:db8:203::81" }.parse()?;
            if pod.name == "path" {
                world
                    .outside
                    .server
                    .add_address("server0", &format!("{inner}/{}", if v4 { 24 } else { 64 }))?;
            }
            assert_path_limit(&pod.inside, SocketAddr::new(inner, PORT), 1400).context("beyond the router's 1300")?;
        }
    }
    watch.assert_clean();
    Ok(())
}

/// The reporter of an expired hop limit for this number of hops.
async fn hop(world: &World, pod: &kni_integration::Pod, v4: bool, hops: u8) -> Result<IpAddr> {
    let [own, gateway] = world.stage.macs(pod, "eth0").await?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    let token = new_token();
    let probe = Payload::udp(40_000 + u16::from(hops), 33_434 + u16::from(hops), token.as_bytes());
    let packet = Ip::new(address(pod, v4), server(v4).ip())
        .hop_limit(hops)
        .packet(&probe);
    socket.send(&Link::new(own, gateway).frame(&packet))?;
    let (at, kind) = if v4 { (14 + 20, 11) } else { (14 + 40, 3) };
    // The ports of the quoted packet, which must be those of the pod.
    let quoted = at + 8 + if v4 { 20 } else { 40 };
    let ports = [
        (40_000 + u16::from(hops)).to_be_bytes(),
        (33_434 + u16::from(hops)).to_be_bytes(),
    ]
    .concat();
    let answer = socket.receive(patience(), |frame| {
        frame.get(at) == Some(&kind) && frame.get(quoted..quoted + 4) == Some(&ports[..])
    })?;
    let answer = answer.with_context(|| format!("nobody tells of {hops} hops"))?;
    Ok(if v4 {
        <[u8; 4]>::try_from(&answer[26..30])?.into()
    } else {
        <[u8; 16]>::try_from(&answer[22..38])?.into()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_traceroute_shows_the_node_then_the_router() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("trace", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let pod = world.stage.pod("trace").await?;
    for v4 in FAMILIES {
        let gateway: IpAddr = if v4 { "169.254.1.1" } else { "fe80::1" }.parse()?;
        assert_eq!(hop(&world, &pod, v4, 1).await?, gateway);
        assert_eq!(hop(&world, &pod, v4, 2).await?, Outside::router_address(v4)?);
        // The packet with three hops reaches the server, whose port is closed.
        let closed = udp_ask(&pod.inside, server(v4).ip(), 33_500, patience());
        assert_eq!(closed, Err(NoAnswer::Refused));
    }
    watch.assert_clean();
    Ok(())
}
