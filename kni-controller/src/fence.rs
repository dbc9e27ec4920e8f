//! Makes a client whose requests end with the term: no controller can write after another replica may have begun.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use kube::{Client, Error, client::Body};
use tokio::time::{Instant, timeout_at};

use crate::election::Leadership;

/// Timeout of a write. The objects are small, and the next round retries.
const WRITE: Duration = Duration::from_secs(10);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A client that refuses requests after the term; writes that wait for an answer then are abandoned.
pub(crate) fn fenced(client: &Client, leadership: Leadership) -> Client {
    let fence = Fence {
        client: client.clone(),
        leadership,
    };
    Client::new(fence, client.default_namespace())
}

struct Fence {
    client: Client,
    leadership: Leadership,
}

impl tower::Service<Request> for Fence {
    type Response = Response;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Error>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let (client, leadership) = (self.client.clone(), self.leadership.clone());
        Box::pin(async move {
            // Watches and lists take longer; their results end with the controllers.
            if request.method() == http::Method::GET && leadership.lasts() {
                return client.send(request).await;
            }
            let Some(until) = leadership.until() else {
                return Err(ended());
            };
            let deadline = until.min(Instant::now() + WRITE);
            let sent = timeout_at(deadline, client.send(request)).await;
            sent.unwrap_or_else(|_elapsed| Err(Error::Service("no answer in time".into())))
        })
    }
}

fn ended() -> Error {
    Error::Service("this replica no longer holds the Lease".into())
}
