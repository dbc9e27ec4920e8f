//! Tests claims of a node whose object was deleted and made again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::Value;

use super::*;

const UNIT: &str = "10.0.0.0/26";

/// An API server with blocks, without admission.
#[derive(Clone, Default)]
struct ApiServer {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl ApiServer {
    fn with(blocks: &[(&str, NodeRef, &NetworkRef)]) -> Self {
        let server = Self::default();
        for (cidr, node, network) in blocks {
            let mut object = address_block(node, network, &cidr.parse().unwrap());
            object.metadata.uid = Some(format!("uid-of-{cidr}"));
            object.metadata.resource_version = Some("5".to_owned());
            server.put(&object);
        }
        server
    }

    fn put(&self, object: &AddressBlock) {
        let value = serde_json::to_value(object).unwrap();
        self.objects.lock().unwrap().insert(object.name_any(), value);
    }

    fn block(&self, cidr: &str) -> Option<AddressBlock> {
        let name = kni_ipam::blocks::object_name(&red().name, &cidr.parse().unwrap());
        let objects = self.objects.lock().unwrap();
        objects
            .get(&name)
            .map(|value| serde_json::from_value(value.clone()).unwrap())
    }

    /// The requests that change something, as method and name.
    fn writes(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let name = head.uri.path().rsplit_once("/addressblocks").unwrap().1;
                let (code, value) = server.reply(&head.method, name.trim_start_matches('/'), body);
                let reply = Response::builder().status(code);
                let body = Body::from(serde_json::to_vec(&value).unwrap());
                Ok::<_, std::convert::Infallible>(reply.body(body).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn reply(&self, method: &Method, name: &str, body: Value) -> (StatusCode, Value) {
        let mut objects = self.objects.lock().unwrap();
        if method != Method::GET {
            self.requests.lock().unwrap().push(format!("{method} {name}"));
        }
        match (method, name) {
            (&Method::GET, "") => {
                let items: Vec<&Value> = objects.values().collect();
                let list = json!({ "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlockList", "metadata": {}, "items": items });
                (StatusCode::OK, list)
            }
            (&Method::POST, _) => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                if objects.contains_key(&name) {
                    return status(StatusCode::CONFLICT, "AlreadyExists");
                }
                objects.insert(name, body.clone());
                (StatusCode::CREATED, body)
            }
            (_, name) => match objects.get_mut(name) {
                None => status(StatusCode::NOT_FOUND, "NotFound"),
                Some(object) if method == Method::PATCH => {
                    let asked = &body["metadata"]["resourceVersion"];
                    if *asked != object["metadata"]["resourceVersion"] {
                        return status(StatusCode::CONFLICT, "Conflict");
                    }
                    for (field, value) in body["spec"].as_object().into_iter().flatten() {
                        object["spec"][field] = value.clone();
                    }
                    object["metadata"]["resourceVersion"] = "6".into();
                    (StatusCode::OK, object.clone())
                }
                Some(object) => (StatusCode::OK, object.clone()),
            },
        }
    }
}

fn status(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": reason, "reason": reason,
        "code": code.as_u16(),
    });
    (code, status)
}

fn red() -> NetworkRef {
    NetworkRef {
        name: "red".parse().unwrap(),
        uid: "r2".to_owned(),
    }
}

/// The network of the name before.
fn earlier_red() -> NetworkRef {
    NetworkRef {
        uid: "r1".to_owned(),
        ..red()
    }
}

fn node(name: &str, uid: &str) -> NodeRef {
    NodeRef {
        name: name.to_owned(),
        uid: uid.to_owned(),
    }
}

#[tokio::test]
async fn a_node_that_was_registered_again_takes_its_block_over_in_one_write() {
    let server = ApiServer::with(&[(UNIT, node("n1", "a"), &red())]);
    let claims = Claims::new(server.client(), node("n1", "b"));
    let claim = claims.claim(&red(), &UNIT.parse().unwrap()).await;
    assert_eq!(claim.unwrap(), Claim::Ours);
    let block = server.block(UNIT).unwrap();
    assert_eq!(block.spec.node_uid, "b");
    assert_eq!(block.finalizers(), [LEASES_FINALIZER], "it was never free");
    assert_eq!(server.writes(), ["POST ", "PATCH red.v4-10-0-0-0-26"]);
}

#[tokio::test]
async fn the_block_of_another_node_stays_where_it_is() {
    let server = ApiServer::with(&[(UNIT, node("n2", "a"), &red())]);
    let claims = Claims::new(server.client(), node("n1", "b"));
    let claim = claims.claim(&red(), &UNIT.parse().unwrap()).await.unwrap();
    assert!(
        matches!(&claim, Claim::Taken(by) if by.contains("node n2")),
        "{claim:?}"
    );
    assert_eq!(server.writes(), ["POST "]);
}

/// Also those without pods, which no claim asks for, and those that are being deleted: pods may have addresses of them.
#[tokio::test]
async fn all_blocks_of_a_node_that_was_registered_again_are_taken_over() {
    let other = "10.0.0.64/26";
    let leaving = "10.0.0.128/26";
    let server = ApiServer::with(&[
        (UNIT, node("n1", "a"), &red()),
        (other, node("n1", "b"), &red()),
        (leaving, node("n1", "a"), &red()),
    ]);
    let mut deleted = server.block(leaving).unwrap();
    deleted.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    server.put(&deleted);
    let claims = Claims::new(server.client(), node("n1", "b"));
    let own = claims.own().await.unwrap().unwrap();
    let (own, done) = claims.adopt_all(own).await;
    done.unwrap();
    assert_eq!(own.len(), 3);
    for object in own {
        let range = range_of(&object).unwrap().to_string();
        assert_eq!(object.spec.node_uid, "b", "{range}");
        assert_eq!(claims.is_valid(&object, &red()), range != leaving, "{range}");
    }
    assert_eq!(server.writes().len(), 2, "{:?}", server.writes());
}

#[tokio::test]
async fn a_block_that_changes_while_it_is_taken_over_is_left_as_it_is() {
    let server = ApiServer::with(&[(UNIT, node("n1", "a"), &red())]);
    let claims = Claims::new(server.client(), node("n1", "b"));
    let own = claims.own().await.unwrap().unwrap();
    let mut changed = server.block(UNIT).unwrap();
    changed.metadata.resource_version = Some("7".to_owned());
    server.put(&changed);
    let (own, done) = claims.adopt_all(own).await;
    done.unwrap();
    assert!(claims.is_of_earlier_node(&own[0]), "the next attempt reads it again");
    assert_eq!(server.block(UNIT).unwrap().spec.node_uid, "a");
}

/// Its own pods may still have addresses of it, so it is released first.
#[tokio::test]
async fn a_block_of_an_earlier_network_is_not_taken_over_by_a_claim() {
    let server = ApiServer::with(&[(UNIT, node("n1", "a"), &earlier_red())]);
    let claims = Claims::new(server.client(), node("n1", "b"));
    let claim = claims.claim(&red(), &UNIT.parse().unwrap()).await.unwrap();
    assert!(matches!(claim, Claim::Taken(_)), "{claim:?}");
    assert_eq!(server.writes(), ["POST "]);
}
