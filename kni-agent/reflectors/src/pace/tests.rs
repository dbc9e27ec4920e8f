//! Tests how an agent behaves towards an API server that is overloaded. Where it is long, pauses are a sixtieth.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use futures::future::join_all;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    gate::{UNANSWERED, UNANSWERED_OF_LEVEL},
    level::{Entry, Level},
    *,
};
use crate::requests::{Bounded, RequestCounts};

const MINUTE: Duration = Duration::from_mins(1);
const PAUSES: Pauses = Pauses {
    shortest: SHORTEST,
    longest: Duration::from_secs(30),
};
/// Longer than any wait that must end.
const LONG: Duration = Duration::from_mins(2);

/// How many requests a level sends in a minute in which all are refused at once.
fn sent_in_a_minute(mut level: Level, retry_after: Duration) -> usize {
    let begin = Instant::now();
    let (mut now, mut sent) = (begin, 0);
    while now <= begin + MINUTE {
        now += match level.enter(now) {
            Entry::Closed(wait) => wait,
            Entry::Probe | Entry::Open => {
                sent += 1;
                level.refused(now, retry_after, (true, PAUSES));
                Duration::ZERO
            }
        };
    }
    sent
}

#[test]
fn an_agent_sends_an_overloaded_api_server_few_requests_in_a_minute() {
    for seconds in [0, 1, 5, 100_000, u64::MAX] {
        for _seed in 0..200 {
            let retry_after = Duration::from_secs(seconds);
            let unsure = sent_in_a_minute(Level::default(), retry_after);
            let mut refused = Level::default();
            refused.refused(Instant::now(), retry_after, (true, PAUSES));
            let refused = sent_in_a_minute(refused, retry_after);
            // The unanswered requests close one level at least, and leave the others unconfirmed.
            let sent = UNANSWERED + refused + 2 * unsure;
            assert!((6..=20).contains(&sent), "Retry-After {seconds}: {sent} requests");
        }
    }
}

#[test]
fn pauses_grow_last_as_long_as_the_api_server_asks_and_end_with_an_accepted_request() {
    let mut level = Level::default();
    let mut now = Instant::now();
    let closed = |level: &Level, now| match level.enter(now) {
        Entry::Closed(wait) => wait,
        entry @ (Entry::Open | Entry::Probe) => panic!("{entry:?}: {level:?}"),
    };
    let retry_after = Duration::from_secs(5);
    for least in [5, 6, 12, 24, 30, 30] {
        assert_eq!(level.enter(now), Entry::Probe);
        level.refused(now, retry_after, (true, PAUSES));
        let (wait, least) = (closed(&level, now), Duration::from_secs(least));
        assert!((least..=least * 3 / 2).contains(&wait), "{wait:?} of {least:?}");
        now += wait;
    }
    level.unconfirm();
    assert_eq!(level.enter(now), Entry::Probe);
    level.accepted();
    assert_eq!(level.enter(now), Entry::Open);
    level.refused(now, Duration::ZERO, (false, PAUSES));
    let wait = closed(&level, now);
    assert!(wait < SHORTEST * 2, "it begins anew: {wait:?}");
    // The answers to requests that were sent before.
    level.refused(now, Duration::ZERO, (false, PAUSES));
    level.unconfirm();
    assert_eq!(closed(&level, now), wait);
    level.refused(now, Duration::from_secs(20), (false, PAUSES));
    assert_eq!(closed(&level, now), Duration::from_secs(20));
    level.refused(now, Duration::MAX, (false, PAUSES));
    assert_eq!(closed(&level, now), PAUSES.longest);
    level.accepted();
    level.refused(now, Duration::MAX, (true, PAUSES));
    assert!(closed(&level, now) <= PAUSES.longest * 3 / 2);
    level.accepted();
    level.unconfirm();
    assert_eq!(level.enter(now), Entry::Probe);
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

/// How an API server answers.
#[derive(Debug, Clone, Copy)]
enum Mode {
    Status(u16, Option<&'static str>),
    /// Never.
    Hang,
}

/// An API server that counts its requests.
#[derive(Debug)]
struct Server {
    mode: Mutex<Mode>,
    latency: Duration,
    /// When each request came.
    seen: Mutex<Vec<Instant>>,
    /// Requests that wait for an answer, and the most that did.
    unanswered: [AtomicUsize; 2],
}

impl Server {
    fn set(&self, status: u16, retry_after: Option<&'static str>) {
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner) = Mode::Status(status, retry_after);
    }

    fn seen(&self) -> usize {
        self.seen_before(Instant::now())
    }

    fn seen_before(&self, end: Instant) -> usize {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|at| **at < end).count()
    }

    async fn answer(self: Arc<Self>, request: Request<Body>) -> Result<Response<Body>, http::Error> {
        self.seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Instant::now());
        let mode = *self.mode.lock().unwrap_or_else(PoisonError::into_inner);
        let [unanswered, most] = &self.unanswered;
        most.fetch_max(unanswered.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        sleep(self.latency).await;
        unanswered.fetch_sub(1, Ordering::SeqCst);
        let mode = if request.uri().path().ends_with("/hang") {
            Mode::Hang
        } else {
            mode
        };
        let Mode::Status(status, retry_after) = mode else {
            std::future::pending::<()>().await;
            unreachable!("it never ends")
        };
        let mut response = Response::builder().status(status);
        if let Some(retry_after) = retry_after {
            response = response.header(RETRY_AFTER, retry_after);
        }
        response.body(Body::from(b"{}".to_vec()))
    }
}

