//! Tests how terms begin and end, against an API server that keeps one Lease.

use std::sync::{Arc, Mutex};

use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

fn leadership(number: u64) -> (watch::Sender<Option<Term>>, Leadership) {
    let (sender, term) = watch::channel(None);
    (sender, Leadership { term, number })
}

fn term(number: u64, until: Instant) -> Term {
    Term { number, until }
}

#[tokio::test]
async fn a_term_that_is_not_renewed_in_time_writes_nothing_and_lasts() {
    let (sender, leadership) = leadership(1);
    let past = Instant::now();
    sender.send_replace(Some(term(1, past)));
    assert_eq!((leadership.until(), leadership.is_held()), (None, false));
    assert!(leadership.lasts());
    let later = past + GIVE_UP;
    sender.send_replace(Some(term(1, later)));
    assert_eq!((leadership.until(), leadership.is_held()), (Some(later), true));
    sender.send_replace(None);
    assert!(!leadership.lasts());
    leadership.lost().await;
}

#[test]
fn writes_end_before_another_replica_may_begin() {
    let expires = Duration::from_secs(u64::try_from(DURATION_SECONDS).unwrap());
    assert!(GIVE_UP + Duration::from_secs(5) <= expires);
    assert!(RENEW * 2 < GIVE_UP, "one failed renewal changes nothing");
}

/// A renewal counts from the moment in which it is sent, so two that follow each other must fit in.
#[test]
fn an_api_server_that_answers_in_3_s_ends_no_term() {
    let latency = Duration::from_secs(3);
    assert!(latency < REQUEST && latency.max(RENEW) + latency < GIVE_UP);
    assert!(
        REQUEST * 2 <= GIVE_UP,
        "a request without an answer is followed by another one in time"
    );
}

#[tokio::test]
async fn another_term_is_not_this_one() {
    let (sender, candidate) = leadership(0);
    sender.send_replace(Some(term(1, Instant::now() + GIVE_UP)));
    let first = candidate.won().await;
    assert!(first.until().is_some());
    sender.send_replace(Some(term(2, Instant::now() + GIVE_UP)));
    assert_eq!(first.until(), None, "its tables may be old");
    assert!(first.is_held(), "the replica does, in another term");
    first.lost().await;
    assert!(candidate.won().await.until().is_some());
}

/// An API server that keeps the Lease, if there is one.
#[derive(Clone)]
struct ApiServer {
    readiness: Readiness,
    lease: Arc<Mutex<Option<Value>>>,
    requests: Arc<Mutex<Vec<Method>>>,
}

impl Default for ApiServer {
    fn default() -> Self {
        Self {
            readiness: Readiness::for_tests(&[]),
            lease: Arc::default(),
            requests: Arc::default(),
        }
    }
}

impl ApiServer {
    fn answer(&self, method: &Method, sent: &[u8]) -> (StatusCode, Value) {
        self.requests.lock().unwrap().push(method.clone());
        let mut lease = self.lease.lock().unwrap();
        let version = |lease: &Value| -> u64 {
            let version = lease.pointer("/metadata/resourceVersion").and_then(Value::as_str);
            version.map_or(0, |version| version.parse().unwrap())
        };
        let before = lease.as_ref().map(version);
        let refused = |code: StatusCode| {
            let reason = if code == StatusCode::NOT_FOUND {
                "NotFound"
            } else {
                "Conflict"
            };
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": reason,
                "code": code.as_u16(),
            });
            (code, status)
        };
        if *method == Method::GET {
            return lease
                .clone()
                .map_or_else(|| refused(StatusCode::NOT_FOUND), |lease| (StatusCode::OK, lease));
        }
        let mut new: Value = serde_json::from_slice(sent).unwrap();
        match (method == Method::PUT, before) {
            (true, None) => return refused(StatusCode::NOT_FOUND),
            (false, Some(_)) => return refused(StatusCode::CONFLICT),
            (true, Some(before)) if before != version(&new) => return refused(StatusCode::CONFLICT),
            _ => {}
        }
        new["metadata"]["resourceVersion"] = json!((before.unwrap_or(100) + 1).to_string());
        *lease = Some(new.clone());
        (StatusCode::OK, new)
    }

    fn candidate(&self, name: &str) -> Election {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (parts, body) = request.into_parts();
                let sent = body.collect_bytes().await?;
                let (status, object) = server.answer(&parts.method, &sent);
                let mut response = Response::new(Body::from(object.to_string().into_bytes()));
                *response.status_mut() = status;
                Ok::<_, kube::Error>(response)
            }
        });
        Election::new(
            Client::new(service, "default"),
            "kni-system",
            name,
            self.readiness.clone(),
        )
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        change(self.lease.lock().unwrap().as_mut().unwrap());
    }

    fn requests(&self) -> Vec<Method> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

