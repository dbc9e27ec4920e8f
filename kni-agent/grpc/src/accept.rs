//! Accepts connections: checks the peer, limits their number, and pauses when the process runs out of files.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _, stream};
use h2_authority::AuthorityAdapter;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::transport::server::Connected;

use super::socket::{BoundSocket, SocketFile};

/// First and longest pause after an accept that failed for lack of files or memory.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Shortest time between two log lines of one socket about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The peer of a connection, as the kernel reports it (`SO_PEERCRED`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    /// Process that connected, in the agent's process namespace.
    pub(super) pid: Option<i32>,
    /// Its user.
    pub(super) uid: u32,
}

/// A connection of an authorized client, which counts against the limit until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    io: AuthorityAdapter<UnixStream>,
    peer: Peer,
    _slot: OwnedSemaphorePermit,
}

/// Accepts connections on all sockets. At most `limit` are open at once; more are closed immediately, because a client
/// that waits in the queue may wait indefinitely. Never returns. Dropping the future closes the sockets and removes
/// their files. Must be called within a tokio runtime.
pub(super) fn incoming(
    sockets: Vec<BoundSocket>,
    limit: usize,
) -> io::Result<impl Stream<Item = io::Result<Connection>> + Send> {
    let slots = Arc::new(Semaphore::new(limit));
    let mut streams = Vec::with_capacity(sockets.len());
    for socket in sockets {
        let (file, listener) = socket.into_parts();
        let listener = UnixListener::from_std(listener)?;
        let acceptor = Acceptor {
            file,
            listener,
            slots: Arc::clone(&slots),
            log: Throttle::default(),
        };
        let connections = stream::unfold(acceptor, |mut acceptor| async move {
            let connection = acceptor.next().await;
            Some((Ok(connection), acceptor))
        });
        streams.push(connections.boxed());
    }
    Ok(stream::select_all(streams))
}

struct Acceptor {
    // Dropped before the listener, as in `BoundSocket`.
    file: SocketFile,
    listener: UnixListener,
    slots: Arc<Semaphore>,
    log: Throttle,
}

impl Acceptor {
    async fn next(&mut self) -> Connection {
        let mut pause = PAUSE.0;
        loop {
            match self.listener.accept().await {
                Ok((stream, _unnamed)) => match self.admit(stream) {
                    Ok(connection) => return connection,
                    Err(refusal) => self.log(&refusal),
                },
                // The client closed the connection before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                // Out of files or memory: the connection stays in the queue until some are free.
                Err(error) => {
                    self.log(&format!("accept: {error}"));
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream) -> Result<Connection, String> {
        let credentials = stream
            .peer_cred()
            .map_err(|error| format!("peer credentials: {error}"))?;
        let peer = Peer {
            pid: credentials.pid(),
            uid: credentials.uid(),
        };
        if peer.uid != 0 && peer.uid != nix::unistd::geteuid().as_raw() {
            return Err(format!(
                "uid {} may not connect (pid {})",
                peer.uid,
                peer.pid.unwrap_or_default()
            ));
        }
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        let slot = slot.map_err(|_full| "too many connections".to_owned())?;
        Ok(Connection {
            io: AuthorityAdapter::new(stream),
            peer,
            _slot: slot,
        })
    }

    fn log(&mut self, refusal: &str) {
        if let Some(unsaid) = self.log.pass(Instant::now()) {
            let path = self.file.path().display();
            tracing::warn!(socket = %path, refusal, unsaid, "connection refused");
        }
    }
}

/// Lets one log line through per interval and counts the others.
#[derive(Debug, Default)]
struct Throttle {
    last: Option<Instant>,
    unsaid: u64,
}

impl Throttle {
    /// How many lines were suppressed since the last one, if this one may pass.
    fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < LOG_INTERVAL) {
            self.unsaid = self.unsaid.saturating_add(1);
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_throttle_counts_what_it_holds_back() {
        let (mut throttle, start) = (Throttle::default(), Instant::now());
        assert_eq!(throttle.pass(start), Some(0));
        assert_eq!(throttle.pass(start + LOG_INTERVAL / 2), None);
        assert_eq!(throttle.pass(start + LOG_INTERVAL / 2), None);
        assert_eq!(throttle.pass(start + LOG_INTERVAL), Some(2));
        assert_eq!(throttle.pass(start + LOG_INTERVAL * 2), Some(0));
    }
}
