//! Forwards one request to the API server, or lets it fail.

use std::{convert::Infallible, future::pending};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, future::BoxFuture};
use http::{Request, Response, StatusCode, Uri, uri::PathAndQuery};
use http_body_util::{BodyExt as _, BodyStream, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::Connect},
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::ConfigExt as _,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use tower::BoxError;

use super::faults::{Fault, Faults};
use crate::{cluster::api_access::dial, namespaces::Namespaces};

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;
type Sending = BoxFuture<'static, Result<Response<Incoming>, BoxError>>;
type Sender = Box<dyn Fn(Request<Incoming>) -> Sending + Send + Sync>;

/// The API server, with the certificate of one user.
pub(super) struct Upstream {
    server: Uri,
    send: Sender,
}

impl Upstream {
    pub(super) async fn new(fabric: &Namespaces, kubeconfig: &str) -> Result<Self> {
        let kubeconfig = Kubeconfig::from_yaml(kubeconfig).context("kubeconfig")?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .context("kubeconfig")?;
        let inside = fabric.clone();
        let connector = tower::service_fn(move |uri: Uri| {
            let inside = inside.clone();
            async move { dial(inside, &uri).await }
        });
        let connector = config.rustls_https_connector_with_connector(connector)?;
        let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self {
            server: config.cluster_url,
            send: sender(client),
        })
    }

    async fn send(&self, mut request: Request<Incoming>) -> Result<Response<Incoming>, BoxError> {
        let mut parts = self.server.clone().into_parts();
        parts.path_and_query = request
            .uri()
            .path_and_query()
            .cloned()
            .or(Some(PathAndQuery::from_static("/")));
        *request.uri_mut() = Uri::from_parts(parts)?;
        request.headers_mut().remove(http::header::HOST);
        (self.send)(request).await
    }
}

fn sender<C>(client: Client<C, Incoming>) -> Sender
where
    C: Connect + Clone + Send + Sync + 'static,
{
    Box::new(move |request| {
        let sent = client.request(request);
        Box::pin(async move { Ok(sent.await?) })
    })
}

/// Answers a request. An error ends the connection without an answer.
pub(super) async fn answer(
    request: Request<Incoming>,
    upstream: &Upstream,
    faults: &Faults,
) -> Result<Answer, BoxError> {
    let path = request
        .uri()
        .path_and_query()
        .map(ToString::to_string)
        .unwrap_or_default();
    let watches = path.contains("watch=true");
    let mut cuts = faults.cuts();
    let mut truncate = None;
    match faults.of(request.method(), &path) {
        None => {}
        Some(Fault::Delay(pause)) => tokio::time::sleep(pause).await,
        Some(Fault::Hang) => return pending().await,
        Some(Fault::Answer(code)) => return Ok(refusal(code)),
        Some(Fault::DropReply) => {
            let response = upstream.send(request).await?;
            if !watches {
                // Everything is committed.
                response.into_body().collect().await?;
            }
            return Err("the reply is dropped".into());
        }
        Some(Fault::Truncate(after)) => truncate = Some(after),
    }
    let response = upstream.send(request).await?;
    if truncate.is_none() && !watches {
        return Ok(response.map(|body| body.map_err(BoxError::from).boxed_unsync()));
    }
    let end = async move {
        match truncate {
            Some(after) => tokio::time::sleep(after).await,
            None => {
                cuts.changed().await.ok();
            }
        }
    };
    Ok(response.map(|body| {
        let frames = BodyStream::new(body).map(|frame| frame.map_err(BoxError::from));
        StreamBody::new(until(frames, end)).boxed_unsync()
    }))
}

/// The items until `end`, and an error there; all items if they end before.
fn until<T>(
    items: impl Stream<Item = Result<T, BoxError>> + Send + 'static,
    end: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Result<T, BoxError>> + Send {
    let state = Some((Box::pin(items), Box::pin(end)));
    futures::stream::unfold(state, |state| async move {
        let (mut items, mut end) = state?;
        tokio::select! {
            item = items.next() => item.map(|item| (item, Some((items, end)))),
            () = &mut end => Some((Err("the answer is cut off".into()), None)),
        }
    })
}

fn refusal(code: u16) -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "the proxy refuses this", "reason": "Test", "code": code,
    });
    let body = Full::new(Bytes::from(status.to_string()));
    let body = body.map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let json = http::HeaderValue::from_static("application/json");
    answer.headers_mut().insert(http::header::CONTENT_TYPE, json);
    // As the API server does.
    if answer.status() == StatusCode::TOO_MANY_REQUESTS {
        answer
            .headers_mut()
            .insert(http::header::RETRY_AFTER, http::HeaderValue::from(1));
    }
    answer
}
