//! Answers lines, datagrams and HTTP with the server's name, and prints a line per connection.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    thread,
};

use crate::options::Options;

/// Serves until the process ends.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let name = options.value("name").map_or_else(hostname, str::to_owned);
    let mut servers = Vec::new();
    for port in options.ports("tcp")? {
        let (listener, name) = (listen(port)?, name.clone());
        servers.push(thread::spawn(move || {
            accept(&listener, "tcp", &move |s, peer| lines(s, peer, &name));
        }));
    }
    for port in options.ports("http")? {
        let (listener, name) = (listen(port)?, name.clone());
        let fail = options.value("fail-file").map(str::to_owned);
        servers.push(thread::spawn(move || {
            accept(&listener, "http", &move |s, peer| http(s, peer, &name, fail.as_deref()));
        }));
    }
    for port in options.ports("udp")? {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).map_err(|e| format!("UDP port {port}: {e}"))?;
        let name = name.clone();
        servers.push(thread::spawn(move || datagrams(&socket, &name)));
    }
    println!("{name} serves");
    for server in servers {
        // A server ends by a panic only, which has printed itself.
        drop(server.join());
    }
    Ok(())
}

/// Both families: the socket of IPv6 takes IPv4 as well.
fn listen(port: u16) -> Result<TcpListener, String> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).map_err(|e| format!("TCP port {port}: {e}"))
}

type Serve<'a> = dyn Fn(&TcpStream, SocketAddr) -> std::io::Result<()> + Sync + 'a;

fn accept(listener: &TcpListener, kind: &str, serve: &Serve<'_>) {
    thread::scope(|scope| {
        for stream in listener.incoming().flatten() {
            let Ok(peer) = stream.peer_addr().map(plain) else {
                continue;
            };
            println!("{kind} connection from {peer}");
            // A client that leaves early is no matter of ours.
            scope.spawn(move || drop(serve(&stream, peer)));
        }
    });
}

fn lines(stream: &TcpStream, peer: SocketAddr, name: &str) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream;
    for line in BufReader::new(stream).lines() {
        out.write_all(format!("{name} {peer} {}\n", line?).as_bytes())?;
    }
    Ok(())
}

fn http(stream: &TcpStream, peer: SocketAddr, name: &str, fail: Option<&str>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let path = request.split(' ').nth(1).unwrap_or_default();
    let is_health = ["/healthz", "/readyz"].contains(&path);
    let failing = is_health && fail.is_some_and(|file| Path::new(file).exists());
    let (status, body) = match (failing, is_health) {
        (true, _) => ("503 Service Unavailable", "failing\n".to_owned()),
        (false, true) => ("200 OK", "ok\n".to_owned()),
        (false, false) => ("200 OK", format!("{name} {peer}\n")),
    };
    let length = body.len();
    let mut out = stream;
    out.write_all(
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").as_bytes(),
    )
}

fn datagrams(socket: &UdpSocket, name: &str) {
    let mut buffer = [0; 2048];
    loop {
        // An error is one of an earlier answer: its receiver has gone.
        let Ok((length, peer)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        let shown = plain(peer);
        println!("udp datagram from {shown}");
        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
        drop(socket.send_to(format!("{name} {shown} {text}").as_bytes(), peer));
    }
}

/// An address of IPv4 that came through a socket of IPv6, as it is written.
fn plain(peer: SocketAddr) -> SocketAddr {
    SocketAddr::new(peer.ip().to_canonical(), peer.port())
}

fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}
