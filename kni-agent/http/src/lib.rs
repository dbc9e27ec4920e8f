//! Serves the metrics page and the liveness and readiness probes over HTTP, without authentication.
//! Layer: edge.
//!
//! `GET /metrics`, `GET /healthz`, `GET /readyz`, and nothing else. Clients are not trusted: each has one request on
//! one connection, with limits for time and memory, and only a few are served at once.

mod answer;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc, time::Duration};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use kni_metrics::{Page, Source};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

/// Connections at once; additional ones wait in the listener's queue.
const MAX_CONNECTIONS: usize = 16;
/// Time limit for the headers of a request.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// Time limit for a connection.
const CONNECTION_TIME: Duration = Duration::from_secs(15);
/// Maximum number of buffered bytes of a request; requests with larger headers are refused.
const MAX_HEADER: usize = 16 * 1024;
/// Pause after a failed accept, for example because of missing file descriptors or memory.
const PAUSE: Duration = Duration::from_millis(200);

/// Answers a probe; an error holds the reason of a failure. May block for some milliseconds.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The answers to the probes of the kubelet.
#[derive(Clone)]
pub struct Probes {
    /// Whether pods can be attached.
    pub readiness: Probe,
    /// Whether the agent works; if not, it must be started again.
    pub liveness: Probe,
}

/// Serves until `shutdown` resolves; open connections end with it. Never fails: errors of a connection only affect its
/// client.
pub async fn serve(
    listener: TcpListener,
    source: Arc<dyn Source>,
    probes: Probes,
    shutdown: impl Future<Output = ()> + Send,
) {
    let Ok(page) = tokio::task::spawn_blocking(move || Page::new(source)).await else {
        tracing::error!("the metrics cannot be read; nothing is served over HTTP");
        return;
    };
    let pages = Arc::new(answer::Pages::new(page, probes));
    tokio::select! {
        () = shutdown => {}
        () = accept(listener, pages) => {}
    }
}

async fn accept(listener: TcpListener, pages: Arc<answer::Pages>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    // The semaphore is never closed.
    while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(connection(stream, Arc::clone(&pages), slot));
            }
            // The client disconnected before the accept.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "accepting an HTTP connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, pages: Arc<answer::Pages>, _slot: OwnedSemaphorePermit) {
    let service = service_fn(move |request| {
        let pages = Arc::clone(&pages);
        async move { pages.answer(&request).await }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_HEADER)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIME, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "HTTP connection"),
        Err(_elapsed) => tracing::debug!("HTTP connection took too long"),
    }
}
