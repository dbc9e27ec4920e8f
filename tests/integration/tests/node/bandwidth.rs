//! Tests that the rates of pods are enforced in both directions and for every peer, and limit no other pod.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage, bind::when_free, eventually_sync, manifest::network_policy, node::NODE_V4,
    require,
};

const PORT: u16 = 9000;
/// The rate of the limited pods.
const RATE: &str = "16M";
const BYTES_PER_SECOND: f64 = 2e6;
/// The duration without the first part, which uses up the burst.
const WARM_UP: Duration = Duration::from_millis(500);
const MEASURE: Duration = Duration::from_millis(1500);

/// Received bytes per second of one TCP stream at `to`.
fn throughput(from: &Namespaces, to: &Namespaces, address: IpAddr) -> Result<f64> {
    let listener = to.enter(|| when_free(|| TcpListener::bind((address, PORT))))??;
    thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<()> {
            let mut stream = from.enter(|| TcpStream::connect(SocketAddr::new(address, PORT)))??;
            let chunk = vec![7; 64 * 1024];
            // Ends when the receiver closes the connection.
            while stream.write_all(&chunk).is_ok() {}
            Ok(())
        });
        let (mut stream, _) = listener.accept()?;
        let mut buffer = vec![0; 256 * 1024];
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            ensure!(stream.read(&mut buffer)? > 0, "the sender is gone");
        }
        let (begun, mut bytes) = (Instant::now(), 0.0);
        while begun.elapsed() < MEASURE {
            bytes += f64::from(u32::try_from(stream.read(&mut buffer)?)?);
        }
        let rate = bytes / begun.elapsed().as_secs_f64();
        drop(stream);
        sender.join().map_err(|_panic| anyhow!("the sender panicked"))??;
        Ok(rate)
    })
}

fn assert_bounded(what: &str, rate: f64) {
    // Payload only: headers take 3 %. A stream that meets a full bucket backs off, and a busy machine is slow.
    let share = rate / BYTES_PER_SECOND;
    assert!((0.2..1.1).contains(&share), "{what}: {share:.2} of the rate");
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
    assert_bounded("pod to pod", throughput(&free.inside, &slow.inside, v4(&slow))?);
    assert_bounded("node to pod", throughput(&stage.node, &slow.inside, v4(&slow))?);
    for (what, rate) in [
        ("what the pod sends", throughput(&slow.inside, &free.inside, v4(&free))?),
        ("other pods", throughput(&free.inside, &other.inside, v4(&other))?),
    ] {
        assert!(
            rate > 2.0 * BYTES_PER_SECOND,
            "{what}: bounded to {rate:.0} bytes per second"
        );
    }
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
    assert_bounded("pod to pod", throughput(&slow.inside, &free.inside, v4(&free))?);
    let node: IpAddr = NODE_V4.parse()?;
    assert_bounded("pod to node", throughput(&slow.inside, &stage.node, node)?);
    let rate = throughput(&free.inside, &slow.inside, v4(&slow))?;
    assert!(
        rate > 2.0 * BYTES_PER_SECOND,
        "what reaches the pod: bounded to {rate:.0} bytes per second"
    );
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
    ensure!(ask().is_ok(), "not reached without a policy");
    let deny = network_policy("team", "closed", "{podSelector: {}, policyTypes: [Ingress]}");
    Manifest::apply(&[Manifest::file("deny.yaml", deny)], &stage.node)?;
    eventually_sync(Duration::from_secs(30), || {
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
