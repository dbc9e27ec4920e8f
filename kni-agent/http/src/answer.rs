//! Answers HTTP requests.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE},
};
use http_body_util::Full;
use kni_metrics::Page;

use super::{Probe, Probes};

const OPENMETRICS: HeaderValue = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
const PLAIN: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

type Answer = Response<Full<Bytes>>;

/// The pages of the server.
pub(super) struct Pages {
    metrics: Arc<Page>,
    probes: Probes,
}

impl Pages {
    pub(super) fn new(metrics: Page, probes: Probes) -> Self {
        Self {
            metrics: Arc::new(metrics),
            probes,
        }
    }

    /// Answers any request; the body is never read.
    pub(super) async fn answer<B>(&self, request: &Request<B>) -> Result<Answer, Infallible> {
        let path = request.uri().path();
        let known = matches!(path, "/metrics" | "/healthz" | "/readyz");
        let mut answer = match path {
            _ if !known => plain(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz"),
            _ if request.method() != Method::GET => {
                let mut answer = plain(StatusCode::METHOD_NOT_ALLOWED, "GET only");
                answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
                answer
            }
            "/metrics" => self.metrics().await,
            "/readyz" => probe(&self.probes.readiness, StatusCode::SERVICE_UNAVAILABLE).await,
            _ => probe(&self.probes.liveness, StatusCode::INTERNAL_SERVER_ERROR).await,
        };
        answer
            .headers_mut()
            .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(answer)
    }

    async fn metrics(&self) -> Answer {
        let page = Arc::clone(&self.metrics);
        match tokio::task::spawn_blocking(move || page.render()).await {
            Ok(Ok(text)) => answer(StatusCode::OK, OPENMETRICS, Bytes::copy_from_slice(text.as_bytes())),
            // Neither error has details; the panic hook has logged the location.
            Ok(Err(_)) | Err(_) => plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the metrics cannot be read; see the log",
            ),
        }
    }
}

async fn probe(probe: &Probe, failed: StatusCode) -> Answer {
    let probe = Arc::clone(probe);
    match tokio::task::spawn_blocking(move || probe()).await {
        Ok(Ok(())) => plain(StatusCode::OK, "ok"),
        Ok(Err(reason)) => plain(failed, &reason),
        Err(_panicked) => plain(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the probe cannot be answered; see the log",
        ),
    }
}

fn plain(status: StatusCode, text: &str) -> Answer {
    answer(status, PLAIN, Bytes::from(format!("{text}\n")))
}

fn answer(status: StatusCode, kind: HeaderValue, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
