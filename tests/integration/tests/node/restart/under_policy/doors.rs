//! Shows whether a pod may reach a server: by answers if it may, and otherwise by a packet of another pod that arrives
//! although it was sent later.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces, Pod,
    frames::PacketSocket,
    on_one_cpu, patience,
    traffic::{Servers, new_token, tcp_get, udp_ask},
};
use socket2::{Domain, Socket, Type};

/// A server's address, and the pod where it runs.
pub(super) struct Door<'a> {
    pub(super) to: SocketAddr,
    pub(super) inside: &'a Namespaces,
    pub(super) server: &'a Servers,
}

impl Door<'_> {
    /// Checks that the pod gets an answer over both transports.
    pub(super) fn assert_open_to(&self, pod: &Pod) -> Result<()> {
        let (ip, port) = (self.to.ip(), self.to.port());
        let answers = [
            udp_ask(&pod.inside, ip, port, patience()),
            tcp_get(&pod.inside, ip, port, patience()),
        ];
        for answer in answers {
            let answer = answer.with_context(|| format!("{} to {}", pod.namespace, self.to))?;
            ensure!(answer.identity == self.server.identity(), "{answer:?}");
        }
        Ok(())
    }

    /// Checks that neither a datagram of the pod nor the start of a connection arrives before a later datagram of
    /// `open`, which may enter.
    pub(super) fn assert_closed_to(&self, pod: &Pod, open: &Pod) -> Result<()> {
        let word = new_token();
        let source = pod.ip(self.to.is_ipv4()).context("an address of the family")?;
        let knock = || pod.enter(|| self.knock(&word))?;
        self.assert_nothing_arrives(open, knock, |port, frame| {
            has(frame, &word) || starts(frame, source, *port)
        })
        .with_context(|| format!("of {}", pod.namespace))
    }

    /// Checks that nothing of what `attempt` sends arrives before a later datagram of `open`, which may enter.
    pub(super) fn assert_nothing_arrives<T>(
        &self,
        open: &Pod,
        attempt: impl FnOnce() -> Result<T>,
        is_it: impl Fn(&T, &[u8]) -> bool,
    ) -> Result<()> {
        let arriving = PacketSocket::open(self.inside, "eth0")?;
        let fence = new_token();
        let sent = on_one_cpu(|| {
            let sent = attempt()?;
            open.enter(|| UdpSocket::bind((any(self.to), 0))?.send_to(fence.as_bytes(), self.to))??;
            Ok(sent)
        })?;
        let first = arriving.receive(patience(), |frame| is_it(&sent, frame) || has(frame, &fence))?;
        let first = first.with_context(|| format!("nothing of {} arrives at {}", open.namespace, self.to))?;
        ensure!(!is_it(&sent, &first), "it entered {}: {first:02x?}", self.to);
        Ok(())
    }

    /// Sends a datagram and a SYN, and returns the port of the latter.
    fn knock(&self, word: &str) -> Result<u16> {
        let from = SocketAddr::new(any(self.to), 0);
        UdpSocket::bind(from)?.send_to(word.as_bytes(), self.to)?;
        let connection = Socket::new(Domain::for_address(self.to), Type::STREAM, None)?;
        connection.bind(&from.into())?;
        connection.set_nonblocking(true)?;
        let begun = connection.connect(&self.to.into());
        ensure!(
            begun.as_ref().err().and_then(std::io::Error::raw_os_error) == Some(libc::EINPROGRESS),
            "{begun:?}"
        );
        let local = connection.local_addr()?.as_socket();
        Ok(local.context("an IP socket")?.port())
    }
}

fn any(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() {
        std::net::Ipv4Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    }
}

pub(super) fn has(frame: &[u8], word: &str) -> bool {
    frame.windows(word.len()).any(|bytes| bytes == word.as_bytes())
}

/// Whether it is a TCP segment from that address and port.
fn starts(frame: &[u8], source: IpAddr, port: u16) -> bool {
    let (protocol, from, ports) = match source {
        IpAddr::V4(ip) => (frame.get(23), frame.get(26..30) == Some(&ip.octets()[..]), 34..36),
        IpAddr::V6(ip) => (frame.get(20), frame.get(22..38) == Some(&ip.octets()[..]), 54..56),
    };
    protocol == Some(&6) && from && frame.get(ports) == Some(&port.to_be_bytes()[..])
}

/// A connection and a socket that have received one answer.
pub(super) struct Open {
    tcp: BufReader<TcpStream>,
    udp: UdpSocket,
}

impl Open {
    pub(super) fn to(pod: &Pod, to: SocketAddr) -> Result<Self> {
        let (tcp, udp) = pod.enter(|| {
            let udp = UdpSocket::bind((any(to), 0))?;
            udp.connect(to)?;
            anyhow::Ok((TcpStream::connect_timeout(&to, patience())?, udp))
        })??;
        tcp.set_read_timeout(Some(patience()))?;
        udp.set_read_timeout(Some(patience()))?;
        let mut open = Self {
            tcp: BufReader::new(tcp),
            udp,
        };
        open.ask("before").context("no answer at first")?;
        Ok(open)
    }

    /// Sends a word over both.
    pub(super) fn send(&mut self, word: &str) -> Result<()> {
        self.tcp.get_mut().write_all(format!("{word}\n").as_bytes())?;
        self.udp.send(word.as_bytes())?;
        Ok(())
    }

    /// Sends a word, and expects the answers to it.
    pub(super) fn ask(&mut self, word: &str) -> Result<()> {
        self.send(word)?;
        let (mut line, mut datagram) = (String::new(), [0; 512]);
        self.tcp.read_line(&mut line).context("over TCP")?;
        let length = self.udp.recv(&mut datagram).context("over UDP")?;
        ensure!(line.contains(word), "{line:?}");
        ensure!(has(&datagram[..length], word), "another answer over UDP");
        Ok(())
    }
}
