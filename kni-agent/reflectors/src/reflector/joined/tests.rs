//! Tests what an agent asks for when its node joins one more network.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use http::{Request, Response, StatusCode};
use kni_api::AddressBlock;
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

fn block(network: &str, version: u64, node: &str) -> Value {
    let name = format!("{network}.v4-10-0-0-0-26");
    json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock",
        "metadata": {
            "name": name, "resourceVersion": version.to_string(), "labels": { NETWORK_LABEL: network },
        },
        "spec": { "network": network, "networkUID": "u", "cidr": "10.0.0.0/26", "nodeName": node, "nodeUID": "n" },
    })
}

/// An API server with a block of network red from the beginning, and one of blue that was changed at version 20.
#[derive(Clone)]
struct ApiServer {
    /// The answer to a watch that is resumed: events, or a refusal.
    resumed: Result<Vec<Value>, StatusCode>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl ApiServer {
    fn answer(&self, query: &str) -> Response<Body> {
        self.requests.lock().unwrap().push(query.to_owned());
        let lines = |events: &[Value]| {
            let lines: Vec<String> = events.iter().map(ToString::to_string).collect();
            Response::new(Body::from((lines.join("\n") + "\n").into_bytes()))
        };
        let (red, blue) = (query.contains("red"), query.contains("blue"));
        if query.contains("sendInitialEvents=true") {
            // A network that is joined later is listed alone, as of the version of the others.
            let later = blue && !red && !query.contains("empty");
            assert!(!later || query.contains("resourceVersion=7"), "{query}");
            let mut bookmark = block("red", if later { 21 } else { 9 }, "");
            bookmark["metadata"]["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
            let mut events = Vec::new();
            if red {
                events.push(json!({ "type": "ADDED", "object": block("red", 7, "n1") }));
            }
            if blue {
                events.push(json!({ "type": "ADDED", "object": block("blue", 20, "new") }));
            }
            events.push(json!({ "type": "BOOKMARK", "object": bookmark }));
            return lines(&events);
        }
        if query.contains("watch=true") {
            return match &self.resumed {
                Ok(events) if blue => lines(events),
                Err(status) if blue => Response::builder()
                    .status(*status)
                    .body(Body::from(b"{}".to_vec()))
                    .unwrap(),
                // Of red alone nothing changes.
                _ => lines(&[]),
            };
        }
        let items = if blue {
            vec![block("blue", 20, "new")]
        } else {
            Vec::new()
        };
        assert!(!red, "{query}");
        lines(&[json!({
            "kind": "AddressBlockList", "apiVersion": "kni.dev/v1alpha1",
            "metadata": { "resourceVersion": "21" }, "items": items,
        })])
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let response = server.answer(request.uri().query().unwrap_or_default());
            async move { Ok::<_, Infallible>(response) }
        });
        Client::new(service, "default")
    }
}

fn networks(names: &[&str]) -> BTreeSet<NetworkName> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn node_of(cache: &ClusterCache, network: &str) -> Option<String> {
    let tables = cache.tables();
    let object = tables.other_blocks.get("", &format!("{network}.v4-10-0-0-0-26"))?;
    Some(object.spec.node_name.clone())
}

/// Joins blue after red; returns the requests until `is_done`.
async fn join(
    resumed: Result<Vec<Value>, StatusCode>,
    then: &[&str],
    is_done: impl Fn(&ClusterCache) -> bool,
) -> Vec<String> {
    join_after("red", resumed, then, is_done).await
}

