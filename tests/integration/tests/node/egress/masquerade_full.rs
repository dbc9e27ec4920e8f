//! Tests masquerading while more flows ask for ports than there are: no two flows have one port, and every answer
//! reaches the pod that asked.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{Pod, long, require};

use super::world::{World, masquerading, server};

const PODS: usize = 64;
const NETWORKS: [&str; 3] = ["default", "blue", "red"];
const PORTS: std::ops::RangeInclusive<u16> = 61_000..=61_047;
const ANSWERED: Duration = Duration::from_millis(60);
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
}

/// What the server has seen of one port.
#[derive(Debug, Default)]
struct Port {
    last: String,
    /// Flows before the last one.
    former: BTreeSet<String>,
}

/// Answers datagrams with their own text. Returns the ports with what is wrong about them: a flow that comes back to a
/// port which another flow has had in the meantime.
fn serve_udp(socket: &UdpSocket, stop: &AtomicBool) -> Result<(BTreeSet<u16>, Vec<String>)> {
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
            wrong.push(format!("{} is {flow} again after {}", from.port(), port.last));
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
fn datagrams(name: &str, flow: u64, to: SocketAddr, tally: &mut Tally) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(ANSWERED))?;
    for number in 0..fastrand::u64(2..30) {
        let text = format!("{name}/{flow} {number}");
        socket.send(text.as_bytes())?;
        let mut buffer = [0; 128];
        let Ok(length) = socket.recv(&mut buffer) else {
            tally.refused += 1;
            return Ok(());
        };
        let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if answer.split(' ').next() == text.split(' ').next() {
            tally.right += 1;
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

fn run(pod: &Pod, [udp, tcp]: [SocketAddr; 2], until: Instant) -> Result<Tally> {
    pod.enter(|| {
        let mut tally = Tally::default();
        for flow in 0.. {
            if Instant::now() > until {
                break;
            }
            if fastrand::bool() {
                datagrams(&pod.name, flow, udp, &mut tally)?;
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
    let stop = AtomicBool::new(false);
    let (tallies, served) = tokio::task::block_in_place(|| {
        thread::scope(|scope| -> Result<_> {
            let datagrams = scope.spawn(|| serve_udp(&socket, &stop));
            let connections: Vec<_> = (0..SERVERS)
                .map(|_| scope.spawn(|| serve_tcp(&listener, &stop)))
                .collect();
            let until = Instant::now() + time;
            let clients: Vec<_> = pods
                .iter()
                .map(|pod| scope.spawn(move || run(pod, [udp, tcp], until)))
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
fn check(tallies: Vec<Tally>, ports: &BTreeSet<u16>, twice: &[String], drops: u64) -> Result<()> {
    let (mut right, mut refused, mut wrong) = (0, 0, Vec::new());
    for tally in tallies {
        right += tally.right;
        refused += tally.refused;
        wrong.extend(tally.wrong);
    }
    println!(
        "{right} right answers, {} wrong ones, {refused} flows refused ({drops} packets), {} ports, {} of them of two flows at a time",
        wrong.len(),
        ports.len(),
        twice.len()
    );
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
    ensure!(right > 1000, "only {right} answers");
    Ok(())
}
