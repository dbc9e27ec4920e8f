//! Identifies the server behind an address: servers answer with their identity, and probes return it.
//!
//! Uses only sockets, so the results do not depend on tools of the machine. Reachability alone proves nothing if two
//! networks use the same addresses, so every answer contains the identity of the server, and every request contains a
//! token that identifies the receiving server even without an answer.

mod client;
mod matrix;
mod ping;
mod probe;
mod server;
mod stream;
mod whole;

use std::{fmt, io, net::SocketAddr};

pub use client::UdpClient;
pub use matrix::{Matrix, Probe, Row};
pub use ping::ping;
pub use probe::{new_token, syn_repeats, tcp_get, tcp_get_to, udp_ask, udp_ask_by, udp_ask_to};
pub use server::Servers;
pub use stream::{Stream, StreamReport};
pub use whole::{assert_path_limit, is_too_big, set_option, whole_datagrams};

/// The answer of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The identity of the server.
    pub identity: String,
    /// The client's address as the server saw it.
    pub client: SocketAddr,
    /// The request, as received by the server.
    pub request: String,
}

impl Answer {
    fn encode(&self) -> String {
        format!("{} {} {}\n", self.identity, self.client, self.request)
    }

    fn decode(text: &str) -> Option<Self> {
        let mut words = text.trim_end().splitn(3, ' ');
        let identity = words.next()?.to_owned();
        let client = words.next()?.parse().ok()?;
        Some(Self {
            identity,
            client,
            request: words.next()?.to_owned(),
        })
    }
}

/// The reason for a missing answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAnswer {
    /// No packet arrived, as after a drop.
    Timeout,
    /// The address is reachable, the port is closed.
    Refused,
    /// The local network stack or an ICMP error reported that there is no route.
    Unreachable,
    /// The connection was closed.
    Closed,
    /// Any other error, in the kernel's words.
    Other(String),
}

impl From<io::Error> for NoAnswer {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            Kind::TimedOut | Kind::WouldBlock => Self::Timeout,
            Kind::ConnectionRefused => Self::Refused,
            Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::PermissionDenied => Self::Unreachable,
            Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe | Kind::UnexpectedEof => Self::Closed,
            _ => Self::Other(error.to_string()),
        }
    }
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "silent",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Closed => "closed",
            Self::Other(what) => what,
        })
    }
}

impl std::error::Error for NoAnswer {}
