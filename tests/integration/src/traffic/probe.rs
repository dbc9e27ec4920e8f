//! Sends one request to a server over TCP or UDP.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{Answer, NoAnswer};
use crate::{bind::when_free, kubelet::random_hex, namespaces::Namespaces};

/// A text that no other request contains.
pub fn new_token() -> String {
    random_hex(12)
}

/// Connects from inside `from` and sends a request; `timeout` applies to connecting, and again to the answer.
pub fn tcp_get(from: &Namespaces, address: IpAddr, port: u16, timeout: Duration) -> Result<Answer, NoAnswer> {
    tcp_get_to(from, SocketAddr::new(address, port), &new_token(), timeout)
}

/// [`tcp_get`] with the given token.
pub fn tcp_get_to(from: &Namespaces, to: SocketAddr, token: &str, timeout: Duration) -> Result<Answer, NoAnswer> {
    inside(from, || {
        let mut stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(format!("{token}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        understood(&line, token)
    })
}

/// Sends one datagram from inside `from` and waits for the answer to it.
pub fn udp_ask(from: &Namespaces, address: IpAddr, port: u16, timeout: Duration) -> Result<Answer, NoAnswer> {
    udp_ask_to(from, SocketAddr::new(address, port), &new_token(), timeout)
}

/// [`udp_ask`] with the given token.
pub fn udp_ask_to(from: &Namespaces, to: SocketAddr, token: &str, timeout: Duration) -> Result<Answer, NoAnswer> {
    udp_ask_by(from, 0, to, token, timeout)
}

/// [`udp_ask_to`] from a given port: a port that the kernel selects may belong to an existing flow, which continues to
/// its own backend.
pub fn udp_ask_by(
    from: &Namespaces,
    port: u16,
    to: SocketAddr,
    token: &str,
    timeout: Duration,
) -> Result<Answer, NoAnswer> {
    inside(from, || {
        let socket = when_free(|| UdpSocket::bind(SocketAddr::new(unspecified(to.is_ipv4()), port)))?;
        // Connected, so that it receives ICMP errors, and no answers from other addresses.
        socket.connect(to)?;
        socket.set_read_timeout(Some(timeout))?;
        socket.send(token.as_bytes())?;
        let mut buffer = vec![0; 65_535];
        let length = socket.recv(&mut buffer)?;
        understood(&String::from_utf8_lossy(&buffer[..length]), token)
    })
}

/// How many SYNs and their answers the TCP of a namespace has sent again, as it does a second after a loss.
pub fn syn_repeats(ns: &Namespaces) -> Result<u64> {
    let text = ns.enter(|| fs::read_to_string("/proc/thread-self/net/netstat"))??;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt:"));
    let (names, values) = (lines.next().context("no names")?, lines.next().context("no values")?);
    let mut counters = names.split_whitespace().zip(values.split_whitespace());
    let (_, value) = counters
        .find(|(name, _)| *name == "TCPSynRetrans")
        .context("no such counter")?;
    Ok(value.parse()?)
}

pub(super) fn unspecified(v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

pub(super) fn inside<R: Send>(
    from: &Namespaces,
    f: impl FnOnce() -> Result<R, NoAnswer> + Send,
) -> Result<R, NoAnswer> {
    from.enter(f).map_err(|e| NoAnswer::Other(format!("{e:#}")))?
}

fn understood(text: &str, token: &str) -> Result<Answer, NoAnswer> {
    if text.is_empty() {
        return Err(NoAnswer::Closed);
    }
    let answer = Answer::decode(text).filter(|answer| answer.request == token);
    answer.ok_or_else(|| NoAnswer::Other(format!("not an answer to {token}: {text:?}")))
}
