//! Bounds every request to the API server in time, and counts the answers.
//!
//! A watch may stay open for as long as something arrives: the API server sends a bookmark about once a minute. Any
//! other request is complete within a fixed time, answer included and the time for which it is held back, or fails; its
//! caller repeats it.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Method, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use kube::client::Body;
use tokio::{
    sync::watch,
    time::{Instant, Sleep, sleep, timeout},
};
use tower::{BoxError, Layer, Service};

/// How long requests may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// A request that reads or writes one object.
    pub call: Duration,
    /// A page of a list, and the beginning of a watch.
    pub list: Duration,
    /// How long a watch may be silent. Longer than the interval of the API server's bookmarks.
    pub watch_idle: Duration,
    /// How long an agent sends nothing after the API server has answered that it is overloaded: at most, but for
    /// jitter, which adds up to half of it.
    pub pause: Duration,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(10),
            list: Duration::from_secs(30),
            watch_idle: Duration::from_secs(100),
            pause: Duration::from_secs(30),
        }
    }
}

/// Marks the answer to a request that was not sent, because the API server is overloaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct NotSent;

/// The API server did not answer in time.
#[derive(Debug, thiserror::Error)]
#[error("the API server did not answer {verb} {resource} within {limit:?}")]
struct NoAnswer {
    verb: &'static str,
    resource: String,
    limit: Duration,
}

/// Number of requests with one result.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestCount {
    /// Verb of the API, such as `get` or `patch`.
    pub verb: &'static str,
    /// Resource, with its subresource: `podnetworks/status`.
    pub resource: String,
    /// HTTP status; `timeout` and `error` where there was none, `paused` where the request was not sent because the API
    /// server is overloaded.
    pub code: String,
    /// Requests.
    pub count: u64,
}

type Results = BTreeMap<(&'static str, String, String), u64>;

/// The counters of requests. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RequestCounts {
    results: Arc<Mutex<Results>>,
    received: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl RequestCounts {
    /// All counters.
    pub fn view(&self) -> Vec<RequestCount> {
        let results = self.lock();
        let counts = results.iter().map(|((verb, resource, code), count)| RequestCount {
            verb,
            resource: resource.clone(),
            code: code.clone(),
            count: *count,
        });
        counts.collect()
    }

    /// The bytes of all answers by resource, events of watches included.
    pub fn received(&self) -> BTreeMap<String, u64> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add_received(&self, call: &Call, bytes: usize) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        if let Some(sum) = received.get_mut(&call.resource) {
            *sum = sum.saturating_add(bytes);
        } else {
            received.insert(call.resource.clone(), bytes);
        }
    }

    fn add(&self, call: &Call, code: &str) {
        let key = (call.verb, call.resource.clone(), code.to_owned());
        *self.lock().entry(key).or_default() += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Results> {
        // Each entry is complete.
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notifies of watches that failed, or ended before their time. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Interruptions(watch::Sender<()>);

impl Interruptions {
    /// Interruptions from now on.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.0.subscribe()
    }

    pub(super) fn note(&self) {
        self.0.send_replace(());
    }
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) verb: &'static str,
    pub(super) resource: String,
}

/// The duration that a watch requests, in seconds: it ends by itself then.
fn duration_of(query: &str) -> Option<u64> {
    let mut parts = query.split('&');
    parts.find_map(|part| part.strip_prefix("timeoutSeconds=")?.parse().ok())
}

impl Call {
    pub(super) fn of(method: &Method, path: &str, query: &str) -> Self {
        let mut parts = path.trim_matches('/').split('/');
        // /api/v1/..., /apis/GROUP/VERSION/...
        let group = match parts.next() {
            Some("api") => parts.by_ref().nth(0).is_some(),
            Some("apis") => parts.by_ref().nth(1).is_some(),
            _ => false,
        };
        let mut rest: Vec<&str> = parts.collect();
        if rest.len() > 2
            && rest.first() == Some(&"namespaces")
            && !matches!(rest.get(2), Some(&"status" | &"finalize"))
        {
            rest.drain(..2);
        }
        let resource = match (group, rest.as_slice()) {
            (true, [resource]) => (*resource).to_owned(),
            (true, [resource, _name]) => (*resource).to_owned(),
            (true, [resource, _name, sub, ..]) => format!("{resource}/{sub}"),
            _ => "discovery".to_owned(),
        };
        let named = rest.len() > 1;
        let watches = query
            .split('&')
            .any(|part| matches!(part, "watch=true" | "watch=1" | "watch"));
        let verb = match *method {
            Method::GET if watches => "watch",
            Method::GET if named || resource == "discovery" => "get",
            Method::GET => "list",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "other",
        };
        Self { verb, resource }
    }
}

/// Adds the limits and the counters to a client.
#[derive(Debug, Clone)]
pub(super) struct Bounded {
    pub(super) limits: RequestLimits,
    pub(super) counts: RequestCounts,
    pub(super) interruptions: Interruptions,
}

impl<S> Layer<S> for Bounded {
    type Service = BoundedService<S>;

    fn layer(&self, inner: S) -> BoundedService<S> {
        BoundedService {
            inner,
            bounds: self.clone(),
        }
    }
}

/// A client with limits and counters.
pub(super) struct BoundedService<S> {
    inner: S,
    bounds: Bounded,
}

impl<S, B> Service<Request<Body>> for BoundedService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes> + Send + 'static,
{
    type Response = Response<BoundedBody<B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let uri = request.uri();
        let call = Call::of(request.method(), uri.path(), uri.query().unwrap_or_default());
        let until = duration_of(uri.query().unwrap_or_default());
        let Bounded {
            limits,
            counts,
            interruptions,
        } = self.bounds.clone();
        let limit = match call.verb {
            "list" | "watch" => limits.list,
            _ => limits.call,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let deadline = Instant::now() + limit;
            let is_watch = call.verb == "watch";
            let answer = timeout(limit, answer).await;
            if is_watch && !matches!(answer, Ok(Ok(_))) {
                interruptions.note();
            }
            match answer {
                Ok(Ok(response)) => {
                    let is_sent = response.extensions().get::<NotSent>().is_none();
                    let status = response.status();
                    counts.add(&call, if is_sent { status.as_str() } else { "paused" });
                    // The body of a refusal ends at once, and shows nothing of watches.
                    let bound = if is_watch && response.status().is_success() {
                        Bound::Watch(limits.watch_idle, Watched::new(until, interruptions))
                    } else {
                        Bound::Deadline(deadline)
                    };
                    Ok(response.map(|body| BoundedBody::new(body, bound, limit, call, counts)))
                }
                Ok(Err(error)) => {
                    counts.add(&call, "error");
                    Err(error.into())
                }
                Err(_elapsed) => {
                    counts.add(&call, "timeout");
                    let Call { verb, resource } = call;
                    Err(NoAnswer { verb, resource, limit }.into())
                }
            }
        })
    }
}

