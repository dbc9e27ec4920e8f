//! Tests how an agent behaves towards an API server that is overloaded, with simulated time where it is long.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::atomic::{AtomicU32, Ordering},
};

use http_body_util::BodyExt as _;

use super::*;

const MINUTE: Duration = Duration::from_mins(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The requests of an agent: 21 watches, and loops of each level that try again after a quarter of a second.
fn callers() -> Vec<usize> {
    let mut callers = vec![0; 21];
    callers.extend([1, 1, 1, 1, 2, 2, 2, 2]);
    callers
}

/// Simulates a minute in which the API server refuses each request after 10 ms; returns how many it gets.
fn refused_in_a_minute(retry_after: Duration) -> usize {
    let latency = Duration::from_millis(10);
    let begin = Instant::now();
    let mut levels = [Level::default(), Level::default(), Level::default()];
    let mut probing = [None::<Instant>; 3];
    let mut next: BinaryHeap<Reverse<(Instant, usize, bool)>> = BinaryHeap::new();
    let callers = callers();
    next.extend((0..callers.len()).map(|caller| Reverse((begin, caller, false))));
    let mut sent = 0;
    while let Some(Reverse((now, caller, answers))) = next.pop() {
        if now > begin + MINUTE {
            break;
        }
        let level = callers[caller];
        if answers {
            levels[level].answered(now, Some(retry_after), (true, LONGEST));
            probing[level] = None;
            next.push(Reverse((now + Duration::from_millis(250), caller, false)));
            continue;
        }
        match levels[level].enter(now) {
            Entry::Open => panic!("nothing was accepted"),
            Entry::Probe if probing[level].is_none() => {
                sent += 1;
                probing[level] = Some(now);
                next.push(Reverse((now + latency, caller, true)));
            }
            Entry::Probe => next.push(Reverse((now + latency, caller, false))),
            Entry::Closed(_) => next.push(Reverse((now + Duration::from_millis(250), caller, false))),
        }
    }
    sent
}

#[test]
fn an_agent_sends_an_overloaded_api_server_few_requests_in_a_minute() {
    for seconds in [0, 1, 5] {
        for _seed in 0..200 {
            let sent = refused_in_a_minute(Duration::from_secs(seconds));
            assert!((3..=20).contains(&sent), "Retry-After {seconds}: {sent} requests");
        }
    }
}

#[test]
fn pauses_grow_last_as_long_as_the_api_server_asks_and_end_with_an_accepted_request() {
    let mut level = Level::default();
    let mut now = Instant::now();
    let retry_after = Duration::from_secs(5);
    for least in [5, 5, 8, 16, 30, 30] {
        assert_eq!(level.enter(now), Entry::Probe);
        level.answered(now, Some(retry_after), (true, LONGEST));
        let Entry::Closed(wait) = level.enter(now) else {
            panic!("{level:?}")
        };
        let least = Duration::from_secs(least);
        assert!((least..=least * 3 / 2).contains(&wait), "{wait:?} of {least:?}");
        now += wait;
    }
    level.answered(now, None, (true, LONGEST));
    assert_eq!(level.enter(now), Entry::Open);
    level.answered(now, Some(Duration::ZERO), (false, LONGEST));
    let Entry::Closed(wait) = level.enter(now) else {
        panic!("{level:?}")
    };
    assert!(wait < Duration::from_secs(4), "it begins anew: {wait:?}");
    // The answers to requests that were sent before.
    level.answered(now, None, (false, LONGEST));
    level.answered(now, Some(Duration::ZERO), (false, LONGEST));
    assert_eq!(level.enter(now), Entry::Closed(wait));
    level.answered(now, Some(MINUTE), (false, LONGEST));
    assert_eq!(level.enter(now), Entry::Closed(MINUTE));
}

#[test]
fn a_budget_allows_bursts_and_no_more_on_average() {
    let mut budget = Budget::default();
    let now = Instant::now() + MINUTE;
    let waits = |budget: &mut Budget, now: Instant| -> Vec<Duration> {
        let all = (0..200).map(|_request| budget.next(now).saturating_duration_since(now));
        all.collect()
    };
    let first = waits(&mut budget, now);
    assert!(first[..=100].iter().all(Duration::is_zero), "{first:?}");
    assert_eq!(first[199], INTERVAL * 99);
    let later = waits(&mut budget, now + INTERVAL * 100);
    assert_eq!(later[0], Duration::ZERO);
    assert_eq!(later[199], INTERVAL * 199);
}

#[test]
fn a_request_has_the_priority_level_of_the_flow_schemas() {
    let schemas = include_str!("../../../../deploy/base/flow-schemas.yaml");
    let critical = schemas.split("\n  name: kni-critical\n").nth(2).unwrap();
    let critical = critical.split("\n---").next().unwrap();
    for kind in CRITICAL {
        assert!(critical.contains(&format!("            - {kind}\n")), "{kind}");
    }
    for (method, path, priority) in [
        (
            http::Method::GET,
            "/apis/kni.dev/v1alpha1/addressblocks",
            Priority::Watches,
        ),
        (
            http::Method::GET,
            "/apis/kni.dev/v1alpha1/addressblocks/a",
            Priority::Critical,
        ),
        (
            http::Method::PATCH,
            "/apis/kni.dev/v1alpha1/networkmembers/a/status",
            Priority::Critical,
        ),
        (http::Method::GET, "/apis/kni.dev/v1alpha1", Priority::Critical),
        (
            http::Method::PATCH,
            "/apis/kni.dev/v1alpha1/nodenetworks/a/status",
            Priority::Reports,
        ),
        (
            http::Method::PATCH,
            "/api/v1/namespaces/a/pods/b/status",
            Priority::Reports,
        ),
    ] {
        assert_eq!(priority_of(&Call::of(&method, path, "")), priority, "{path}");
    }
}

#[test]
fn the_queues_of_a_priority_level_fit_a_request_of_each_of_many_agents() {
    let schemas = include_str!("../../../../deploy/base/flow-schemas.yaml");
    let numbers = |field: &str| -> Vec<u32> {
        let values = schemas.lines().filter_map(|line| line.trim().strip_prefix(field));
        values.map(|value| value.trim().parse().unwrap()).collect()
    };
    // All agents are one account, whose requests go to so many of the queues.
    let (queues, hands, limits) = (numbers("queues:"), numbers("handSize:"), numbers("queueLengthLimit:"));
    assert_eq!(hands.len(), 3);
    for ((queues, hand), limit) in queues.iter().zip(&hands).zip(&limits) {
        assert!(hand * limit >= 20_000, "{hand} queues of {limit}");
        assert!(hand * 8 < *queues, "kni-controller has queues of its own");
    }
}

/// A client of an API server that answers with this status and `Retry-After: 1`, and the number of its requests.
fn client(
    status: StatusCode,
) -> (
    impl Clone + Fn(&str) -> BoxFuture<'static, (StatusCode, Bytes)>,
    Arc<AtomicU32>,
) {
    let requests = Arc::<AtomicU32>::default();
    let seen = Arc::clone(&requests);
    let server = tower::service_fn(move |_request: Request<Body>| {
        let seen = Arc::clone(&seen);
        async move {
            seen.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await;
            let response = Response::builder().status(status);
            let response = if status.is_success() {
                response
            } else {
                response.header(RETRY_AFTER, "1")
            };
            response.body(Body::from(b"{}".to_vec()))
        }
    });
    let paced = Paced {
        longest: LONGEST,
        counts: RequestCounts::default(),
    };
    let service = Arc::new(Mutex::new(paced.layer(server)));
    let send = move |path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = service.lock().unwrap().call(request);
        let read: BoxFuture<'static, _> = Box::pin(async move {
            let answer = answer.await.unwrap();
            let status = answer.status();
            (status, answer.into_body().collect().await.unwrap().to_bytes())
        });
        read
    };
    (send, requests)
}