/// An agent's client.
#[derive(Clone)]
struct Agent {
    send: Arc<dyn Fn(&str) -> Answer + Send + Sync>,
    interruptions: Interruptions,
    counts: RequestCounts,
}

type Answer = BoxFuture<'static, Result<(u16, String), BoxError>>;

impl Agent {
    async fn status(&self, path: &str) -> u16 {
        (self.send)(path).await.unwrap().0
    }

    async fn all(&self, paths: impl IntoIterator<Item = &str>) -> Vec<u16> {
        join_all(paths.into_iter().map(|path| self.status(path))).await
    }

    fn paused(&self) -> u64 {
        let all = self.counts.view().into_iter();
        all.filter(|one| one.code == "paused").map(|one| one.count).sum()
    }
}

/// The limits of an agent, and a shortest pause.
const REAL: (RequestLimits, Duration) = (
    RequestLimits {
        call: LONG,
        list: LONG,
        watch_idle: LONG,
        pause: PAUSES.longest,
    },
    SHORTEST,
);

fn agent(mode: Mode, (limits, shortest): (RequestLimits, Duration)) -> (Agent, Arc<Server>) {
    let server = Arc::new(Server {
        mode: Mutex::new(mode),
        latency: Duration::from_millis(10),
        seen: Mutex::default(),
        unanswered: [const { AtomicUsize::new(0) }; 2],
    });
    let (counts, interruptions) = (RequestCounts::default(), Interruptions::default());
    let pauses = Pauses {
        shortest,
        longest: limits.pause,
    };
    let paced = Paced {
        gate: Arc::new(Gate::new(interruptions.subscribe(), pauses)),
        slow: limits.call / SLOW,
    };
    let bounded = Bounded {
        limits,
        counts: counts.clone(),
        interruptions: interruptions.clone(),
    };
    let answers = Arc::clone(&server);
    let inner = tower::service_fn(move |request| Arc::clone(&answers).answer(request));
    let service = Mutex::new(bounded.layer(paced.layer(inner)));
    let send = move |path: &str| -> Answer {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = service.lock().unwrap().call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await?.to_bytes();
            Ok((status, String::from_utf8_lossy(&body).into_owned()))
        })
    };
    let agent = Agent {
        send: Arc::new(send),
        interruptions,
        counts,
    };
    (agent, server)
}