/// Joins networks after one that has been listed; returns the requests until `is_done`.
async fn join_after(
    first: &str,
    resumed: Result<Vec<Value>, StatusCode>,
    then: &[&str],
    is_done: impl Fn(&ClusterCache) -> bool,
) -> Vec<String> {
    let server = ApiServer {
        resumed,
        requests: Arc::default(),
    };
    let cache = ClusterCache::new();
    let (join, joined) = watch::channel(Some(networks(&[first])));
    let kind = Kind::<AddressBlock, _>::new(
        "addressblocks",
        |tables| &mut tables.other_blocks,
        |object| Some(Arc::new(object)),
    );
    let run = kind.reflect_joined(Api::all(server.client()), joined, cache.clone(), WatchState::default());
    let scenario = async {
        let until = async |is_done: &dyn Fn(&ClusterCache) -> bool| {
            while !is_done(&cache) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        until(&|cache| cache.tables().other_blocks.covers(&first.parse().unwrap())).await;
        join.send_replace(Some(networks(then)));
        until(&is_done).await;
    };
    tokio::select! {
        () = run => panic!("it has ended"),
        done = timeout(LIMIT, scenario) => done.unwrap(),
    }
    let requests = server.requests.lock().unwrap();
    requests.clone()
}

#[tokio::test]
async fn only_the_network_that_is_joined_is_listed() {
    let events = vec![
        // Older than the list.
        json!({ "type": "MODIFIED", "object": block("blue", 15, "old") }),
        json!({ "type": "MODIFIED", "object": block("red", 30, "n2") }),
    ];
    let requests = join(Ok(events), &["red", "blue"], |cache| {
        node_of(cache, "red").as_deref() == Some("n2")
    })
    .await;
    let lists: Vec<&String> = requests
        .iter()
        .filter(|query| query.contains("sendInitialEvents=true"))
        .collect();
    assert_eq!(lists.len(), 2, "{requests:?}");
    assert!(lists[0].contains("red") && !lists[0].contains("blue"), "{lists:?}");
    assert!(
        lists[0].contains("resourceVersion=0"),
        "the agent's client replaces it by the newest: {lists:?}"
    );
    assert!(lists[1].contains("blue") && !lists[1].contains("red"), "{lists:?}");
    let mut resumed = requests
        .iter()
        .filter(|query| query.contains("watch=true") && !query.contains("sendInitialEvents"));
    let resumed = resumed.find(|query| query.contains("blue")).unwrap();
    assert!(
        resumed.contains("red") && resumed.contains("resourceVersion=7"),
        "{resumed}"
    );
}

/// An empty list that arrives as events has no version that a watch could continue from.
#[tokio::test]
async fn a_network_is_joined_after_one_without_objects() {
    join_after("empty", Ok(Vec::new()), &["empty", "blue"], |cache| {
        node_of(cache, "blue").is_some()
    })
    .await;
}

#[tokio::test]
async fn an_older_event_does_not_undo_the_list() {
    let events = vec![
        json!({ "type": "MODIFIED", "object": block("blue", 15, "old") }),
        json!({ "type": "DELETED", "object": block("red", 30, "n1") }),
    ];
    let seen = Mutex::new(BTreeSet::new());
    join(Ok(events), &["red", "blue"], |cache| {
        seen.lock().unwrap().extend(node_of(cache, "blue"));
        node_of(cache, "red").is_none()
    })
    .await;
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen, BTreeSet::from(["new".to_owned()]));
}

#[tokio::test]
async fn a_network_that_the_node_has_left_goes() {
    join(Ok(Vec::new()), &["blue"], |cache| {
        let covered = cache.tables().other_blocks.covers(&"blue".parse().unwrap());
        covered && node_of(cache, "red").is_none() && node_of(cache, "blue").is_some()
    })
    .await;
}

/// The version that the watch is resumed at may be too old, for example.
#[tokio::test]
async fn a_watch_that_cannot_be_resumed_lists_everything() {
    let too_old = json!({ "type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old",
    }});
    for resumed in [Ok(vec![too_old]), Err(StatusCode::GONE)] {
        // Both networks are in the list that follows.
        let count = Mutex::new(0);
        let requests = join(resumed, &["red", "blue"], |cache| {
            *count.lock().unwrap() += usize::from(node_of(cache, "blue").is_some());
            *count.lock().unwrap() > 100
        })
        .await;
        let lists: Vec<&String> = requests
            .iter()
            .filter(|query| query.contains("sendInitialEvents=true") && query.contains("red"))
            .collect();
        assert!(lists.len() >= 2 && lists[1].contains("blue"), "{requests:?}");
    }
}
