//! Clients of the API server that lose requests and replies, or act as another user.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kni_integration::patience;
use kube::{Client, client::Body};
use tonic::codegen::http::{HeaderValue, Method, Request, Response, StatusCode};

/// The longest delay of a request that arrives after its caller has given up.
pub(crate) const LATEST: Duration = Duration::from_millis(150);

/// Chooses the reply that a client loses.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    /// Requests until the one whose reply is lost; negative: none.
    until: Arc<AtomicI64>,
}

impl Faults {
    /// Loses the reply to the request after `skipped` others.
    pub(crate) fn lose_reply(&self, skipped: i64) {
        self.until.store(skipped, Ordering::Relaxed);
    }
}

/// A client that loses the replies that are chosen, to requests that had their effect.
pub(crate) fn losing(to: &Client) -> (Client, Faults) {
    let to = repeating(to);
    let faults = Faults {
        until: Arc::new(AtomicI64::new(-1)),
    };
    let chosen = faults.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (to, lost) = (to.clone(), chosen.until.fetch_sub(1, Ordering::Relaxed) == 0);
        async move {
            let reply = to.send(request).await?;
            if lost {
                Err(Lost.into())
            } else {
                Ok::<Response<Body>, tower::BoxError>(reply)
            }
        }
    });
    (Client::new(service, "default"), faults)
}

/// A client that loses one request in thirty, one reply in thirty, and lets one request in thirty arrive after its
/// caller has given up.
pub(crate) fn unreliable(to: &Client) -> Client {
    let to = repeating(to);
    let service = tower::service_fn(move |request: Request<Body>| {
        let to = to.clone();
        async move {
            match fastrand::u8(0..30) {
                0 => return Err(Lost.into()),
                1 => {
                    drop(to.send(request).await);
                    return Err(Lost.into());
                }
                2 => {
                    tokio::spawn(async move {
                        tokio::time::sleep(LATEST.mul_f64(fastrand::f64())).await;
                        drop(to.send(request).await);
                    });
                    return Err(Lost.into());
                }
                _ => {}
            }
            Ok::<Response<Body>, tower::BoxError>(to.send(request).await?)
        }
    });
    Client::new(service, "default")
}

/// A client that repeats a read while the API server answers 429, 503 or 504. The API server answers a list with 504 if
/// its watch cache does not reach the requested resource version within 3 s (`waitUntilFreshAndBlock` of
/// k8s.io/apiserver).
pub(crate) fn repeating(to: &Client) -> Client {
    let to = to.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let to = to.clone();
        async move {
            if request.method() != Method::GET {
                return Ok::<Response<Body>, tower::BoxError>(to.send(request).await?);
            }
            let (head, _no_body) = request.into_parts();
            let deadline = Instant::now() + patience();
            loop {
                let reply = to.send(Request::from_parts(head.clone(), Body::empty())).await?;
                if !is_busy(reply.status()) || Instant::now() >= deadline {
                    return Ok(reply);
                }
                tokio::time::sleep(LATEST).await;
            }
        }
    });
    Client::new(service, "default")
}

fn is_busy(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    )
}

/// Counts requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    requests: Arc<AtomicUsize>,
    on_their_way: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Counts {
    /// The requests since the last call, and how many of them were on their way at once.
    pub(crate) fn take(&self) -> (usize, usize) {
        (
            self.requests.swap(0, Ordering::Relaxed),
            self.most.swap(0, Ordering::Relaxed),
        )
    }
}

/// A client whose requests take longer by `delay`, as over a slow network, and are counted.
pub(crate) fn counting(to: &Client, delay: Duration) -> (Client, Counts) {
    let (to, counts) = (to.clone(), Counts::default());
    let shared = counts.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (to, counts) = (to.clone(), shared.clone());
        async move {
            counts.requests.fetch_add(1, Ordering::Relaxed);
            let now = counts.on_their_way.fetch_add(1, Ordering::Relaxed) + 1;
            counts.most.fetch_max(now, Ordering::Relaxed);
            tokio::time::sleep(delay).await;
            let reply = to.send(request).await;
            counts.on_their_way.fetch_sub(1, Ordering::Relaxed);
            Ok::<Response<Body>, tower::BoxError>(reply?)
        }
    });
    (Client::new(service, "default"), counts)
}

/// A client that acts as the agent of a node, with the token of the agents' service account there.
pub(crate) fn agent_of(to: &Client, node: &str) -> Client {
    let (to, node) = (to.clone(), node.to_owned());
    let service = tower::service_fn(move |mut request: Request<Body>| {
        let to = to.clone();
        let headers = request.headers_mut();
        headers.insert(
            "impersonate-user",
            HeaderValue::from_static("system:serviceaccount:kni-system:kni-agent"),
        );
        headers.insert("impersonate-group", HeaderValue::from_static("kni:agents"));
        if let Ok(node) = HeaderValue::from_str(&node) {
            headers.insert("impersonate-extra-authentication.kubernetes.io%2fnode-name", node);
        }
        async move { Ok::<Response<Body>, tower::BoxError>(to.send(request).await?) }
    });
    Client::new(service, "default")
}

/// The error of a request whose reply is lost.
#[derive(Debug)]
struct Lost;

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the connection was lost")
    }
}

impl std::error::Error for Lost {}
