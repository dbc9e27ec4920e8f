//! Tests how lists are read from API servers that send them as the beginning of a watch, and from those that do not.

use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Client, client::Body, core::PartialObjectMeta};
use serde_json::{Value, json};
use tokio::time::{Duration, timeout};

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

/// An API server with one namespace.
#[derive(Clone)]
struct ApiServer {
    streams: bool,
    /// The requests: each query, and the accepted media type.
    requests: Arc<Mutex<Vec<(String, String)>>>,
}

fn namespace(annotations: &Value) -> Value {
    json!({
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": {
            "name": "red", "resourceVersion": "7", "labels": {"tenant": "red"}, "annotations": annotations,
        },
    })
}

fn lines(events: &[Value]) -> Body {
    let lines: Vec<String> = events.iter().map(ToString::to_string).collect();
    Body::from((lines.join("\n") + "\n").into_bytes())
}

impl ApiServer {
    fn answer(&self, request: &Request<Body>) -> Response<Body> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let accept = request.headers().get("accept").map(|value| value.to_str().unwrap());
        let accept = accept.unwrap_or_default().to_owned();
        self.requests.lock().unwrap().push((query.clone(), accept));
        let ok = |body| Response::new(body);
        if query.contains("sendInitialEvents=true") {
            if self.streams {
                let end = json!({"k8s.io/initial-events-end": "true"});
                return ok(lines(&[
                    json!({"type": "ADDED", "object": namespace(&json!({}))}),
                    json!({"type": "BOOKMARK", "object": namespace(&end)}),
                ]));
            }
            let refused = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422,
                "message": "sendInitialEvents: Forbidden",
            });
            let mut response = ok(lines(&[refused]));
            *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
            return response;
        }
        if query.contains("watch=true") {
            return ok(lines(&[]));
        }
        ok(lines(&[json!({
            "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
            "metadata": {"resourceVersion": "7"}, "items": [namespace(&json!({}))],
        })]))
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let response = server.answer(&request);
            async move { Ok::<_, std::convert::Infallible>(response) }
        });
        Client::new(service, "default")
    }
}

/// Reads the namespaces; returns the requests until the first list was complete.
async fn read(streams: bool, counts: &WatchState) -> Vec<(String, String)> {
    let server = ApiServer {
        streams,
        requests: Arc::default(),
    };
    let cache = ClusterCache::new();
    let kind = Kind::<PartialObjectMeta<Namespace>, _>::new(
        "namespaces",
        |tables| &mut tables.namespaces,
        |object| object.metadata.labels,
    );
    let (api, filled) = (Api::all(server.client()), cache.clone());
    let watch = kind.reflect_selected(api, watcher::Config::default(), filled, counts.clone());
    let synced = async {
        let mut changes = cache.changes();
        while !cache.tables().namespaces.is_synced() {
            changes.changed().await.unwrap();
        }
    };
    tokio::select! {
        () = watch => panic!("it has ended"),
        synced = timeout(LIMIT, synced) => synced.unwrap(),
    }
    let labels = cache.tables().namespaces.get("", "red").cloned().unwrap_or_default();
    assert_eq!(labels.get("tenant").map(String::as_str), Some("red"));
    let requests = server.requests.lock().unwrap();
    requests.clone()
}

#[tokio::test]
async fn a_list_arrives_as_the_beginning_of_a_watch() {
    let counts = WatchState::default();
    let requests = read(true, &counts).await;
    assert!(
        !requests.iter().any(|(query, _)| query.contains("limit=")),
        "{requests:?}"
    );
    let (query, accept) = &requests[0];
    assert!(
        query.contains("watch=true") && query.contains("sendInitialEvents=true"),
        "{query}"
    );
    assert!(accept.contains("as=PartialObjectMetadata"), "labels only: {accept}");
}

#[tokio::test]
async fn an_api_server_that_refuses_that_is_asked_for_pages_and_only_once() {
    let counts = WatchState::default();
    let requests = read(false, &counts).await;
    assert!(requests[0].0.contains("sendInitialEvents=true"), "{requests:?}");
    assert!(requests[1].0.contains("limit=500"), "{requests:?}");
    let requests = read(false, &counts).await;
    assert!(
        requests[0].0.contains("limit=500"),
        "it does not ask twice: {requests:?}"
    );
}