#[tokio::test]
async fn many_requests_at_once_wait_for_the_answer_to_one() {
    for (status, sent) in [(StatusCode::TOO_MANY_REQUESTS, 1), (StatusCode::OK, 10)] {
        let (send, requests) = client(status);
        let all = (0..10).map(|number| send(&format!("/api/v1/nodes/n{number}")));
        let answers = futures::future::join_all(all).await;
        assert!(answers.iter().all(|(found, _)| *found == status), "{answers:?}");
        assert_eq!(requests.load(Ordering::Relaxed), sent);
        if !status.is_success() {
            let body = String::from_utf8_lossy(&answers[9].1).into_owned();
            assert!(
                body.contains("overloaded") && body.contains("TooManyRequests"),
                "{body}"
            );
            let (other, _) = send("/apis/kni.dev/v1alpha1/addressblocks/a").await;
            assert_eq!((other, requests.load(Ordering::Relaxed)), (status, 2), "another level");
        }
    }
}

#[tokio::test]
async fn a_request_that_is_given_up_stops_no_other() {
    let (send, requests) = client(StatusCode::OK);
    drop(tokio::time::timeout(Duration::from_millis(5), send("/api/v1/nodes/a")).await);
    assert_eq!(send("/api/v1/nodes/b").await.0, StatusCode::OK);
    assert_eq!(requests.load(Ordering::Relaxed), 2);
}