fn number(election: &Election) -> Option<u64> {
    election.term.borrow().map(|term| term.number)
}

#[tokio::test]
async fn a_lease_is_renewed_by_one_request() {
    let server = ApiServer::default();
    let mut first = server.candidate("first");
    first.round().await;
    assert_eq!(
        (number(&first), server.requests()),
        (Some(1), vec![Method::GET, Method::POST])
    );
    for _renewal in 0..3 {
        first.round().await;
        assert_eq!((number(&first), server.requests()), (Some(1), vec![Method::PUT]));
    }
    let mut second = server.candidate("second");
    second.round().await;
    assert_eq!(number(&second), None);
}

#[tokio::test]
async fn a_late_renewal_continues_the_term_unless_another_replica_acted_or_a_watch_failed() {
    let server = ApiServer::default();
    let mut first = server.candidate("first");
    first.round().await;
    let leadership = first.leadership().won().await;
    let expire = |election: &Election| {
        let number = number(election).unwrap();
        election.term.send_replace(Some(term(number, Instant::now())));
    };
    expire(&first);
    assert_eq!(leadership.until(), None);
    first.round().await;
    assert!(leadership.until().is_some(), "nobody else has acted");
    // A renewal whose answer is lost.
    expire(&first);
    server.change(|lease| lease["metadata"]["resourceVersion"] = json!("150"));
    first.round().await;
    assert!(leadership.until().is_some());
    // A watch has failed meanwhile.
    first.failures += 1;
    expire(&first);
    first.round().await;
    assert!(!leadership.lasts(), "its tables may be old");
    // It took very long.
    let leadership = first.leadership().won().await;
    let long_ago = Instant::now() - LATE - Duration::from_secs(1);
    first
        .term
        .send_replace(number(&first).map(|number| term(number, long_ago)));
    first.round().await;
    assert!(!leadership.lasts());
    // Another replica has acted and gave it up.
    let leadership = first.leadership().won().await;
    expire(&first);
    let mut second = server.candidate("second");
    server.change(|lease| lease["spec"]["holderIdentity"] = json!(null));
    second.round().await;
    assert_eq!(number(&second), Some(1));
    second.give_up().await.unwrap();
    first.round().await;
    assert!(!leadership.lasts());
    assert_eq!(number(&first), Some(4));
}

#[tokio::test]
async fn everything_is_read_again_after_a_restore() {
    let server = ApiServer::default();
    let mut first = server.candidate("first");
    for _renewal in 0..3 {
        first.round().await;
    }
    server.change(|lease| lease["metadata"]["resourceVersion"] = json!("101"));
    first.round().await;
    assert_eq!(number(&first), Some(2));
    *server.lease.lock().unwrap() = None;
    first.round().await;
    assert_eq!(number(&first), Some(3), "the Lease itself is gone");
}

#[tokio::test]
async fn a_replica_that_cannot_read_a_kind_does_not_acquire_the_lease() {
    let server = ApiServer {
        readiness: Readiness::for_tests(&["pods: forbidden"]),
        ..ApiServer::default()
    };
    let mut first = server.candidate("first");
    first.round().await;
    assert_eq!((number(&first), server.requests()), (None, Vec::new()));
}
