//! Runs workloads over a path: transactions, connections, a stream.

use std::{
    fs,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use socket2::SockRef;

use crate::{
    cpu::pin,
    path::{Path, SERVICE_PORT},
};

/// Interval at which a server checks whether it must stop.
const TICK: Duration = Duration::from_millis(50);
/// Timeout of a client that gets no answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Unmeasured share of a run: caches, windows and tables fill up during this time.
const WARM_UP: f64 = 0.1;
const BLOCK: usize = 128 << 10;

/// A traffic pattern between a client and a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    /// One byte in each direction, repeatedly, over one TCP connection.
    TcpTransactions,
    /// One byte in each direction over UDP.
    UdpTransactions,
    /// One connection per byte in each direction, closed by a reset.
    Connections,
    /// The same, closed by FIN of both sides.
    ClosedConnections,
    /// As many bytes as possible on one TCP connection.
    Stream,
}

/// CPUs of the two ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    /// The client's.
    pub(crate) client: usize,
    /// The server's.
    pub(crate) server: usize,
}

impl Workload {
    /// Runs it over `path`; returns transactions or connections per second, or Gb/s.
    pub(crate) fn run(self, path: &Path, placement: Placement, time: Duration) -> Result<f64> {
        let ports = path.services.as_ref().map_or(0..1, |behind| behind.endpoints.clone());
        let bind = || {
            ports
                .map(|port| Server::bind(self, path.address, port))
                .collect::<io::Result<Vec<_>>>()
        };
        let servers = path.server.enter(bind)??;
        let addresses = match &path.services {
            Some(behind) => behind.addresses.iter().map(|&ip| (ip, SERVICE_PORT).into()).collect(),
            None => servers.iter().map(Server::address).collect::<io::Result<Vec<_>>>()?,
        };
        let stop = AtomicBool::new(false);
        let serve = |server: &Server| {
            pin(placement.server)?;
            server.serve(self, &stop)
        };
        thread::scope(|scope| {
            let serving: Vec<_> = servers
                .iter()
                .map(|server| scope.spawn(move || serve(server)))
                .collect();
            let client = path.client.enter(|| {
                pin(placement.client)?;
                self.client(&addresses, time)
            });
            stop.store(true, Ordering::Relaxed);
            let mut received = 0.0;
            let mut broken = None;
            for server in serving {
                match server.join().map_err(|_panic| anyhow!("the server panicked"))? {
                    Ok(rate) => received += rate,
                    Err(error) => broken = Some(error),
                }
            }
            let client = client.and_then(|rate| rate);
            let rate = client.with_context(|| format!("{self:?} over {}: client", path.title))?;
            if let Some(error) = broken {
                return Err(error.context(format!("{self:?} over {}: server", path.title)));
            }
            ensure!(
                self != Self::Stream || received > 0.0,
                "nothing was received over {}",
                path.title
            );
            Ok(if self == Self::Stream { received } else { rate })
        })
    }

    /// A flow of many packets uses the first address; successive flows use the addresses in turn.
    fn client(self, servers: &[SocketAddr], time: Duration) -> Result<f64> {
        let server = *servers.first().context("no server")?;
        match self {
            Self::TcpTransactions => {
                let mut stream = connect(server)?;
                repeat(time, || ping(&mut stream))
            }
            Self::UdpTransactions => {
                let socket = UdpSocket::bind((unspecified(server.ip()), 0))?;
                socket.connect(server)?;
                socket.set_read_timeout(Some(PATIENCE))?;
                repeat(time, || {
                    socket.send(&[1])?;
                    socket.recv(&mut [0]).map(drop)
                })
            }
            Self::Connections => {
                let mut turn = servers.iter().cycle();
                repeat(time, || {
                    let mut stream = connect(*turn.next().unwrap_or(&server))?;
                    ping(&mut stream)?;
                    // A reset avoids TIME_WAIT, so that ports do not run out.
                    SockRef::from(&stream).set_linger(Some(Duration::ZERO))
                })
            }
            Self::ClosedConnections => {
                release_closed()?;
                let mut turn = servers.iter().cycle();
                repeat(time, || {
                    let mut stream = connect(*turn.next().unwrap_or(&server))?;
                    ping(&mut stream)?;
                    stream.shutdown(Shutdown::Write)?;
                    stream.read(&mut [0]).map(drop)
                })
            }
            Self::Stream => {
                let mut stream = connect(server)?;
                let block = vec![0; BLOCK];
                repeat(time, || stream.write_all(&block))
            }
        }
    }
}

/// Makes the namespace of the calling thread release connections as soon as they are closed: `TIME_WAIT` would use up
/// its ports.
fn release_closed() -> Result<()> {
    Ok(fs::write("/proc/sys/net/ipv4/tcp_max_tw_buckets", "0")?)
}

fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

fn connect(server: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(server)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn ping(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])
}

/// Executions of `work` per second.
fn repeat(time: Duration, mut work: impl FnMut() -> io::Result<()>) -> Result<f64> {
    let warm = Instant::now() + time.mul_f64(WARM_UP);
    while Instant::now() < warm {
        work()?;
    }
    let start = Instant::now();
    let mut done = 0_u32;
    while start.elapsed() < time {
        work()?;
        done += 1;
    }
    Ok(f64::from(done) / start.elapsed().as_secs_f64())
}

enum Server {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Server {
    /// Binds a port at `address`, 0 for an arbitrary one, in the namespace of the calling thread.
    fn bind(workload: Workload, address: IpAddr, port: u16) -> io::Result<Self> {
        if workload == Workload::UdpTransactions {
            let socket = UdpSocket::bind((address, port))?;
            socket.set_read_timeout(Some(TICK))?;
            Ok(Self::Udp(socket))
        } else {
            let listener = TcpListener::bind((address, port))?;
            // The kernel also applies it to accept().
            SockRef::from(&listener).set_read_timeout(Some(TICK))?;
            Ok(Self::Tcp(listener))
        }
    }

    fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        }
    }

    /// Serves until `stop`; returns the received Gb/s, which is 0 without a stream.
    fn serve(&self, workload: Workload, stop: &AtomicBool) -> Result<f64> {
        let mut received = 0.0;
        while !stop.load(Ordering::Relaxed) {
            let served = match self {
                Self::Udp(socket) => echo_datagram(socket),
                Self::Tcp(listener) => accept(listener).and_then(|stream| match workload {
                    Workload::Stream => drain(stream).map(|rate| received = rate),
                    _ => echo(stream),
                }),
            };
            match served {
                Err(error) if !is_end(&error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(received)
    }
}

/// Whether the error is the end of a client or a timeout.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock
            | ErrorKind::TimedOut
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
    )
}

fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut byte = [0];
    while stream.read(&mut byte)? > 0 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

fn echo_datagram(socket: &UdpSocket) -> io::Result<()> {
    let (_, client) = socket.recv_from(&mut [0])?;
    socket.send_to(&[1], client).map(drop)
}

/// Reads to the end; returns Gb/s after the warm-up.
fn drain(mut stream: TcpStream) -> io::Result<f64> {
    let mut block = vec![0; BLOCK];
    // The client's warm-up fills caches and opens the window; little is received at the start, so its bytes are
    // excluded by number.
    let mut skipped = 0;
    while skipped < 64 * BLOCK {
        match stream.read(&mut block)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            bytes => skipped += bytes,
        }
    }
    let start = Instant::now();
    let mut received = 0_u64;
    loop {
        match stream.read(&mut block)? {
            0 => break,
            bytes => received += bytes as u64,
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "bytes of some seconds")]
    Ok(received as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9)
}
