//! Tests that a connection to a port of the node takes no answers of a connection that the pod already has with the
//! same address and port outside.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces, Pod, eventually,
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
};
use kni_proto::kni::{PortMapping, Protocol};
use socket2::{Domain, Protocol as Transport, Socket, Type};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

const SHORT: Duration = Duration::from_millis(500);
const NODE_PORTS: [u16; 2] = [30_080, 30_081];
/// The port of the client.
const CLIENT: u16 = 5555;

fn socket(v4: bool, from: u16) -> io::Result<Socket> {
    let any: IpAddr = if v4 { "0.0.0.0" } else { "::" }.parse().map_err(io::Error::other)?;
    let domain = if v4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::STREAM, Some(Transport::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if !v4 {
        socket.set_only_v6(true)?;
    }
    socket.bind(&SocketAddr::new(any, from).into())?;
    Ok(socket)
}

/// Opens a connection from the given port.
fn connect(ns: &Namespaces, from: u16, to: SocketAddr, timeout: Duration) -> Result<TcpStream> {
    let stream = ns.enter(|| -> io::Result<TcpStream> {
        let socket = socket(to.is_ipv4(), from)?;
        socket.connect_timeout(&to.into(), timeout)?;
        Ok(socket.into())
    })??;
    stream.set_read_timeout(Some(patience()))?;
    Ok(stream)
}

fn listener(ns: &Namespaces, v4: bool, port: u16) -> Result<TcpListener> {
    let listening = ns.enter(|| -> io::Result<TcpListener> {
        let socket = socket(v4, port)?;
        socket.listen(16)?;
        Ok(socket.into())
    })?;
    listening.context("listen")
}

/// Returns every byte to its sender, on each connection.
fn echo(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            thread::spawn(move || {
                let (mut from, mut to) = (&stream, &stream);
                io::copy(&mut from, &mut to)
            });
        }
    });
}

fn echoed(stream: &mut TcpStream, text: &[u8]) -> Result<()> {
    stream.write_all(text)?;
    let mut found = vec![0; text.len()];
    stream.read_exact(&mut found)?;
    ensure!(found == text, "{found:?} came back");
    Ok(())
}

async fn start(name: &str) -> Result<(World, Pod)> {
    let world = World::start(name, masquerading(), &[]).await?;
    let mappings = NODE_PORTS.map(|port| PortMapping {
        protocol: Protocol::Tcp.into(),
        container_port: PORT.into(),
        host_port: port.into(),
        host_ip: String::new(),
    });
    let edit = |request: &mut kni_proto::kni::AttachInterfaceRequest| request.port_mappings = mappings.to_vec();
    let pod = world.stage.kubelet.run_pod_with("team", name, &[], edit).await?;
    Ok((world, pod))
}

async fn refused(world: &World, pod: &Pod, more_than: u64) -> Result<u64> {
    eventually(patience(), async || {
        let drops = world.stage.drops(pod, "from_uplink", "tuple_in_use").await?;
        ensure!(drops > more_than, "{drops} connections are refused, {more_than} before");
        Ok(drops)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ports_of_the_node_keep_connections_of_one_client_port_apart() -> Result<()> {
    require!(root, netns, bpf, ip);
    let (world, pod) = start("tuples").await?;
    let mut drops = 0;
    for v4 in FAMILIES {
        echo(listener(&pod.inside, v4, PORT)?);
        let node: IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let [one, other] = NODE_PORTS.map(|port| SocketAddr::new(node, port));
        let client = &world.outside.server;
        let mut first = connect(client, CLIENT, one, patience())?;
        echoed(&mut first, b"before")?;
        let second = connect(client, CLIENT, other, SHORT);
        ensure!(second.is_err(), "both connections have the same answers");
        for round in 0..3 {
            echoed(&mut first, b"after").with_context(|| format!("{one}: the first connection, round {round}"))?;
        }
        drops = refused(&world, &pod, drops).await?;
        // From another port of the client it works.
        echoed(&mut connect(client, CLIENT + 1, other, patience())?, b"other")?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_of_the_pod_from_its_port_lives_on() -> Result<()> {
    require!(root, netns, bpf, ip);
    let (world, pod) = start("own-tuple").await?;
    let mut drops = 0;
    for v4 in FAMILIES {
        echo(listener(&pod.inside, v4, PORT)?);
        echo(listener(&world.outside.server, v4, CLIENT)?);
        let node: IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let to = SocketAddr::new(server(v4).ip(), CLIENT);
        let mut own =
            connect(&pod.inside, PORT, to, patience()).with_context(|| format!("from {}", address(&pod, v4)))?;
        echoed(&mut own, b"before")?;
        let second = connect(
            &world.outside.server,
            CLIENT,
            SocketAddr::new(node, NODE_PORTS[0]),
            SHORT,
        );
        ensure!(second.is_err(), "both connections have the same tuple in the pod");
        for round in 0..3 {
            echoed(&mut own, b"after").with_context(|| format!("{to}: the pod's own connection, round {round}"))?;
        }
        drops = refused(&world, &pod, drops).await?;
    }
    Ok(())
}
