//! Clients of the API server that lose requests and replies, or act as another user.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use kube::{Client, client::Body};
use tonic::codegen::http::{HeaderValue, Request, Response};

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
    let faults = Faults {
        until: Arc::new(AtomicI64::new(-1)),
    };
    let (to, chosen) = (to.clone(), faults.clone());
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
    let to = to.clone();
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

/// A client whose requests take longer by `delay`, as over a slow network: what they cost the CPUs matters less then.
pub(crate) fn distant(to: &Client, delay: Duration) -> Client {
    let to = to.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let to = to.clone();
        async move {
            tokio::time::sleep(delay).await;
            Ok::<Response<Body>, tower::BoxError>(to.send(request).await?)
        }
    });
    Client::new(service, "default")
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
