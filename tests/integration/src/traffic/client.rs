//! Sends requests from one UDP socket, which is never closed: its flow has no end.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};

use super::new_token;
use crate::{Namespaces, patience};

/// A connected socket, as a resolver or a telemetry sender has it.
pub struct UdpClient(UdpSocket);

impl UdpClient {
    /// Opens the socket in a namespace and connects it.
    ///
    /// # Errors
    /// Fails where the namespace has no route.
    pub fn open(from: &Namespaces, to: SocketAddr) -> Result<Self> {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = from.enter(|| {
            let socket = UdpSocket::bind(any)?;
            socket.connect(to).map(|()| socket)
        })??;
        socket.set_read_timeout(Some(patience()))?;
        Ok(Self(socket))
    }

    /// Checks that ten requests are all answered by `who`.
    ///
    /// # Errors
    /// Fails at the first request without an answer, or with that of another server.
    pub fn assert_answered(&self, who: &str) -> Result<()> {
        for number in 0..10 {
            let (token, mut buffer) = (new_token(), [0; 512]);
            self.0.send(token.as_bytes())?;
            let length = self.0.recv(&mut buffer);
            let length = length.with_context(|| format!("question {number}, which {who} should answer"))?;
            let answer = String::from_utf8_lossy(&buffer[..length]);
            ensure!(
                answer.starts_with(&format!("{who} ")) && answer.contains(&token),
                "question {number}: not {who} answers but {answer:?}"
            );
        }
        Ok(())
    }
}
