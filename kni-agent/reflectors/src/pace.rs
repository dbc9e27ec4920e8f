//! Paces the requests of one agent, of which thousands share the API server.
//!
//! An agent has a budget for all its requests. When the API server answers that it is overloaded, the agent sends it
//! nothing of the same priority level for a while, whichever loop asks: an answer with status 429 follows at once,
//! without a request. Then one request shows whether the others may follow.

mod level;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, header::RETRY_AFTER};
use http_body::Body as HttpBody;
use http_body_util::{Either, Full};
use kube::client::Body;
use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tower::{BoxError, Layer, Service};

use self::level::{Entry, Level};
use super::requests::{Call, RequestCounts};

/// The average interval of an agent's requests: as many as a kubelet's.
const INTERVAL: Duration = Duration::from_millis(20);
/// So many more may be sent at once after a quiet time.
const BURST: u32 = 100;
/// The kinds that a pod or other nodes wait for.
const CRITICAL: [&str; 6] = [
    "addressblocks",
    "networknumbers",
    "networkmembers",
    "nodeendpoints",
    "egressaddressclaims",
    "podnetworks",
];

/// Adds the pace to a client.
#[derive(Debug, Clone)]
pub(super) struct Paced {
    /// The longest pause.
    pub(super) longest: Duration,
    pub(super) counts: RequestCounts,
}

impl<S> Layer<S> for Paced {
    type Service = PacedService<S>;

    fn layer(&self, inner: S) -> PacedService<S> {
        PacedService {
            inner,
            queues: Arc::default(),
            longest: self.longest,
            budget: Arc::default(),
            counts: self.counts.clone(),
        }
    }
}

/// A client with a pace.
pub(super) struct PacedService<S> {
    inner: S,
    queues: Arc<Queues>,
    longest: Duration,
    budget: Arc<Mutex<Budget>>,
    counts: RequestCounts,
}

/// A priority level of the API server: those of `deploy/base/flow-schemas.yaml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Priority {
    Watches,
    Critical,
    Reports,
}

/// The requests by priority level.
#[derive(Debug, Default)]
struct Queues {
    watches: Queue,
    critical: Queue,
    reports: Queue,
}

impl Queues {
    const fn of(&self, priority: Priority) -> &Queue {
        match priority {
            Priority::Watches => &self.watches,
            Priority::Critical => &self.critical,
            Priority::Reports => &self.reports,
        }
    }
}

/// The requests of one priority level.
#[derive(Debug, Default)]
struct Queue {
    level: Mutex<Level>,
    /// Held while one request shows for all others whether the API server accepts them.
    probe: tokio::sync::Mutex<()>,
}

impl Queue {
    fn level(&self) -> MutexGuard<'_, Level> {
        // It is consistent after each statement.
        self.level.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When the next request may be sent.
#[derive(Debug, Default)]
struct Budget(Option<Instant>);

impl Budget {
    /// When a request of now may be sent.
    fn next(&mut self, now: Instant) -> Instant {
        let full = now.checked_sub(INTERVAL * BURST).unwrap_or(now);
        let at = self.0.map_or(full, |next| next.max(full));
        self.0 = Some(at + INTERVAL);
        at
    }
}

fn priority_of(call: &Call) -> Priority {
    let kind = call.resource.split('/').next().unwrap_or_default();
    match call.verb {
        "list" | "watch" => Priority::Watches,
        _ if CRITICAL.contains(&kind) || kind == "discovery" => Priority::Critical,
        _ => Priority::Reports,
    }
}

/// How long the API server asks to wait; `None` if it is not overloaded.
fn wait_of(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER).map(|value| {
        let seconds = value.to_str().ok().and_then(|text| text.parse().ok());
        Duration::from_secs(seconds.unwrap_or_default())
    });
    seconds.or_else(|| (status == StatusCode::TOO_MANY_REQUESTS).then_some(Duration::ZERO))
}

impl<S, B> Service<Request<Body>> for PacedService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes> + Send + 'static,
{
    type Response = Response<Either<Full<Bytes>, B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let uri = request.uri();
        let call = Call::of(request.method(), uri.path(), uri.query().unwrap_or_default());
        let (queues, budget, counts) = (Arc::clone(&self.queues), Arc::clone(&self.budget), self.counts.clone());
        let longest = self.longest;
        // Sends nothing before it is polled.
        let answer = self.inner.call(request);
        Box::pin(async move {
            let queue = queues.of(priority_of(&call));
            let mut entry = queue.level().enter(Instant::now());
            let mut probe = None;
            if entry == Entry::Probe {
                let turn = queue.probe.lock().await;
                entry = queue.level().enter(Instant::now());
                probe = (entry == Entry::Probe).then_some(turn);
            }
            if let Entry::Closed(wait) = entry {
                counts.add(&call, "paused");
                return Ok(refusal(wait));
            }
            let at = budget
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .next(Instant::now());
            sleep_until(at).await;
            let response = answer.await.map_err(Into::into)?;
            let wait = wait_of(response.status(), response.headers());
            queue.level().answered(Instant::now(), wait, (probe.is_some(), longest));
            Ok(response.map(Either::Right))
        })
    }
}

/// The answer to a request that is not sent.
fn refusal<B>(wait: Duration) -> Response<Either<Full<Bytes>, B>> {
    let seconds = wait.as_secs().max(1);
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "TooManyRequests", "code": 429,
        "message": format!("the API server is overloaded; the next request follows in {seconds} s"),
        "details": {"retryAfterSeconds": seconds},
    });
    let body = Either::Left(Full::new(Bytes::from(status.to_string())));
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response
}

#[cfg(test)]
mod tests;
