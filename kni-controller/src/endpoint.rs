//! Answers the probes of the kubelet, and requests for the metrics.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::Instant,
};

use crate::{health::Health, metrics::Metrics, readiness::Readiness};

/// Time limit of a request.
const REQUEST: Duration = Duration::from_secs(5);
/// Pause after a failed bind or accept.
const PAUSE: Duration = Duration::from_secs(5);
/// Maximum size of a request in bytes.
const MAX_REQUEST: usize = 8192;
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Types of the answers.
const PLAIN: &str = "text/plain";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0";

/// What is served.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) health: Health,
    pub(crate) readiness: Readiness,
    pub(crate) metrics: Metrics,
}

impl Endpoint {
    /// Serves `/healthz`, `/readyz` and `/metrics` for as long as the process. An address that is in use is tried
    /// again: another replica on the node may have it.
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
        let places = Arc::new(Semaphore::new(AT_ONCE));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                // The probe of the kubelet must not wait for a client that is slow.
                Ok((stream, _)) => {
                    let endpoint = self.clone();
                    tokio::spawn(async move {
                        match tokio::time::timeout(REQUEST, endpoint.answer(stream)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::debug!(%error, "a request for /healthz or /metrics"),
                            Err(_elapsed) => tracing::debug!("a request for /healthz or /metrics took too long"),
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a request for /healthz");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn answer(self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut request = Vec::new();
        while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < MAX_REQUEST {
            if stream.read_buf(&mut request).await? == 0 {
                return Ok(());
            }
        }
        let (status, kind, text) = if request.starts_with(b"GET /healthz ") {
            let (status, text) = probe(&self.health);
            (status, PLAIN, text)
        } else if request.starts_with(b"GET /readyz ") {
            match self.readiness.problem() {
                None => ("200 OK", PLAIN, "ok\n".to_owned()),
                Some(problem) => ("503 Service Unavailable", PLAIN, format!("{problem}\n")),
            }
        } else if request.starts_with(b"GET /metrics ") {
            // It looks at all networks and blocks.
            match tokio::task::spawn_blocking(move || self.metrics.page()).await? {
                Ok(page) => ("200 OK", OPENMETRICS, page),
                Err(error) => ("500 Internal Server Error", PLAIN, format!("{error}\n")),
            }
        } else {
            (
                "404 Not Found",
                PLAIN,
                "there are GET /healthz, GET /readyz and GET /metrics\n".to_owned(),
            )
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nConnection: \
             close\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    }
}

/// Status and text for the liveness probe.
fn probe(health: &Health) -> (&'static str, String) {
    let silent = health.silent(Instant::now());
    if silent.is_empty() {
        return ("200 OK", "ok\n".to_owned());
    }
    tracing::error!(?silent, "hanging");
    ("500 Internal Server Error", format!("hanging: {}\n", silent.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn probes_and_readers_of_metrics_get_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let endpoint = Endpoint {
            health: Health::default(),
            readiness: Readiness::for_tests(&["pods: pods is forbidden"]),
            metrics: Metrics::for_tests(),
        };
        for (path, expected, content) in [
            ("/healthz", "HTTP/1.1 200 OK", "\r\n\r\nok\n"),
            ("/readyz", "HTTP/1.1 503", "\r\n\r\npods: pods is forbidden\n"),
            ("/metrics", "HTTP/1.1 200 OK", "kni_leader 0\n"),
            ("/other", "HTTP/1.1 404", "/healthz"),
        ] {
            let client = tokio::spawn(async move {
                let mut client = TcpStream::connect(address).await.unwrap();
                let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
                client.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                answer
            });
            let (stream, _) = listener.accept().await.unwrap();
            endpoint.clone().answer(stream).await.unwrap();
            let answer = client.await.unwrap();
            assert!(answer.starts_with(expected) && answer.contains(content), "{answer}");
        }
    }
}
