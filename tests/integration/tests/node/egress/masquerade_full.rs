//! Tests masquerading while more flows ask for ports than there are: no two flows have one port, and every answer
//! reaches the pod that asked.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{Pod, long, patience, require};

use super::world::{World, masquerading, server};

const PODS: usize = 64;
const NETWORKS: [&str; 3] = ["default", "blue", "red"];
const PORTS: std::ops::RangeInclusive<u16> = 61_000..=61_047;
/// How long a flow waits for an answer, which it does not get if it has no port.
const ANSWERED: Duration = Duration::from_millis(60);
/// A flow that sends nothing for so long may lose its port, and get it again after another one: the timeout is a
/// second.
const UNUSED: Duration = Duration::from_millis(800);
/// As many right answers there must be.
const RIGHT: u64 = 1000;
/// Threads that answer connections.
const SERVERS: usize = 16;

/// What a pod has experienced.
#[derive(Debug, Default)]
struct Tally {
    /// Answers with the pod's own text.
    right: u64,
    /// Flows that got no port.
    refused: u64,
    /// Answers with another text.
    wrong: Vec<String>,
    /// Flows that did not send for so long that another one may have had their port: their client had no CPU.
    paused: BTreeSet<String>,
}

/// What the server has seen of one port.
#[derive(Debug, Default)]
struct Port {
    last: String,
    /// Flows before the last one.
    former: BTreeSet<String>,
}

/// A port of a flow that another flow has had in between.
#[derive(Debug)]
#[expect(dead_code, reason = "shown in errors")]
struct Twice {
    port: u16,
    flow: String,
    between: String,
}

/// Answers datagrams with their own text. Returns the ports with what is wrong about them: a flow that comes back to a
/// port which another flow has had in the meantime.
fn serve_udp(socket: &UdpSocket, stop: &AtomicBool) -> Result<(BTreeSet<u16>, Vec<Twice>)> {
    socket.set_read_timeout(Some(ANSWERED))?;
    let (mut ports, mut wrong) = (BTreeMap::<u16, Port>::new(), Vec::new());
    let mut buffer = [0; 128];
    while !stop.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        socket.send_to(&buffer[..length], from)?;
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let flow = text.split(' ').next().unwrap_or_default().to_owned();
        let port = ports.entry(from.port()).or_default();
        if port.last == flow {
            continue;
        }
        if port.former.contains(&flow) {
            wrong.push(Twice {
                port: from.port(),
                flow: flow.clone(),
                between: port.last.clone(),
            });
        }
        let before = std::mem::replace(&mut port.last, flow);
        port.former.insert(before);
    }
    Ok((ports.into_keys().collect(), wrong))
}

/// Answers connections with their own text, until `stop`; the client closes first.
fn serve_tcp(listener: &TcpListener, stop: &AtomicBool) {
    for stream in listener.incoming() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut stream) = stream else { continue };
        let mut serve = || -> std::io::Result<()> {
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            let mut buffer = [0; 128];
            let length = stream.read(&mut buffer)?;
            stream.write_all(&buffer[..length])?;
            stream.read(&mut buffer).map(drop)
        };
        // A client that was refused, or that has disconnected.
        drop(serve());
    }
}

/// One flow of datagrams.
fn datagrams(name: &str, flow: u64, to: SocketAddr, tally: &mut Tally, all_right: &AtomicU64) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(ANSWERED))?;
    let mut sent = Instant::now();
    for number in 0..fastrand::u64(2..30) {
        let text = format!("{name}/{flow} {number}");
        socket.send(text.as_bytes())?;
        if sent.elapsed() > UNUSED {
            tally.paused.insert(format!("{name}/{flow}"));
        }
        sent = Instant::now();
        let mut buffer = [0; 128];
        let Ok(length) = socket.recv(&mut buffer) else {
            tally.refused += 1;
            return Ok(());
        };
        let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if answer.split(' ').next() == text.split(' ').next() {
            tally.right += 1;
            all_right.fetch_add(1, Ordering::Relaxed);
        } else {
            tally.wrong.push(format!("{text} over UDP: {answer}"));
        }
        thread::sleep(Duration::from_millis(fastrand::u64(..20)));
    }
    Ok(())
}

/// One connection.
fn connection(name: &str, flow: u64, to: SocketAddr, tally: &mut Tally) {
    let text = format!("{name}/{flow}");
    let mut answer = vec![0; text.len()];
    let mut once = || -> std::io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&to, ANSWERED)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(text.as_bytes())?;
        stream.read_exact(&mut answer)
    };
    match once() {
        Err(_) => tally.refused += 1,
        Ok(()) if answer == text.as_bytes() => tally.right += 1,
        Ok(()) => tally
            .wrong
            .push(format!("{text} over TCP: {}", String::from_utf8_lossy(&answer))),
    }
}

