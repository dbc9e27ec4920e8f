//! Runs the servers of a pod: TCP, UDP and SCTP on every address and port, each answer identifying the pod.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::oneshot,
    task::JoinSet,
};

use super::{
    sctp::{Packet, Sctp},
    table::PORTS,
};
use crate::{bind::when_free, namespaces::Namespaces};

/// The servers of one pod, on a separate thread inside it.
#[derive(Debug)]
pub(super) struct Serving {
    /// Dropping it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The answer of the pod `name` to `token` at an address and port.
pub(super) fn answer(name: &str, at: SocketAddr, token: &str) -> String {
    format!("{name} {} {} {token}", at.ip(), at.port())
}

impl Serving {
    /// Starts serving; the sockets are listening when this returns.
    pub(super) fn start(ns: &Namespaces, name: &str, addresses: &[IpAddr]) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (listening, ready) = std::sync::mpsc::channel();
        let (inside, name, addresses) = (ns.clone(), name.to_owned(), addresses.to_vec());
        let thread = thread::spawn(move || {
            let served = inside.enter(|| serve(&name, &addresses, &listening, stopped));
            // The receiver of the error may have been dropped already.
            drop(listening.send(served.and_then(|served| Ok(served?))));
        });
        let serving = Self {
            stop: Some(stop),
            thread: Some(thread),
        };
        ready.recv().context("the server ended")??;
        Ok(serving)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A server that panicked has printed the reason; only its end matters here.
            drop(thread.join());
        }
    }
}

fn serve(
    name: &str,
    addresses: &[IpAddr],
    listening: &std::sync::mpsc::Sender<Result<()>>,
    stopped: oneshot::Receiver<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for ip in addresses {
            for port in PORTS {
                let at = SocketAddr::new(*ip, port);
                tasks.spawn(tcp(TcpListener::from_std(listener(at)?)?, name.to_owned(), at));
                tasks.spawn(udp(UdpSocket::bind(at).await?, name.to_owned(), at));
            }
            tasks.spawn(sctp(Sctp::open(*ip)?, name.to_owned(), *ip));
        }
        drop(listening.send(Ok(())));
        // An error means that the sender was dropped, which is the expected event.
        drop(stopped.await);
        Ok(())
    })
}

fn listener(at: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    when_free(|| socket.bind(&SockAddr::from(at)))?;
    socket.listen(1024)?;
    Ok(socket.into())
}

async fn tcp(listener: TcpListener, name: String, at: SocketAddr) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                connections.spawn(connection(stream, name.clone(), at));
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Answers line by line until the client closes, so that the connection is closed by the client.
async fn connection(stream: TcpStream, name: String, at: SocketAddr) {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while matches!(stream.read_line(&mut line).await, Ok(length) if length > 0) {
        let text = answer(&name, at, line.trim_end()) + "\n";
        line.clear();
        if stream.write_all(text.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn udp(socket: UdpSocket, name: String, at: SocketAddr) {
    let mut buffer = vec![0; 2048];
    loop {
        // Errors are those of earlier answers and are ignored.
        if let Ok((length, client)) = socket.recv_from(&mut buffer).await {
            let text = answer(&name, at, &String::from_utf8_lossy(&buffer[..length]));
            drop(socket.send_to(text.as_bytes(), client).await);
        }
    }
}

async fn sctp(socket: Sctp, name: String, ip: IpAddr) {
    loop {
        let Ok((client, packet)) = socket.receive().await else {
            continue;
        };
        if packet.answer || packet.tag != 0 || !PORTS.contains(&packet.destination_port) {
            continue;
        }
        let at = SocketAddr::new(ip, packet.destination_port);
        let reply = Packet {
            source_port: packet.destination_port,
            destination_port: packet.source_port,
            tag: packet.initiate_tag,
            answer: true,
            initiate_tag: 1,
            text: answer(&name, at, &packet.text),
        };
        drop(socket.send(client, &reply));
    }
}
