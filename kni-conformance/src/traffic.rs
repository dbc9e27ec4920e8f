//! Exchanges TCP data and UDP datagrams between network namespaces.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    time::timeout,
};

use crate::{
    error::{During as _, Result, require},
    limits::scaled,
    namespace::Netns,
    sandbox::Pod,
};

/// Long enough for the repetition of a lost packet.
const LIMIT: Duration = Duration::from_secs(4);
const REQUEST: &[u8] = b"request of the suite";
const RESPONSE: &[u8] = b"response of the suite";

/// Checks TCP between two pods, with connections from each to the other, in each family that both have. Returns the
/// number of families.
pub(crate) async fn check_both_ways(one: &Pod, other: &Pod) -> Result<usize> {
    let mut families = 0;
    for v4 in [true, false] {
        let (Some(one_ip), Some(other_ip)) = (one.address(v4), other.address(v4)) else {
            continue;
        };
        families += 1;
        check_tcp((&one.sandbox.netns, one_ip), (&other.sandbox.netns, other_ip)).await?;
        check_tcp((&other.sandbox.netns, other_ip), (&one.sandbox.netns, one_ip)).await?;
    }
    Ok(families)
}

/// Checks a TCP connection with data in both directions. The server must see the client's own address.
pub(crate) async fn check_tcp(client: (&Netns, IpAddr), server: (&Netns, IpAddr)) -> Result<()> {
    let what = format!("TCP from {} to {}", client.1, server.1);
    let listener = listen(server.0, SocketAddr::new(server.1, 0))
        .await
        .map_err(|f| f.about(&what))?;
    let to = listener.local_addr().during(what.clone())?;
    let (mut stream, mut far, from) = connected(client.0, to, &listener).await.during(what.clone())?;
    require!(
        from.ip().to_canonical() == client.1,
        "{what}: the server sees the client as {}",
        from.ip()
    );
    exchange(&mut stream, &mut far).await.during(what)
}

/// A TCP server inside a namespace.
pub(crate) async fn listen(netns: &Netns, at: SocketAddr) -> Result<TcpListener> {
    let listener = netns.run(move || std::net::TcpListener::bind(at)).await?;
    let listener = listener.and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    listener.during(format!("listen at {at} inside"))
}

/// Both ends of a new connection, and the client as the server sees it.
async fn connected(
    client: &Netns,
    to: SocketAddr,
    server: &TcpListener,
) -> io::Result<(TcpStream, TcpStream, SocketAddr)> {
    let accept = async { timeout(scaled(LIMIT), server.accept()).await? };
    let (near, (far, from)) = tokio::try_join!(connect(client, to), accept)?;
    Ok((near, far, from))
}

/// Connects from inside a namespace.
async fn connect(netns: &Netns, to: SocketAddr) -> io::Result<TcpStream> {
    let limit = scaled(LIMIT);
    let connect = move || {
        let stream = std::net::TcpStream::connect_timeout(&to, limit)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    let stream: io::Result<_> = netns.run(connect).await.map_err(io::Error::other)?;
    TcpStream::from_std(stream?)
}

/// Sends data in both directions of a connection.
async fn exchange(client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
    client.write_all(REQUEST).await?;
    expect(server, REQUEST).await?;
    server.write_all(RESPONSE).await?;
    expect(client, RESPONSE).await
}

async fn expect(stream: &mut TcpStream, expected: &[u8]) -> io::Result<()> {
    let mut received = vec![0; expected.len()];
    timeout(scaled(LIMIT), stream.read_exact(&mut received)).await??;
    if received == expected {
        Ok(())
    } else {
        Err(io::Error::other("other data arrived"))
    }
}

/// Whether a TCP connection from `client` to `to` reaches the server, with data in both directions.
pub(crate) async fn reaches_tcp(client: &Netns, to: SocketAddr, server: &TcpListener) -> io::Result<()> {
    let (mut stream, mut far, _from) = connected(client, to, server).await?;
    exchange(&mut stream, &mut far).await
}

/// Whether a datagram from `client` to `to` reaches the server, and the response the client.
pub(crate) async fn reaches_udp(client: &Netns, to: SocketAddr, server: &UdpSocket) -> io::Result<()> {
    let any: IpAddr = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let client = bind_udp(client, SocketAddr::new(any, 0)).await?;
    client.connect(to).await?;
    client.send(REQUEST).await?;
    let (mut buffer, mut early) = ([0; 64], [0; 1]);
    let (length, from) = tokio::select! {
        received = timeout(scaled(LIMIT), server.recv_from(&mut buffer)) => received??,
        // Before a response, the client can receive nothing but the report that the port is closed.
        report = client.recv(&mut early) => {
            report?;
            return Err(io::Error::other("a response arrived before the request"));
        }
    };
    if buffer.get(..length) != Some(REQUEST) {
        return Err(io::Error::other("another datagram arrived"));
    }
    server.send_to(RESPONSE, from).await?;
    let length = timeout(scaled(LIMIT), client.recv(&mut buffer)).await??;
    if buffer.get(..length) == Some(RESPONSE) {
        Ok(())
    } else {
        Err(io::Error::other("another response arrived"))
    }
}

/// A UDP socket inside a namespace.
pub(crate) async fn bind_udp(netns: &Netns, at: SocketAddr) -> io::Result<UdpSocket> {
    let bind = move || {
        let socket = std::net::UdpSocket::bind(at)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    let socket: io::Result<_> = netns.run(bind).await.map_err(io::Error::other)?;
    UdpSocket::from_std(socket?)
}
