//! Tests host ports as the node's own processes use them, at the node's addresses and at loopback addresses.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Node, Outside, Pod, Stage, eventually,
    manifest::network_policy,
    node::{NODE_V4, NODE_V6},
    require,
    traffic::{NoAnswer, Servers, new_token, tcp_get, udp_ask},
};
use kni_proto::kni::{PortMapping, Protocol};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{
    FAMILIES, PORT,
    world::{APPLIED, World, patience},
};

const SHORT: Duration = Duration::from_millis(400);
pub(super) const HOST_PORT: u16 = 54_323;
/// A program of the node's sockets, while it is attached.
const PIN: &str = "/sys/fs/bpf/kni/v3/node_connect4";
const LOOPBACK: &str = "127.0.0.1";

/// A node whose agent finds cgroup2.
pub(super) async fn start(name: &str) -> Result<World> {
    let node = Node::new(name)?;
    node.run("mount", &["-t", "cgroup2", "none", "/sys/fs/cgroup"])?;
    let outside = Outside::new(&node)?;
    World::on(node, outside, Manifest::overlapping(), &[]).await
}

pub(super) async fn run(
    stage: &Stage,
    name: &str,
    protocols: &[Protocol],
    host_ip: &str,
) -> Result<Pod, tonic::Status> {
    let mapping = |protocol: &Protocol| PortMapping {
        protocol: (*protocol).into(),
        container_port: PORT.into(),
        host_port: HOST_PORT.into(),
        host_ip: host_ip.into(),
    };
    stage
        .kubelet
        .run_pod_with("team", name, &[], |request| {
            request.port_mappings = protocols.iter().map(mapping).collect();
        })
        .await
}

const BOTH: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// Destinations of a family that mean the node, in every way in which a program may name them.
pub(super) fn places(v4: bool) -> Result<Vec<IpAddr>> {
    let texts: &[&str] = if v4 {
        &[NODE_V4, LOOPBACK, "127.9.9.9", "0.0.0.0"]
    } else {
        &[NODE_V6, "::1", "::"]
    };
    let mut places = texts
        .iter()
        .map(|text| Ok(text.parse()?))
        .collect::<Result<Vec<IpAddr>>>()?;
    if v4 {
        for text in [NODE_V4, LOOPBACK] {
            places.push(text.parse::<Ipv4Addr>()?.to_ipv6_mapped().into());
        }
    }
    Ok(places)
}

/// What a socket without a connection gets: the identity, and where the answer comes from.
fn ask_unconnected(from: &Namespaces, to: SocketAddr) -> Result<(String, SocketAddr)> {
    from.enter(|| -> Result<(String, SocketAddr)> {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(patience()))?;
        let mut answer = None;
        // The second datagram is one of a flow.
        for _ in 0..2 {
            let token = new_token();
            socket.send_to(token.as_bytes(), to)?;
            let mut buffer = vec![0; 2048];
            let (length, source) = socket.recv_from(&mut buffer)?;
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            ensure!(text.contains(&token), "{text:?} does not answer {token}");
            let identity = text.split(' ').next().unwrap_or_default().to_owned();
            answer = Some((identity, source));
        }
        answer.context("two answers")
    })?
}

/// Connects from a given own address.
fn get_from(at: &Namespaces, own: &str, to: SocketAddr) -> Result<String, NoAnswer> {
    let own: IpAddr = own.parse().map_err(|error| NoAnswer::Other(format!("{error}")))?;
    at.enter(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&SockAddr::from(SocketAddr::new(own, 0)))?;
        socket.connect_timeout(&SockAddr::from(to), patience())?;
        ask(&TcpStream::from(socket))
    })
    .map_err(|error| NoAnswer::Other(format!("{error:#}")))?
}

/// A request and its answer on an open connection, which serves one.
fn ask(mut stream: &TcpStream) -> Result<String, NoAnswer> {
    stream.set_read_timeout(Some(patience()))?;
    stream.write_all(format!("{}\n", new_token()).as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line.split(' ').next().unwrap_or_default().to_owned())
}

fn answers(node: &Namespaces, to: IpAddr, who: &str) -> Result<()> {
    let tcp = tcp_get(node, to, HOST_PORT, patience()).with_context(|| format!("TCP {to}"))?;
    let udp = udp_ask(node, to, HOST_PORT, patience()).with_context(|| format!("UDP {to}"))?;
    for answer in [tcp, udp] {
        assert_eq!(answer.identity, who, "{to}");
        let client = answer.client.ip().to_canonical();
        assert!(
            !client.is_loopback() && !client.is_unspecified(),
            "{to}: the pod sees {client}"
        );
    }
    if to.is_unspecified() {
        return Ok(());
    }
    let place = SocketAddr::new(to, HOST_PORT);
    let (identity, source) = ask_unconnected(node, place).with_context(|| format!("UDP {to} without a connection"))?;
    assert_eq!(
        (identity.as_str(), source),
        (who, place),
        "the answer comes from where the question went"
    );
    Ok(())
}