/// Asks until `until`, and longer while all pods together have too few right answers.
fn run(pod: &Pod, [udp, tcp]: [SocketAddr; 2], until: Instant, right: &AtomicU64) -> Result<Tally> {
    let latest = until + patience();
    pod.enter(|| {
        let mut tally = Tally::default();
        for flow in 0.. {
            let now = Instant::now();
            if now > until && (right.load(Ordering::Relaxed) > RIGHT || now > latest) {
                break;
            }
            if fastrand::bool() {
                datagrams(&pod.name, flow, udp, &mut tally, right)?;
            } else {
                connection(&pod.name, flow, tcp, &mut tally);
            }
        }
        Ok(tally)
    })?
}

#[tokio::test(flavor = "multi_thread")]
async fn more_flows_than_ports_keep_apart() -> Result<()> {
    require!(root, netns, bpf, ip);
    let time = Duration::from_secs(if long() { 60 } else { 10 });
    let range = format!("{}-{}", PORTS.start(), PORTS.end());
    let args = [
        "--masquerade-ports",
        &range,
        "--udp-timeout",
        "1",
        "--flow-events-per-second",
        "0",
    ];
    let world = World::start("full", masquerading(), &args).await?;
    let watch = world.watch()?;
    let mut pods = Vec::new();
    for number in 0..PODS {
        let network = NETWORKS[number % NETWORKS.len()];
        let name = format!("{network}-{number}");
        pods.push(world.stage.pod_with(&name, &[("kni.dev/network", network)]).await?);
    }
    let [udp, tcp] = [9000, 9001].map(|port| SocketAddr::new(server(true).ip(), port));
    let socket = world.outside.server.enter(|| UdpSocket::bind(udp))??;
    let listener = world.outside.server.enter(|| TcpListener::bind(tcp))??;
    let (stop, right) = (AtomicBool::new(false), &AtomicU64::new(0));
    let (tallies, served) = tokio::task::block_in_place(|| {
        thread::scope(|scope| -> Result<_> {
            let datagrams = scope.spawn(|| serve_udp(&socket, &stop));
            let connections: Vec<_> = (0..SERVERS)
                .map(|_| scope.spawn(|| serve_tcp(&listener, &stop)))
                .collect();
            let until = Instant::now() + time;
            let clients: Vec<_> = pods
                .iter()
                .map(|pod| scope.spawn(move || run(pod, [udp, tcp], until, right)))
                .collect();
            let tallies: Result<Vec<Tally>> = clients
                .into_iter()
                .map(|client| client.join().expect("a client does not panic"))
                .collect();
            stop.store(true, Ordering::Relaxed);
            for _ in &connections {
                // Wakes a server up; the result does not matter.
                drop(world.outside.server.enter(|| TcpStream::connect(tcp)));
            }
            Ok((tallies?, datagrams.join().expect("a server does not panic")?))
        })
    })?;
    let mut drops = 0;
    for pod in &pods {
        drops += world.stage.drops(pod, "from_pod", "masquerade_ports").await?;
    }
    check(tallies, &served.0, &served.1, drops)?;
    watch.assert_clean();
    Ok(())
}

/// Checks what the clients counted, the ports that the server saw, and those that it saw from two flows at a time.
fn check(tallies: Vec<Tally>, ports: &BTreeSet<u16>, twice: &[Twice], drops: u64) -> Result<()> {
    let (mut right, mut refused, mut wrong, mut paused) = (0, 0, Vec::new(), BTreeSet::new());
    for tally in tallies {
        paused.extend(tally.paused);
        right += tally.right;
        refused += tally.refused;
        wrong.extend(tally.wrong);
    }
    println!(
        "{right} right answers, {} wrong ones, {refused} flows refused ({drops} packets), {} ports, {} of them of two flows at a time, {} flows paused",
        wrong.len(),
        ports.len(),
        twice.len(),
        paused.len()
    );
    let twice: Vec<&Twice> = twice.iter().filter(|twice| !paused.contains(&twice.flow)).collect();
    ensure!(
        wrong.is_empty(),
        "answers of other flows: {:#?}",
        &wrong[..wrong.len().min(10)]
    );
    ensure!(
        twice.is_empty(),
        "ports of two flows: {:#?}",
        &twice[..twice.len().min(10)]
    );
    ensure!(ports.iter().copied().eq(PORTS), "not all ports are used: {ports:?}");
    ensure!(drops > 0, "there were enough ports");
    ensure!(right > RIGHT, "only {right} answers");
    Ok(())
}
