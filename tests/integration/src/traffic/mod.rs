//! Determines who answers: servers answer with their identity, and probes return it.
//!
//! Only sockets, no programs: what a probe proves does not depend on the tools of the machine. Reachability alone is
//! no proof where two networks use the same addresses, so every answer names the server that gave it, and every
//! request carries a token by which the server that saw it can be found even when no answer came back.

mod matrix;
mod ping;
mod probe;
mod server;
mod stream;
mod whole;

use std::{fmt, io, net::SocketAddr};

pub use matrix::{Matrix, Probe, Row};
pub use ping::ping;
pub use probe::{new_token, tcp_get, tcp_get_to, udp_ask, udp_ask_by, udp_ask_to};
pub use server::Servers;
pub use stream::{Stream, StreamReport};
pub use whole::{assert_path_limit, is_too_big, whole_datagrams};

/// What a server answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The identity of the server.
    pub identity: String,
    /// The client's address as the server saw it.
    pub client: SocketAddr,
    /// The request, as it reached the server.
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

/// Why a probe has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAnswer {
    /// Nothing came: what a drop looks like.
    Timeout,
    /// The address is alive, the port is closed.
    Refused,
    /// The own network stack or an ICMP error reported that there is no route.
    Unreachable,
    /// The connection broke.
    Closed,
    /// Anything else, in the kernel's words.
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