fn refused(node: &Namespaces, to: IpAddr) {
    assert_eq!(
        tcp_get(node, to, HOST_PORT, patience()),
        Err(NoAnswer::Refused),
        "TCP {to}"
    );
    assert_eq!(
        udp_ask(node, to, HOST_PORT, patience()),
        Err(NoAnswer::Refused),
        "UDP {to}"
    );
}

fn is_attached(world: &World) -> Result<bool> {
    world.stage.node.enter(|| Path::new(PIN).exists())
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_of_the_node_reach_a_host_port() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = start("own").await?;
    let node: &Namespaces = &world.stage.node;
    ensure!(!is_attached(&world)?, "nothing needs the programs yet");
    for v4 in FAMILIES {
        places(v4)?.into_iter().for_each(|to| refused(node, to));
    }
    let pod = run(&world.stage, "served", &BOTH, "").await?;
    let _servers = Servers::start(&pod.inside, "served", PORT)?;
    for v4 in FAMILIES {
        for to in places(v4)? {
            answers(node, to, "served")?;
        }
    }
    ensure!(is_attached(&world)?, "the programs are pinned");
    let status = world.stage.status().await?.uplink.context("an uplink")?;
    assert_eq!(status.warning, "");
    // Bound to an address of the node, as a client of the port at a loopback address may be.
    let at = |to: &str| -> Result<SocketAddr> { Ok(SocketAddr::new(to.parse()?, HOST_PORT)) };
    assert_eq!(get_from(node, NODE_V4, at(LOOPBACK)?).as_deref(), Ok("served"));
    assert_eq!(get_from(node, NODE_V6, at("::1")?).as_deref(), Ok("served"));
    // A pod cannot answer a loopback address: such a socket stays with the node, where nothing listens.
    assert_eq!(get_from(node, LOOPBACK, at(LOOPBACK)?), Err(NoAnswer::Refused));
    assert_eq!(get_from(node, "::1", at("::1")?), Err(NoAnswer::Refused));
    // A process of another namespace of this machine has its own loopback addresses.
    let other = Namespaces::fresh_net("own-other")?;
    other.ip(&["link set lo up"])?;
    refused(&other, LOOPBACK.parse()?);
    refused(&other, "::1".parse()?);
    refused(&pod.inside, LOOPBACK.parse()?);
    world.stage.kubelet.delete_network(&pod.id).await?;
    for v4 in FAMILIES {
        places(v4)?.into_iter().for_each(|to| refused(node, to));
    }
    eventually(APPLIED, async || {
        ensure!(!is_attached(&world)?, "the programs are still pinned");
        Ok(())
    })
    .await
}

/// One port, three pods: by protocol and by the address that each asks for.
#[tokio::test(flavor = "multi_thread")]
async fn the_node_distinguishes_addresses_and_protocols() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = start("three").await?;
    let node: &Namespaces = &world.stage.node;
    let pods = [
        run(&world.stage, "loopback", &[Protocol::Tcp], LOOPBACK).await?,
        run(&world.stage, "node", &[Protocol::Tcp], NODE_V4).await?,
        run(&world.stage, "datagrams", &[Protocol::Udp], NODE_V4).await?,
    ];
    let _servers = [
        Servers::start(&pods[0].inside, "loopback", PORT)?,
        Servers::start(&pods[1].inside, "node", PORT)?,
        Servers::start(&pods[2].inside, "datagrams", PORT)?,
    ];
    let [loopback, own]: [IpAddr; 2] = [LOOPBACK.parse()?, NODE_V4.parse()?];
    let at = |address| SocketAddr::new(address, HOST_PORT);
    for _ in 0..2 {
        assert_eq!(get_from(node, NODE_V4, at(loopback)).as_deref(), Ok("loopback"));
        assert_eq!(
            tcp_get(node, loopback, HOST_PORT, patience())
                .map(|answer| answer.identity)
                .as_deref(),
            Ok("loopback")
        );
        assert_eq!(get_from(node, NODE_V4, at(own)).as_deref(), Ok("node"));
        assert_eq!(ask_unconnected(node, at(own))?, ("datagrams".to_owned(), at(own)));
        assert_eq!(
            udp_ask(node, own, HOST_PORT, patience())
                .map(|answer| answer.identity)
                .as_deref(),
            Ok("datagrams")
        );
        // Nothing has the rest.
        assert_eq!(udp_ask(node, loopback, HOST_PORT, patience()), Err(NoAnswer::Refused));
        assert_eq!(
            tcp_get(node, "127.0.0.2".parse()?, HOST_PORT, patience()),
            Err(NoAnswer::Refused)
        );
        assert_eq!(
            tcp_get(node, NODE_V6.parse()?, HOST_PORT, patience()),
            Err(NoAnswer::Refused)
        );
    }
    // From outside there are only the ports at the node's address.
    let client = &world.outside.server;
    assert_eq!(
        tcp_get(client, own, HOST_PORT, patience())
            .map(|answer| answer.identity)
            .as_deref(),
        Ok("node")
    );
    assert_eq!(world.uplink().await?.host_ports, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_and_connections_of_the_node_outlive_the_agent() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut world = start("outlive").await?;
    let node: Namespaces = (*world.stage.node).clone();
    let pod = run(&world.stage, "served", &BOTH, "").await?;
    let _servers = Servers::start(&pod.inside, "served", PORT)?;
    let places: Vec<IpAddr> = FAMILIES
        .iter()
        .map(|v4| places(*v4))
        .collect::<Result<Vec<_>>>()?
        .concat();
    // Open, and idle until the agent has changed.
    let open = |to: &IpAddr| node.enter(|| TcpStream::connect((*to, HOST_PORT)));
    let opened = places
        .iter()
        .map(|to| Ok(open(to)??))
        .collect::<Result<Vec<TcpStream>>>()?;
    world.stage.agent.kill9()?;
    for to in &places {
        answers(&node, *to, "served").context("without an agent")?;
    }
    world.stage.agent.restart()?;
    for (to, stream) in places.iter().zip(&opened) {
        answers(&node, *to, "served").context("after a restart")?;
        assert_eq!(ask(stream).as_deref(), Ok("served"), "a connection to {to} from before");
    }
    world.stage.agent.terminate()?;
    let cleaned = world.stage.agent.cleanup()?;
    ensure!(cleaned.status.success(), "{cleaned:?}");
    ensure!(!is_attached(&world)?, "a program is still pinned");
    for to in &places {
        assert!(tcp_get(&node, *to, HOST_PORT, SHORT).is_err(), "{to} after the cleanup");
    }
    Ok(())
}