#[derive(Debug)]
enum Bound {
    /// The whole body arrives until then.
    Deadline(Instant),
    /// A part of it arrives at least this often.
    Watch(Duration, Watched),
}

/// A watch that has begun.
#[derive(Debug)]
struct Watched {
    /// When it ends by itself.
    ends: Instant,
    interruptions: Interruptions,
}

impl Watched {
    /// How much earlier a watch may end.
    const EARLY: Duration = Duration::from_secs(10);

    fn new(seconds: Option<u64>, interruptions: Interruptions) -> Self {
        let lasts = Duration::from_secs(seconds.unwrap_or_default());
        Self {
            ends: Instant::now() + lasts.saturating_sub(Self::EARLY),
            interruptions,
        }
    }

    /// Whether what arrives at `now` is an interruption.
    fn is_interrupted<T, E>(&self, frame: Option<&Result<T, E>>, now: Instant) -> bool {
        match frame {
            Some(Ok(_)) => false,
            Some(Err(_)) => true,
            None => now < self.ends,
        }
    }
}

/// The body of an answer that fails when it takes too long.
pub(super) struct BoundedBody<B> {
    inner: Pin<Box<B>>,
    timer: Pin<Box<Sleep>>,
    watch: Option<(Duration, Watched)>,
    limit: Duration,
    call: Call,
    counts: RequestCounts,
}

impl<B> BoundedBody<B> {
    fn new(inner: B, bound: Bound, limit: Duration, call: Call, counts: RequestCounts) -> Self {
        let (timer, watch) = match bound {
            Bound::Deadline(at) => (tokio::time::sleep_until(at), None),
            Bound::Watch(idle, watched) => (sleep(idle), Some((idle, watched))),
        };
        Self {
            inner: Box::pin(inner),
            timer: Box::pin(timer),
            limit: watch.as_ref().map_or(limit, |(idle, _)| *idle),
            watch,
            call,
            counts,
        }
    }
}