const REPORT: &str = "/apis/kni.dev/v1alpha1/nodenetworks/a";
const CLAIM: &str = "/apis/kni.dev/v1alpha1/addressblocks/a";
const WATCH: &str = "/api/v1/pods?watch=true";
const OK: Mode = Mode::Status(200, None);

#[tokio::test]
async fn many_requests_at_once_wait_for_the_answer_to_one() {
    for (status, sent) in [(429, 1), (200, 10)] {
        let (agent, server) = agent(Mode::Status(status, Some("1")), REAL);
        assert_eq!(agent.all([REPORT; 10]).await, [status; 10]);
        assert_eq!(server.seen(), sent);
        if status == 429 {
            assert_eq!(agent.paused(), 9);
            let body = (agent.send)(REPORT).await.unwrap().1;
            assert!(
                body.contains("overloaded") && body.contains("TooManyRequests"),
                "{body}"
            );
            assert_eq!((agent.status(CLAIM).await, server.seen()), (status, 2), "another level");
        }
    }
}

/// The API server ends all watches of an agent at once, when it ends itself for example.
#[tokio::test]
async fn interrupted_watches_return_after_the_answer_to_one() {
    for (status, sent) in [(429, 1), (200, 21)] {
        let (agent, server) = agent(OK, REAL);
        // Answers that end at once interrupt, too.
        assert_eq!(agent.all([WATCH; 21]).await, [200; 21]);
        agent.status(REPORT).await;
        agent.interruptions.note();
        server.set(status, Some("1"));
        let before = server.seen();
        if status == 429 {
            assert_eq!(agent.all([WATCH; 21]).await, [status; 21]);
            assert_eq!(agent.all([REPORT; 21]).await, [status; 21]);
            assert_eq!(server.seen() - before, 2 * sent, "one of each level");
        } else {
            assert_eq!(agent.all([WATCH; 21]).await, [status; 21]);
            assert_eq!(server.seen() - before, sent);
        }
    }
}

#[tokio::test]
async fn few_requests_wait_for_an_answer_at_once() {
    let (agent, server) = agent(OK, REAL);
    // All levels are open.
    for path in [REPORT, CLAIM, WATCH, REPORT, CLAIM] {
        agent.status(path).await;
    }
    let most = || server.unanswered[1].swap(0, Ordering::SeqCst);
    most();
    agent.all([REPORT; 20]).await;
    assert_eq!(most(), UNANSWERED_OF_LEVEL);
    agent.all([REPORT, CLAIM].repeat(20)).await;
    assert_eq!(most(), UNANSWERED);
}

/// Asks until the answer is a success, as the loops of an agent do.
async fn ask(agent: Agent, path: &'static str, shortest: Duration, longest: Duration) {
    let mut pause = shortest;
    while agent.status(path).await != 200 {
        sleep(pause.mul_f64(fastrand::f64().mul_add(0.5, 0.5))).await;
        pause = (pause * 2).min(longest);
    }
}

