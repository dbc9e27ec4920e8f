use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
};

use kni_metrics::{ControlPlane, PolicyState, Snapshot, StateUse};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::oneshot,
    task::JoinHandle,
};

use super::*;

struct Nothing;

impl Source for Nothing {
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            traffic: Ok(Vec::new()),
            flows: Ok((1, 2)),
            lost_events: Err("not there".to_owned()),
            policy: Ok(PolicyState::default()),
            maps: Ok(Vec::new()),
            masquerade: Ok(Vec::new()),
            programs: Ok(Vec::new()),
            endpoints: Ok(Vec::new()),
            attach: Ok(Vec::new()),
            state: StateUse::default(),
            control_plane: ControlPlane::default(),
        }
    }
}

struct Served {
    address: SocketAddr,
    ready: Arc<AtomicBool>,
    alive: Arc<AtomicBool>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Served {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ready = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&ready);
        let alive = Arc::new(AtomicBool::new(true));
        let live = Arc::clone(&alive);
        let readiness: Probe = Arc::new(move || {
            if asked.load(Ordering::Relaxed) {
                Ok(())
            } else {
                Err("no default network".to_owned())
            }
        });
        let liveness: Probe = Arc::new(move || {
            if live.load(Ordering::Relaxed) {
                Ok(())
            } else {
                Err("no progress: removals".to_owned())
            }
        });
        let probes = Probes { readiness, liveness };
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(serve(listener, Arc::new(Nothing), probes, async {
            stopped.await.unwrap();
        }));
        Self {
            address,
            ready,
            alive,
            stop,
            server,
        }
    }

    /// Sends the bytes and reads until the server closes.
    async fn say(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // A server that refuses may close before everything is sent.
        let sent = stream.write_all(bytes).await;
        let mut text = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut text))
            .await
            .expect("the server closes the connection");
        assert!(!text.is_empty() || sent.is_err() || read.is_err(), "no answer at all");
        String::from_utf8(text).unwrap()
    }

    async fn get(&self, path: &str) -> String {
        self.say(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
            .await
    }
}

#[tokio::test]
async fn the_metrics_page() {
    let served = Served::start().await;
    for path in ["/metrics", "/metrics?x=y"] {
        let text = served.get(path).await;
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(
            text.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"),
            "{text}"
        );
        assert!(text.contains("connection: close\r\n"), "{text}");
        assert!(text.contains("kni_flows{family=\"ipv6\"} 2\n"), "{text}");
        assert!(text.contains("kni_scrape_error{part=\"lost_events\"} 1\n"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}

#[tokio::test]
async fn health_and_readiness() {
    let served = Served::start().await;
    for path in ["/healthz", "/readyz"] {
        let text = served.get(path).await;
        assert!(
            text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nok\n"),
            "{text}"
        );
    }
    served.ready.store(false, Ordering::Relaxed);
    let text = served.get("/readyz").await;
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    assert!(text.ends_with("\r\n\r\nno default network\n"), "{text}");
    assert!(served.get("/healthz").await.starts_with("HTTP/1.1 200 "));
    served.alive.store(false, Ordering::Relaxed);
    let text = served.get("/healthz").await;
    assert!(text.starts_with("HTTP/1.1 500 "), "{text}");
    assert!(text.ends_with("\r\n\r\nno progress: removals\n"), "{text}");
}

#[tokio::test]
async fn nothing_else_is_served() {
    let served = Served::start().await;
    for (request, expected) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 404 "),
        ("GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 404 "),
        (
            "POST /debug HTTP/1.1\r\nHost: x\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 404 ",
        ),
        ("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 405 "),
        (
            "POST /metrics HTTP/1.1\r\nHost: x\r\ncontent-length: 3\r\n\r\nabc",
            "HTTP/1.1 405 ",
        ),
        ("nonsense\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        let text = served.say(request.as_bytes()).await;
        assert!(text.starts_with(expected), "{request:?}: {text}");
    }
    let refused = served.say(b"POST /readyz HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(refused.contains("allow: GET\r\n"), "{refused}");
}

#[tokio::test]
async fn large_headers_are_refused() {
    let served = Served::start().await;
    let long = "x".repeat(2 * MAX_HEADER);
    let text = served
        .say(format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: {long}\r\n\r\n").as_bytes())
        .await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 431 "), "{text}");
    assert!(served.get("/healthz").await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn slow_clients_are_cut_off_and_others_wait_for_them_only() {
    let served = Served::start().await;
    let mut slow = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:").await.unwrap();
        slow.push(stream);
    }
    let begun = std::time::Instant::now();
    let text = tokio::time::timeout(HEADER_TIME * 2, served.get("/healthz"))
        .await
        .expect("slow clients do not hold the server up for ever");
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    assert!(
        begun.elapsed() > HEADER_TIME / 2,
        "no more than {MAX_CONNECTIONS} are served at once"
    );
}

#[tokio::test]
async fn told_to_stop_it_closes_what_is_open() {
    let served = Served::start().await;
    let mut open = TcpStream::connect(served.address).await.unwrap();
    open.write_all(b"GET /").await.unwrap();
    assert!(served.get("/healthz").await.starts_with("HTTP/1.1 200 "));
    served.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(2), served.server)
        .await
        .expect("stops at once")
        .unwrap();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(2), open.read_to_end(&mut rest)).await;
    assert!(ended.is_ok() && rest.is_empty(), "{rest:?}");
    TcpStream::connect(served.address).await.unwrap_err();
}
