//! Tests the limits of ports: ports of the node's own sockets are not used, and a flow without a free port is dropped
//! and counted.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    agent::{METRICS, metrics},
    bind::when_free,
    eventually, patience, require,
    traffic::tcp_get,
};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, server},
};

/// Usually enough for both sides to close a connection; otherwise the next one takes a second longer.
const CLOSED: Duration = Duration::from_millis(50);

fn any(v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flow_without_a_port_is_dropped_and_counted() -> Result<()> {
    require!(root, netns, bpf, ip);
    let args = ["--masquerade-ports", "61000-61003", "--metrics-address", METRICS];
    let world = World::start("exhausted", masquerading(), &args).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("exhausted").await?;
    let mut asking = Vec::new();
    for v4 in FAMILIES {
        let sockets: Vec<UdpSocket> = pod.enter(|| {
            let open = |_| {
                let socket = UdpSocket::bind(SocketAddr::new(any(v4), 0))?;
                socket.connect(server(v4))?;
                socket.set_read_timeout(Some(patience()))?;
                Ok(socket)
            };
            (0..5).map(open).collect::<std::io::Result<_>>()
        })??;
        let mut ports = std::collections::BTreeSet::new();
        let mut buffer = [0; 512];
        for socket in &sockets[..4] {
            socket.send(b"question")?;
            let length = socket.recv(&mut buffer).context("one of four ports")?;
            let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
            let client: SocketAddr = answer.split(' ').nth(1).context("no client")?.parse()?;
            ports.insert(client.port());
        }
        assert_eq!(ports.into_iter().collect::<Vec<_>>(), [61_000, 61_001, 61_002, 61_003]);
        let before = world.stage.drops(&pod, "from_pod", "masquerade_ports").await?;
        sockets[4].send(b"question")?;
        world
            .stage
            .wait_for_drops(&pod, "from_pod", "masquerade_ports", before + 1)
            .await?;
        sockets[4].set_nonblocking(true)?;
        assert!(sockets[4].recv(&mut buffer).is_err(), "there is no fifth port");
        // The same ports are free for another destination.
        let router = kni_integration::Outside::router_address(v4)?;
        let elsewhere = tcp_get(&pod.inside, router, 9, patience());
        assert_eq!(elsewhere, Err(kni_integration::traffic::NoAnswer::Refused));
        asking.extend(sockets.into_iter().take(4));
    }
    // The sweep of the flow tables counts once a second; a flow that is used does not expire.
    eventually(patience(), async || {
        for socket in &asking {
            socket.send(b"again")?;
        }
        let page = metrics(&world.stage.node, METRICS)?;
        for family in ["ipv4", "ipv6"] {
            let line = page
                .lines()
                .find(|line| line.starts_with("kni_") && line.contains(family) && line.contains("udp"));
            ensure!(line.is_some_and(|line| line.ends_with(" 4")), "{line:?} of\n{page}");
        }
        Ok(())
    })
    .await?;
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_of_a_socket_of_the_node_is_not_taken() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("sockets", masquerading(), &["--masquerade-ports", "61000-61001"]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("sockets").await?;
    for v4 in FAMILIES {
        let held = world.stage.node.enter(|| {
            let at = SocketAddr::new(any(v4), 61_000);
            std::io::Result::Ok((when_free(|| TcpListener::bind(at))?, when_free(|| UdpSocket::bind(at))?))
        })??;
        for attempt in 0..20 {
            let answer = tcp_get(&pod.inside, server(v4).ip(), PORT, patience());
            let answer = answer.with_context(|| format!("connection {attempt}"))?;
            assert_eq!(answer.client.port(), 61_001, "the other one is a socket's");
            // The server closes after the client. Before, the port is not free, and a SYN would be repeated after a
            // second.
            tokio::time::sleep(CLOSED).await;
        }
        let socket = pod.enter(|| {
            let socket = UdpSocket::bind(SocketAddr::new(any(v4), 0))?;
            socket.connect(server(v4))?;
            socket.set_read_timeout(Some(patience()))?;
            std::io::Result::Ok(socket)
        })??;
        socket.send(b"question")?;
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer)?;
        assert!(String::from_utf8_lossy(&buffer[..length]).contains(":61001 "));
        drop(held);
    }
    watch.assert_clean();
    Ok(())
}