/// A minute that takes a second. Pauses are sixtieths, and a Retry-After of a second is longer than the longest.
async fn minute_of(retry_after: Option<&'static str>) -> (usize, Duration) {
    let minute = MINUTE / 60;
    let (shortest, longest) = (SHORTEST / 60, PAUSES.longest / 60);
    let limits = RequestLimits {
        pause: longest,
        ..REAL.0
    };
    let (agent, server) = agent(OK, (limits, shortest));
    for path in [REPORT, CLAIM, WATCH] {
        agent.status(path).await;
    }
    server.set(429, retry_after);
    agent.interruptions.note();
    let (begin, before) = (Instant::now(), server.seen());
    // As many as the loops of an agent send at once.
    let paths = [(WATCH, 21), (CLAIM, 40), (REPORT, 48)];
    let paths = paths.into_iter().flat_map(|(path, count)| vec![path; count]);
    let own = Duration::from_millis(500) / 60;
    let loops = paths.map(|path| tokio::spawn(ask(agent.clone(), path, own, longest)));
    let loops: Vec<_> = loops.collect();
    sleep_until(begin + minute).await;
    let sent = server.seen_before(begin + minute) - before;
    server.set(200, None);
    let end = Instant::now();
    for result in timeout(LONG, join_all(loops)).await.unwrap() {
        result.unwrap();
    }
    (sent, end.elapsed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minute_of_refusals_is_at_most_20_requests_and_all_are_served_after_it() {
    for retry_after in [
        None,
        Some("0"),
        Some("100000"),
        Some("18446744073709551615"),
        Some("soon"),
    ] {
        let (sent, after) = minute_of(retry_after).await;
        assert!((3..=20).contains(&sent), "Retry-After {retry_after:?}: {sent} requests");
        // The longest pause of a level, that of a loop, and the time for 109 requests.
        assert!(
            after < Duration::from_secs(20),
            "Retry-After {retry_after:?}: {after:?}"
        );
    }
}

/// Failures show nothing of the load, unless the API server asks to wait: each loop has its own pauses.
#[tokio::test]
async fn an_api_server_that_fails_closes_no_level() {
    for status in [500, 503, 504] {
        let (agent, server) = agent(Mode::Status(status, None), REAL);
        assert_eq!(agent.all([REPORT; 10]).await, [status; 10]);
        assert_eq!((server.seen(), agent.paused()), (10, 0));
        let most = server.unanswered[1].load(Ordering::SeqCst);
        assert_eq!(most, 1, "nothing is accepted, so each goes first");
        server.set(status, Some("1"));
        assert_eq!(agent.status(REPORT).await, status);
        assert_eq!(agent.status(REPORT).await, 429);
        assert_eq!((server.seen(), agent.paused()), (11, 1));
    }
    let (agent, server) = agent(Mode::Status(200, Some("1")), REAL);
    assert_eq!(agent.all([REPORT; 10]).await, [200; 10]);
    assert_eq!((server.seen(), agent.paused()), (10, 0), "an answer asks for nothing");
}

#[tokio::test]
async fn a_request_that_is_given_up_stops_no_other() {
    let (agent, server) = agent(OK, REAL);
    drop(timeout(Duration::from_millis(5), agent.status(REPORT)).await);
    assert_eq!(agent.status(REPORT).await, 200);
    assert_eq!(server.seen(), 2);
}

/// A limit of 3 s, of which a request without an answer stops others for a fifth.
const SHORT: (RequestLimits, Duration) = (
    RequestLimits {
        call: Duration::from_secs(3),
        list: Duration::from_secs(3),
        ..REAL.0
    },
    SHORTEST,
);

#[tokio::test]
async fn a_request_without_an_answer_holds_up_no_other() {
    let (agent, server) = agent(OK, SHORT);
    let unanswered = "/apis/kni.dev/v1alpha1/nodenetworks/hang";
    let hung: Vec<_> = (0..2).map(|_request| tokio::spawn((agent.send)(unanswered))).collect();
    while server.seen() == 0 {
        tokio::task::yield_now().await;
    }
    // Without a limit of its own: it would end with an error.
    assert_eq!(agent.status(REPORT).await, 200);
    for one in hung {
        assert!(one.await.unwrap().is_err());
    }
}

#[tokio::test]
async fn a_request_that_is_held_back_ends_within_its_limit() {
    let (agent, server) = agent(Mode::Hang, SHORT);
    let begin = Instant::now();
    let all = join_all((0..30).map(|_request| (agent.send)(WATCH)));
    let all = timeout(LONG, all).await.unwrap();
    let took = begin.elapsed();
    assert!(all.iter().all(Result::is_err), "{all:?}");
    assert!(server.seen() < 30, "{} of them were sent", server.seen());
    assert!(took < SHORT.0.list * 4, "{took:?}, one after the other takes 18 s");
}
