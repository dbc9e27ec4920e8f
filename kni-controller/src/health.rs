//! Answers the liveness probe from heartbeats: every loop reports that it goes round.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::Instant,
};

/// A loop that has not reported for this long hangs. Each reports at least every few seconds.
const SILENCE: Duration = Duration::from_mins(1);
/// Time limit of a request.
const REQUEST: Duration = Duration::from_secs(5);
/// Pause after a failed bind or accept.
const PAUSE: Duration = Duration::from_secs(5);
/// Maximum size of a request in bytes.
const MAX_REQUEST: usize = 8192;

/// When each running loop last reported. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Health(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

/// The entry of one loop, for as long as it runs.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    health: Health,
    name: &'static str,
}

impl Health {
    /// Begins to expect reports of a loop.
    pub(crate) fn expect(&self, name: &'static str) -> Heartbeat {
        self.beats().insert(name, Instant::now());
        Heartbeat {
            health: self.clone(),
            name,
        }
    }

    fn beats(&self) -> MutexGuard<'_, BTreeMap<&'static str, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loops that hang at `now`.
    fn silent(&self, now: Instant) -> Vec<&'static str> {
        let beats = self.beats();
        let silent = beats
            .iter()
            .filter(|(_, last)| now.saturating_duration_since(**last) > SILENCE);
        silent.map(|(name, _)| *name).collect()
    }

    /// Serves `/healthz` for as long as the process. An address that is in use is tried again: another replica on the
    /// node may have it.
    pub(crate) async fn serve(self, address: SocketAddr) {
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) => {
                    tracing::debug!(%address, %error, "cannot serve /healthz yet");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        loop {
            match listener.accept().await {
                // One at a time: each has a time limit, and the only client is the kubelet.
                Ok((stream, _)) => match tokio::time::timeout(REQUEST, self.answer(stream)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a request for /healthz"),
                    Err(_elapsed) => tracing::debug!("a request for /healthz took too long"),
                },
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a request for /healthz");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut request = Vec::new();
        while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < MAX_REQUEST {
            if stream.read_buf(&mut request).await? == 0 {
                return Ok(());
            }
        }
        let silent = self.silent(Instant::now());
        let (status, text) = if !request.starts_with(b"GET /healthz ") {
            ("404 Not Found", "there is GET /healthz\n".to_owned())
        } else if silent.is_empty() {
            ("200 OK", "ok\n".to_owned())
        } else {
            tracing::error!(?silent, "hanging");
            ("500 Internal Server Error", format!("hanging: {}\n", silent.join(", ")))
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: \
             close\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    }
}

impl Heartbeat {
    /// The loop goes round.
    pub(crate) fn beat(&self) {
        self.health.beats().insert(self.name, Instant::now());
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.health.beats().remove(self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_that_hangs_is_named_and_one_that_ended_is_not() {
        let health = Health::default();
        let (first, second) = (health.expect("first"), health.expect("second"));
        let now = Instant::now();
        assert!(health.silent(now).is_empty());
        let later = now + SILENCE + Duration::from_secs(1);
        assert_eq!(health.silent(later), ["first", "second"]);
        drop(second);
        assert_eq!(health.silent(later), ["first"]);
        first.beat();
        assert!(health.silent(Instant::now()).is_empty());
    }

    #[tokio::test]
    async fn the_probe_gets_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Health::default();
        for (path, expected) in [("/healthz", "HTTP/1.1 200 OK"), ("/other", "HTTP/1.1 404")] {
            let client = tokio::spawn(async move {
                let mut client = TcpStream::connect(address).await.unwrap();
                let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
                client.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                answer
            });
            let (stream, _) = listener.accept().await.unwrap();
            health.answer(stream).await.unwrap();
            let answer = client.await.unwrap();
            assert!(answer.starts_with(expected), "{answer}");
        }
    }
}
