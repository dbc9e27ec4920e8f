//! Runs TCP and UDP servers that answer with an identity, and records arriving echo requests.

use std::{
    collections::HashSet,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::{Answer, stream::keep_bursts};
use crate::{bind::when_free, namespaces::Namespaces};

/// Interval at which a waiting server checks whether it must stop.
const LOOK: Duration = Duration::from_millis(50);

/// TCP and UDP on one port, IPv4 and IPv6, and raw sockets that receive the echo requests, all in one namespace.
///
/// Each line of a TCP connection and each UDP datagram is a request; the answer is an [`Answer`]. The sockets keep the
/// namespace alive until the value is dropped.
#[derive(Debug)]
pub struct Servers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    identity: String,
    stop: AtomicBool,
    seen: Mutex<HashSet<String>>,
}

impl Servers {
    /// Starts serving inside `ns` on `port`. The identity must not contain spaces.
    pub fn start(ns: &Namespaces, identity: &str, port: u16) -> Result<Self> {
        let any = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        Self::start_at(ns, identity, &any, port)
    }

    /// [`Self::start`] at these addresses alone. An answer over UDP has the address as its source, which a socket of
    /// all addresses leaves to the routes.
    pub fn start_at(ns: &Namespaces, identity: &str, addresses: &[IpAddr], port: u16) -> Result<Self> {
        let shared = Shared {
            identity: identity.into(),
            stop: AtomicBool::new(false),
            seen: Mutex::default(),
        };
        let mut servers = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
        };
        for at in addresses.iter().copied() {
            let what = || format!("serve {identity} on {at} port {port}");
            let sockets = ns
                .enter(|| Sockets::open(SocketAddr::new(at, port)))?
                .with_context(what)?;
            servers.run(move |shared| shared.serve_tcp(&sockets.tcp));
            servers.run(move |shared| shared.serve_udp(&sockets.udp));
            servers.run(move |shared| shared.witness(&sockets.icmp, at.is_ipv4()));
        }
        Ok(servers)
    }

    /// The identity in its answers.
    pub fn identity(&self) -> &str {
        &self.shared.identity
    }

    /// Whether a request or an echo request with this token arrived.
    pub fn saw(&self, token: &str) -> bool {
        self.shared.seen.lock().expect("no server panics").contains(token)
    }

    /// How many different requests arrived.
    pub fn seen(&self) -> usize {
        self.shared.seen.lock().expect("no server panics").len()
    }

    /// Waits until [`Self::saw`]: the recording lags behind the answers of the kernel.
    pub fn saw_within(&self, token: &str, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while !self.saw(token) {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn run(&mut self, serve: impl FnOnce(&Arc<Shared>) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.threads.push(thread::spawn(move || serve(&shared)));
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A server that panicked has printed the reason; only its end matters here.
            drop(thread.join());
        }
    }
}

struct Sockets {
    tcp: TcpListener,
    udp: UdpSocket,
    icmp: Socket,
}

impl Sockets {
    fn open(at: SocketAddr) -> io::Result<Self> {
        let icmp = if at.is_ipv4() {
            Protocol::ICMPV4
        } else {
            Protocol::ICMPV6
        };
        let tcp = Self::bound(at, Type::STREAM, None)?;
        tcp.listen(128)?;
        let udp = Self::bound(at, Type::DGRAM, None)?.into();
        keep_bursts(&udp)?;
        Ok(Self {
            tcp: tcp.into(),
            udp,
            icmp: Self::bound(SocketAddr::new(at.ip(), 0), Type::RAW, Some(icmp))?,
        })
    }

    fn bound(at: SocketAddr, kind: Type, protocol: Option<Protocol>) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(at), kind, protocol)?;
        if at.is_ipv6() && kind != Type::RAW {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_read_timeout(Some(LOOK))?;
        when_free(|| socket.bind(&SockAddr::from(at)))?;
        Ok(socket)
    }
}

impl Shared {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn answer(&self, request: &str, client: SocketAddr) -> String {
        self.saw(request);
        Answer {
            identity: self.identity.clone(),
            client,
            request: request.to_owned(),
        }
        .encode()
    }

    fn saw(&self, token: &str) {
        self.seen.lock().expect("no server panics").insert(token.to_owned());
    }

    fn serve_tcp(self: &Arc<Self>, listener: &TcpListener) {
        let mut connections: Vec<JoinHandle<()>> = Vec::new();
        while self.running() {
            // A thread that has ended keeps its stack as long as its handle is kept.
            connections.retain(|connection| !connection.is_finished());
            if let Ok((stream, client)) = listener.accept() {
                let shared = Arc::clone(self);
                connections.push(thread::spawn(move || shared.serve_connection(stream, client)));
            }
        }
        for connection in connections {
            drop(connection.join());
        }
    }

    fn serve_connection(&self, stream: TcpStream, client: SocketAddr) {
        let ready = stream
            .set_read_timeout(Some(LOOK))
            .and_then(|()| stream.set_nodelay(true));
        let Ok(mut writer) = ready.and_then(|()| stream.try_clone()) else {
            return;
        };
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while self.running() {
            match reader.read_until(b'\n', &mut line) {
                Ok(_) if line.ends_with(b"\n") => {
                    let answer = self.answer(String::from_utf8_lossy(&line).trim_end(), client);
                    line.clear();
                    if writer.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
                // The part of a line that was read stays in `line`.
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    fn serve_udp(&self, socket: &UdpSocket) {
        let mut buffer = vec![0; 65_535];
        while self.running() {
            if let Ok((length, client)) = socket.recv_from(&mut buffer) {
                let answer = self.answer(String::from_utf8_lossy(&buffer[..length]).trim_end(), client);
                // A failed answer to a disconnected client is ignored.
                drop(socket.send_to(answer.as_bytes(), client));
            }
        }
    }

    fn witness(&self, mut socket: &Socket, v4: bool) {
        let mut buffer = vec![0; 65_535];
        while self.running() {
            if let Ok(length) = socket.read(&mut buffer)
                && let Some(payload) = super::ping::echo_request(&buffer[..length], v4)
            {
                self.saw(&String::from_utf8_lossy(payload));
            }
        }
    }
}
