//! Tests a tuple that is used alternately with and without translation: earlier flows do not affect later ones.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, require, stage::address, traffic::new_token, wait::patience};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{FAMILIES, HOST_PORT, PORT, Scene, VIP_PORT, node, vip_at};

fn any(v4: bool, port: u16) -> SocketAddr {
    let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
    let mut any: SocketAddr = any.parse().expect("an address");
    any.set_port(port);
    any
}

/// The addresses that lead to the backend's port, in an order in which each follows each.
fn ways(scene: &Scene, v4: bool) -> Vec<SocketAddr> {
    let direct = SocketAddr::new(address(&scene.backend, v4), PORT);
    let (virtual_, host) = (vip_at(v4, VIP_PORT), SocketAddr::new(node(v4), HOST_PORT));
    vec![
        direct, virtual_, direct, host, virtual_, host, direct, direct, virtual_, virtual_,
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn tcp_connections_with_one_tuple_follow_each_other() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("reuse-tcp").await?;
    for v4 in FAMILIES {
        for (first, from_port) in [(0, 41_000), (1, 42_000)] {
            for to in ways(&scene, v4).into_iter().skip(first) {
                connect(&scene.client.inside, from_port, to).with_context(|| format!("port {from_port} to {to}"))?;
            }
        }
    }
    Ok(())
}

/// Opens a connection from the given port, which ends with a reset, so that no socket holds the tuple in `TIME_WAIT`.
fn connect(from: &Namespaces, port: u16, to: SocketAddr) -> Result<()> {
    let token = new_token();
    let line = from.enter(|| {
        let socket = connected(port, to)?;
        socket.set_read_timeout(Some(patience()))?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(format!("{token}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        anyhow::Ok(line)
    })??;
    ensure!(
        line.starts_with("backend ") && line.contains(&token),
        "answered {line:?}"
    );
    Ok(())
}

/// A process that another test starts holds copies of all sockets until it executes its own program; the tuple is in
/// use until then.
fn connected(port: u16, to: SocketAddr) -> io::Result<Socket> {
    let end = Instant::now() + patience();
    loop {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_linger(Some(Duration::ZERO))?;
        socket.bind(&SockAddr::from(any(to.is_ipv4(), port)))?;
        match socket.connect_timeout(&SockAddr::from(to), patience()) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && Instant::now() < end => {
                thread::sleep(Duration::from_millis(1));
            }
            done => return done.map(|()| socket),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn udp_from_one_port_takes_all_ways_in_turn() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("reuse-udp").await?;
    for v4 in FAMILIES {
        for first in [0, 1] {
            // Not connected: the source of the answer is compared with the requested address.
            let socket = scene.client.enter(|| UdpSocket::bind(any(v4, 0)))??;
            socket.set_read_timeout(Some(patience()))?;
            for to in ways(&scene, v4).into_iter().skip(first) {
                let (token, mut buffer) = (new_token(), [0; 512]);
                socket.send_to(token.as_bytes(), to)?;
                let (length, source) = socket.recv_from(&mut buffer).with_context(|| format!("asking {to}"))?;
                let answer = String::from_utf8_lossy(&buffer[..length]);
                ensure!(source == to, "{to} was asked, {source} answered");
                ensure!(
                    answer.starts_with("backend ") && answer.contains(&token),
                    "{to} answered {answer:?}"
                );
            }
        }
    }
    Ok(())
}