/// A policy that allows nothing lets the node in, as kubelets need it, also by the port; hosts outside stay outside.
#[tokio::test(flavor = "multi_thread")]
async fn policies_treat_the_node_as_the_node() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = start("judged").await?;
    let node: &Namespaces = &world.stage.node;
    let pod = run(&world.stage, "served", &BOTH, "").await?;
    let _servers = Servers::start(&pod.inside, "served", PORT)?;
    let spec = "{podSelector: {}, policyTypes: [Ingress], ingress: []}";
    let guard = Manifest::file("guard.yaml", network_policy("team", "guard", spec));
    Manifest::apply(&[guard], node)?;
    let own: IpAddr = NODE_V4.parse()?;
    eventually(APPLIED, async || {
        let outside = tcp_get(&world.outside.server, own, HOST_PORT, SHORT);
        ensure!(outside == Err(NoAnswer::Timeout), "it stays {outside:?}");
        Ok(())
    })
    .await?;
    let direct = tcp_get(node, pod.ip(true).context("an address")?, PORT, patience());
    let direct = direct.context("by the pod's address")?;
    let by_port = tcp_get(node, own, HOST_PORT, patience()).context("by the port")?;
    assert_eq!(by_port.client.ip(), direct.client.ip(), "the pod sees the same client");
    for v4 in FAMILIES {
        for to in places(v4)? {
            answers(node, to, "served")?;
        }
    }
    Ok(())
}

/// Without cgroup2 everything else is served, and the status names what is not.
#[tokio::test(flavor = "multi_thread")]
async fn without_cgroup2_the_status_names_what_is_not_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("without", Manifest::overlapping(), &[]).await?;
    let pod = run(&world.stage, "served", &BOTH, "").await?;
    let _servers = Servers::start(&pod.inside, "served", PORT)?;
    let own: IpAddr = NODE_V4.parse()?;
    let outside = tcp_get(&world.outside.server, own, HOST_PORT, patience());
    assert_eq!(outside.map(|answer| answer.identity).as_deref(), Ok("served"));
    refused(&world.stage.node, own);
    let unserved = "the node's own processes do not reach host ports: cgroup2 is not mounted";
    let status = world.stage.knictl(&["status"])?;
    ensure!(status.contains(unserved), "{status}");
    let doctor = world.stage.knictl(&["doctor"])?;
    ensure!(doctor.contains(unserved), "{doctor}");
    assert_eq!(world.stage.agent.log().matches("do not reach host ports").count(), 1);
    Ok(())
}

/// The node reaches no pod of a network whose addresses others may have: its port is served at the uplink only.
#[tokio::test(flavor = "multi_thread")]
async fn the_node_does_not_reach_ports_of_pods_that_it_does_not_reach() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = start("apart").await?;
    let blue = world
        .stage
        .kubelet
        .run_pod_with(
            "team",
            "blue",
            &[("kni.dev/network", "blue"), ("kni.dev/ips", "10.10.0.11")],
            |request| {
                request.port_mappings = vec![PortMapping {
                    protocol: Protocol::Tcp.into(),
                    container_port: PORT.into(),
                    host_port: HOST_PORT.into(),
                    host_ip: String::new(),
                }];
            },
        )
        .await?;
    let _servers = Servers::start(&blue.inside, "blue", PORT)?;
    let own: IpAddr = NODE_V4.parse()?;
    let outside = tcp_get(&world.outside.server, own, HOST_PORT, patience());
    assert_eq!(outside.map(|answer| answer.identity).as_deref(), Ok("blue"));
    for to in places(true)? {
        refused(&world.stage.node, to);
    }
    ensure!(!is_attached(&world)?, "no program is needed");
    Ok(())
}
