//! Paces the requests of one agent, of which thousands share the API server.
//!
//! An agent has a budget for all its requests, and few of them wait for an answer at once. When the API server answers
//! that it is overloaded, the agent sends it nothing of the same priority level for a while, whichever loop asks: an
//! answer with status 429 follows at once, without a request. Then one request shows whether the others may follow, as
//! it does after a watch was interrupted, and at the start. Watches that are open continue.

mod gate;
mod level;

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{TryFutureExt as _, future::BoxFuture};
use http::{HeaderMap, Request, Response, StatusCode, header::RETRY_AFTER};
use http_body::Body as HttpBody;
use http_body_util::{Either, Full};
use kube::client::Body;
use serde_json::json;
use tokio::time::timeout;
use tower::{BoxError, Layer, Service};

use self::{
    gate::{Gate, Priority},
    level::Pauses,
};
use super::requests::{Call, Interruptions, NotSent, RequestLimits};

/// Pause after the first answer that the API server is overloaded. With the others, which double, and with the requests
/// that may wait for an answer at once, a minute of refusals is at most 20 requests.
const SHORTEST: Duration = Duration::from_secs(3);
/// A request that takes longer than this part of its limit stops no other one any more.
const SLOW: u32 = 5;
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
    gate: Arc<Gate>,
    slow: Duration,
}

impl Paced {
    /// The pace of an agent whose watches notify of `interruptions`.
    pub(super) fn new(limits: RequestLimits, interruptions: &Interruptions) -> Self {
        let pauses = Pauses {
            shortest: SHORTEST,
            longest: limits.pause,
        };
        Self {
            gate: Arc::new(Gate::new(interruptions.subscribe(), pauses)),
            slow: limits.call / SLOW,
        }
    }
}

impl<S> Layer<S> for Paced {
    type Service = PacedService<S>;

    fn layer(&self, inner: S) -> PacedService<S> {
        PacedService {
            inner,
            pace: self.clone(),
        }
    }
}

/// A client with a pace.
pub(super) struct PacedService<S> {
    inner: S,
    pace: Paced,
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
    let seconds = headers.get(RETRY_AFTER).filter(|_| !status.is_success()).map(|value| {
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
        let priority = priority_of(&Call::of(request.method(), uri.path(), uri.query().unwrap_or_default()));
        let Paced { gate, slow } = self.pace.clone();
        // Sends nothing before it is polled.
        let answer = self.inner.call(request);
        Box::pin(async move {
            let pass = match gate.enter(priority).await {
                Ok(pass) => pass,
                Err(wait) => return Ok(refusal(wait)),
            };
            let (goes_first, mut pass) = (pass.goes_first(), Some(pass));
            let mut answer = pin!(answer.map_err(Into::<BoxError>::into));
            let response = match timeout(slow, &mut answer).await {
                Ok(response) => response?,
                Err(_slow) => {
                    pass = None;
                    answer.await?
                }
            };
            let status = response.status();
            match wait_of(status, response.headers()) {
                Some(wait) => gate.refused(priority, wait, goes_first),
                // An API server that fails shows nothing: the next request goes first, too.
                None if goes_first && !status.is_server_error() => gate.accepted(priority),
                None => {}
            }
            drop(pass);
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
    response.extensions_mut().insert(NotSent);
    response
}

#[cfg(test)]
mod tests;