impl<B> HttpBody for BoundedBody<B>
where
    B: HttpBody<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = self.inner.as_mut().poll_frame(cx) {
            if let Some(Ok(frame)) = &frame
                && let Some(data) = frame.data_ref()
            {
                self.counts.add_received(&self.call, data.len());
            }
            if let Some((idle, watched)) = &self.watch {
                let now = Instant::now();
                if watched.is_interrupted(frame.as_ref(), now) {
                    watched.interruptions.note();
                }
                let until = now + *idle;
                self.timer.as_mut().reset(until);
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(self.timer.as_mut().poll(cx));
        self.counts.add(&self.call, "timeout");
        if let Some((_, watched)) = &self.watch {
            watched.interruptions.note();
        }
        let Call { verb, resource } = self.call.clone();
        let limit = self.limit;
        Poll::Ready(Some(Err(NoAnswer { verb, resource, limit }.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[test]
    fn a_watch_that_fails_or_ends_early_is_interrupted() {
        let (minute, asked) = (Duration::from_mins(1), Duration::from_secs(290));
        let seconds = duration_of("watch=true&timeoutSeconds=290&resourceVersion=7");
        assert_eq!(seconds, Some(asked.as_secs()));
        let watched = Watched::new(seconds, Interruptions::default());
        let begin = Instant::now();
        for (frame, after, is_interrupted) in [
            (Some(&Ok(())), Duration::ZERO, false),
            (None, minute, true),
            (Some(&Err(())), minute, true),
            (None, asked, false),
            (Some(&Err(())), asked, true),
        ] {
            let found = watched.is_interrupted(frame, begin + after);
            assert_eq!(found, is_interrupted, "{frame:?} after {after:?}");
        }
    }

    /// Reads the answer of a watch to its end; whether that counts as an interruption.
    async fn is_interrupted_by(status: u16) -> bool {
        let interruptions = Interruptions::default();
        let noted = interruptions.subscribe();
        let layer = Bounded {
            limits: RequestLimits::default(),
            counts: RequestCounts::default(),
            interruptions,
        };
        let mut service = layer.layer(tower::service_fn(move |_: Request<Body>| async move {
            Response::builder().status(status).body(Body::from(b"{}".to_vec()))
        }));
        let request = Request::get("/api/v1/pods?watch=true&timeoutSeconds=290");
        let answer = service.call(request.body(Body::empty()).unwrap()).await.unwrap();
        answer.into_body().collect().await.unwrap();
        noted.has_changed().unwrap()
    }

    /// Otherwise the comparison that an interruption causes would cause the next refusal under load.
    #[tokio::test]
    async fn a_refused_watch_is_not_interrupted() {
        assert!(is_interrupted_by(200).await, "it ends 290 s too early");
        for refusal in [403, 404, 410, 429, 503] {
            assert!(!is_interrupted_by(refusal).await, "{refusal}");
        }
    }

    #[test]
    fn a_request_is_named_as_in_the_audit_log() {
        for (method, path, query, verb, resource) in [
            (Method::GET, "/api/v1/pods", "&limit=500", "list", "pods"),
            (
                Method::GET,
                "/api/v1/pods",
                "&watch=true&timeoutSeconds=290",
                "watch",
                "pods",
            ),
            (Method::GET, "/api/v1/nodes/a", "", "get", "nodes"),
            (Method::GET, "/api/v1/namespaces", "", "list", "namespaces"),
            (Method::GET, "/api/v1/namespaces/a", "", "get", "namespaces"),
            (Method::PATCH, "/api/v1/namespaces/a/pods/b", "", "patch", "pods"),
            (
                Method::PATCH,
                "/apis/kni.dev/v1alpha1/namespaces/a/podinterfaces/b.eth0/status",
                "",
                "patch",
                "podinterfaces/status",
            ),
            (
                Method::PUT,
                "/apis/kni.dev/v1alpha1/podnetworks/red/status",
                "",
                "update",
                "podnetworks/status",
            ),
            (
                Method::DELETE,
                "/apis/kni.dev/v1alpha1/nodenetworks/a",
                "",
                "delete",
                "nodenetworks",
            ),
            (
                Method::POST,
                "/apis/coordination.k8s.io/v1/namespaces/kni-system/leases",
                "",
                "create",
                "leases",
            ),
            (Method::GET, "/apis/k8s.cni.cncf.io/v1beta1", "", "get", "discovery"),
        ] {
            let expected = Call {
                verb,
                resource: resource.to_owned(),
            };
            assert_eq!(Call::of(&method, path, query), expected, "{method} {path}");
        }
    }
}
