//! Sends data in both directions, and compares every byte.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{bind::when_free, namespaces::Namespaces, traffic::new_token};

const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes that differ between runs and do not repeat at a power of two.
pub fn pattern(length: usize) -> Vec<u8> {
    let seed = new_token().into_bytes();
    let byte = |at: usize| seed[at % seed.len()].wrapping_add(u8::try_from(at % 251).expect("less than 256"));
    (0..length).map(byte).collect()
}

/// Opens one TCP connection from `client` to `to`, served by `server` on `port`: `length` bytes to the server and back.
pub fn tcp_echo(client: &Namespaces, to: SocketAddr, server: &Namespaces, port: u16, length: usize) -> Result<()> {
    let listener = server.enter(|| when_free(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))))??;
    listener.set_nonblocking(true)?;
    let data = pattern(length);
    let (listening, received) = thread::scope(|scope| {
        let thread = scope.spawn(|| serve_tcp(&listener));
        let received = client.enter(|| ask_tcp(to, &data));
        (thread.join().expect("a server does not panic"), received)
    });
    let what = || format!("{length} bytes over TCP from {} to {to}", client.name());
    let received = received?.with_context(what)?;
    listening.with_context(what)?;
    ensure!(received == data, "{} came back changed", what());
    Ok(())
}

fn serve_tcp(listener: &TcpListener) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e),
        }
    };
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut data = Vec::new();
    stream.read_to_end(&mut data)?;
    stream.write_all(&data)
}

fn ask_tcp(to: SocketAddr, data: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(data)?;
    stream.shutdown(Shutdown::Write)?;
    let mut received = Vec::new();
    stream.read_to_end(&mut received)?;
    Ok(received)
}

/// Sends one datagram of `length` bytes from `client` to `to`, and back from `server` on `port`.
pub fn udp_echo(client: &Namespaces, to: SocketAddr, server: &Namespaces, port: u16, length: usize) -> Result<()> {
    let bind = |port| {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        io::Result::Ok(socket)
    };
    let serving = server.enter(|| when_free(|| bind(port)))??;
    let any = SocketAddr::new(
        if to.is_ipv4() {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        },
        0,
    );
    let asking = client.enter(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        io::Result::Ok(socket)
    })??;
    let data = pattern(length);
    let what = || format!("{length} bytes over UDP from {} to {to}", client.name());
    let mut buffer = vec![0; 65_536];
    asking.send(&data).with_context(what)?;
    let (there, from) = serving.recv_from(&mut buffer).with_context(what)?;
    ensure!(buffer[..there] == data, "{} arrived changed", what());
    serving.send_to(&buffer[..there], from).with_context(what)?;
    let back = asking.recv(&mut buffer).with_context(what)?;
    ensure!(buffer[..back] == data, "{} came back changed", what());
    Ok(())
}
