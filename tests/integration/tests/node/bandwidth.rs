//! Tests that the rates of pods are enforced in both directions and for every peer, and limit no other pod.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage, bind::when_free, eventually_sync, manifest::network_policy, node::NODE_V4,
    patience, require,
};
use socket2::SockRef;

const PORT: u16 = 9000;
/// The rate of the limited pods.
const RATE: &str = "16M";
const BYTES_PER_SECOND: f64 = 2e6;
/// The duration without the first part, which uses up the burst.
const WARM_UP: Duration = Duration::from_millis(500);
const MEASURE: Duration = Duration::from_millis(1500);
/// What a receiver without CPU time finds in its socket, and what the bucket holds after a pause of the sender.
const BUFFERED: f64 = 256.0 * 1024.0;
const RECEIVE_BUFFER: usize = 64 * 1024;

/// What a stream received in a part of its time.
struct Part {
    bytes: f64,
    seconds: f64,
}

impl Part {
    /// As a part of the rate.
    fn share(&self) -> f64 {
        self.bytes / self.seconds / BYTES_PER_SECOND
    }
}

/// Sends one TCP stream to `address`, and shows its parts to `enough` until it is true.
fn stream(
    from: &Namespaces,
    to: &Namespaces,
    address: IpAddr,
    mut enough: impl FnMut(&Part) -> Result<bool>,
) -> Result<()> {
    let listener = to.enter(|| when_free(|| TcpListener::bind((address, PORT))))??;
    SockRef::from(&listener).set_recv_buffer_size(RECEIVE_BUFFER)?;
    thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<()> {
            let mut stream = from.enter(|| TcpStream::connect(SocketAddr::new(address, PORT)))??;
            let chunk = vec![7; 64 * 1024];
            // Ends when the receiver closes the connection.
            while stream.write_all(&chunk).is_ok() {}
            Ok(())
        });
        let (mut stream, _) = listener.accept()?;
        let mut receive = |time: Duration| -> Result<Part> {
            let mut buffer = vec![0; 256 * 1024];
            let (begun, mut bytes) = (Instant::now(), 0.0);
            while begun.elapsed() < time {
                let length = stream.read(&mut buffer)?;
                ensure!(length > 0, "the sender is gone");
                bytes += f64::from(u32::try_from(length)?);
            }
            let seconds = begun.elapsed().as_secs_f64();
            Ok(Part { bytes, seconds })
        };
        let mut measured = || -> Result<()> {
            receive(WARM_UP)?;
            while !enough(&receive(MEASURE)?)? {}
            Ok(())
        };
        let measured = measured();
        drop(stream);
        sender.join().map_err(|_panic| anyhow!("the sender panicked"))??;
        measured
    })
}

/// Checks that no part of a stream exceeds the rate, and that some part comes near it. Payload only: headers take 3 %.
/// A stream that meets a full bucket backs off, and a busy machine is slow.
fn assert_bounded(what: &str, from: &Namespaces, to: &Namespaces, address: IpAddr) -> Result<()> {
    let deadline = Instant::now() + patience();
    stream(from, to, address, |part| {
        let most = 1.1 * BYTES_PER_SECOND * part.seconds + BUFFERED;
        ensure!(part.bytes < most, "{what}: {:.2} of the rate", part.share());
        let near = part.share() >= 0.2;
        ensure!(
            near || Instant::now() < deadline,
            "{what}: {:.2} of the rate",
            part.share()
        );
        Ok(near)
    })
}

/// Checks that some part of a stream exceeds the rate by far.
fn assert_unbounded(what: &str, from: &Namespaces, to: &Namespaces, address: IpAddr) -> Result<()> {
    let deadline = Instant::now() + patience();
    stream(from, to, address, |part| {
        let beyond = part.share() > 2.0;
        ensure!(
            beyond || Instant::now() < deadline,
            "{what}: bounded to {:.2} of the rate",
            part.share()
        );
        Ok(beyond)
    })
}

async fn limited(stage: &Stage, name: &str, annotation: &str) -> Result<Pod> {
    stage.pod_with(name, &[(annotation, RATE)]).await
}

fn v4(pod: &Pod) -> IpAddr {
    pod.ips()[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_reaches_a_pod_is_bounded_from_pods_and_from_the_node() -> Result<()> {
    require!(root, netns, bpf, ip, tc);
    let stage = Stage::start("bw-in", Manifest::overlapping()).await?;
    let slow = limited(&stage, "slow", "kubernetes.io/ingress-bandwidth").await?;
    let (free, other) = (stage.pod("free").await?, stage.pod("other").await?);
    assert_bounded("pod to pod", &free.inside, &slow.inside, v4(&slow))?;
    assert_bounded("node to pod", &stage.node, &slow.inside, v4(&slow))?;
    assert_unbounded("what the pod sends", &slow.inside, &free.inside, v4(&free))?;
    assert_unbounded("other pods", &free.inside, &other.inside, v4(&other))?;
    // Each packet is counted once, when it is allowed.
    let interface = stage.interface(&slow, "eth0").await?;
    let (delivered, dropped) = (
        interface.to_pod.unwrap_or_default(),
        interface.dropped.unwrap_or_default(),
    );
    assert!(
        delivered.packets > 0 && dropped.packets == 0,
        "{delivered:?} {dropped:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_sends_is_bounded_to_pods_and_to_the_node() -> Result<()> {
    require!(root, netns, bpf, ip, tc);
    let stage = Stage::start("bw-out", Manifest::overlapping()).await?;
    let slow = limited(&stage, "slow", "kubernetes.io/egress-bandwidth").await?;
    let free = stage.pod("free").await?;
    assert_bounded("pod to pod", &slow.inside, &free.inside, v4(&free))?;
    let node: IpAddr = NODE_V4.parse()?;
    assert_bounded("pod to node", &slow.inside, &stage.node, node)?;
    assert_unbounded("what reaches the pod", &free.inside, &slow.inside, v4(&slow))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_pod_is_judged_as_others_are_and_a_bad_rate_is_refused() -> Result<()> {
    require!(root, netns, bpf, ip, tc);
    let stage = Stage::start("bw-policy", Manifest::overlapping()).await?;
    let slow = limited(&stage, "slow", "kubernetes.io/ingress-bandwidth").await?;
    let free = stage.pod("free").await?;
    let _server = kni_integration::traffic::Servers::start(&slow.inside, "slow", PORT)?;
    let ask = || kni_integration::traffic::tcp_get(&free.inside, v4(&slow), PORT, Duration::from_secs(1));
    eventually_sync(patience(), || ask().map(drop).context("not reached without a policy"))?;
    let deny = network_policy("team", "closed", "{podSelector: {}, policyTypes: [Ingress]}");
    Manifest::apply(&[Manifest::file("deny.yaml", deny)], &stage.node)?;
    eventually_sync(patience(), || {
        ensure!(ask().is_err(), "a pod with a bounded rate is reached past its policy");
        Ok(())
    })?;
    let refused = stage
        .pod_with("bad", &[("kubernetes.io/ingress-bandwidth", "fast")])
        .await;
    let text = format!("{:#}", refused.expect_err("a rate that is none was taken"));
    assert!(text.contains("ingress-bandwidth") && text.contains("fast"), "{text}");
    Ok(())
}
