//! Runs the traffic of all classes, and the packets of the denied pairs, while an operation takes place.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster, Pod,
    cluster::patience,
    eventually, eventually_sync,
    traffic::{Stream, StreamReport},
};
use kni_proto::runtime::ListDropsRequest;

use super::{
    super::scene::{PORT, address, identity},
    bed::Bed,
    measured::{Class, Refused},
};

/// Answers of each stream before and after an operation.
const ANSWERS: u64 = 150;
/// Connections that are opened before and after it.
const OPENED: u64 = 20;
/// Packets of each denied pair before and after it.
const PACKETS: u64 = 50;
/// The time between two of them.
const INTERVAL: Duration = Duration::from_millis(5);
/// The time between two connections.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(20);

/// All streams, with the server that each asks.
pub(super) struct Load {
    streams: Vec<(Class, String, Stream)>,
    openers: Vec<(String, Opener)>,
}

impl Load {
    /// Starts all, and waits until they are answered.
    pub(super) fn start(bed: &Bed) -> Result<Self> {
        let client = bed.pod("client");
        let mut load = Self {
            streams: Vec::new(),
            openers: Vec::new(),
        };
        for v4 in [true, false] {
            let direct = |name: &str| {
                (
                    SocketAddr::new(address(bed.pod(name), v4), PORT),
                    identity(bed.pod(name)),
                )
            };
            let service = (bed.front(v4), identity(bed.pod("remote")));
            for (class, (to, server)) in [
                (Class::Beside, direct("beside")),
                (Class::Across, direct("remote")),
                (Class::Service, service.clone()),
                (Class::Third, direct("third")),
            ] {
                let what = || format!("{class:?} to {to}");
                let udp = Stream::udp(&client.inside, to).with_context(what)?;
                let tcp = Stream::tcp(&client.inside, to).with_context(what)?;
                load.streams.push((class, server.clone(), udp));
                load.streams.push((class, server, tcp));
            }
            load.openers
                .push((service.1, Opener::start(bed.pod("dialer"), service.0)));
        }
        load.continues()?;
        Ok(load)
    }

    /// Waits for more answers of each stream that is not broken.
    pub(super) fn continues(&self) -> Result<()> {
        thread::scope(|scope| {
            let wait = |(class, server, stream): &(Class, String, Stream)| {
                let answered = stream.wait_for_answers(ANSWERS);
                answered.with_context(|| format!("{class:?} to {server}"))
            };
            let streams = self.streams.iter().map(|stream| scope.spawn(move || wait(stream)));
            let waits: Vec<_> = streams.collect();
            self.openers.iter().try_for_each(|(_, opener)| opener.continues())?;
            let mut waits = waits.into_iter();
            waits.try_for_each(|wait| wait.join().expect("a wait does not panic"))
        })
    }

    pub(super) fn stop(self) -> Vec<(Class, String, StreamReport)> {
        let opened = self.openers.into_iter();
        let opened = opened.map(|(server, opener)| (Class::Opened, server, opener.stop()));
        let streams = self.streams.into_iter();
        let streams = streams.map(|(class, server, stream)| (class, server, stream.stop()));
        streams.chain(opened.collect::<Vec<_>>()).collect()
    }
}

/// A thread that works until it is stopped, and the count of its results.
struct Worker<T> {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    fn start(work: impl FnOnce(&AtomicBool, &AtomicU64) -> T + Send + 'static) -> Self {
        let (stop, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let of_thread = (Arc::clone(&stop), Arc::clone(&count));
        Self {
            stop,
            count,
            thread: Some(thread::spawn(move || work(&of_thread.0, &of_thread.1))),
        }
    }

    fn wait_for_more(&self, more: u64) -> Result<()> {
        let enough = self.count.load(Ordering::Relaxed) + more;
        eventually_sync(patience(), || {
            let count = self.count.load(Ordering::Relaxed);
            ensure!(count >= enough, "{count} of {enough}");
            Ok(())
        })
    }

    fn stop(mut self) -> T {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("taken here only");
        thread.join().expect("a worker does not panic")
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Opens connections one after the other, with a request on each.
pub(super) struct Opener {
    worker: Worker<StreamReport>,
    /// Who has answered since [`Self::clear`].
    seen: Arc<Mutex<BTreeSet<String>>>,
}

impl Opener {
    pub(super) fn start(from: &Pod, to: SocketAddr) -> Self {
        let (inside, seen) = (from.inside.clone(), Arc::<Mutex<BTreeSet<String>>>::default());
        let of_thread = Arc::clone(&seen);
        let worker = Worker::start(move |stop, count| {
            let mut report = StreamReport::default();
            let mut last = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                report.sent += 1;
                match inside.enter(|| ask_once(to)).and_then(|asked| asked) {
                    Ok(server) => {
                        report.answered += 1;
                        of_thread.lock().expect("no holder panics").insert(server.clone());
                        report.identities.insert(server);
                        report.longest_silence = report.longest_silence.max(last.elapsed());
                        last = Instant::now();
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(e) => report.broken = Some(format!("connection {}: {e:#}", report.sent)),
                }
                thread::sleep(BETWEEN_CONNECTIONS);
            }
            report.longest_silence = report.longest_silence.max(last.elapsed());
            report
        });
        Self { worker, seen }
    }

    pub(super) fn continues(&self) -> Result<()> {
        self.worker.wait_for_more(OPENED).context("new connections")
    }

    /// Removes those who have answered.
    pub(super) fn clear(&self) {
        self.seen.lock().expect("no holder panics").clear();
    }

    /// Waits until this server answers none of many connections.
    pub(super) fn avoids(&self, server: &str) -> Result<()> {
        eventually_sync(patience(), || {
            self.clear();
            self.continues()?;
            let seen = self.seen.lock().expect("no holder panics").clone();
            ensure!(!seen.contains(server), "answered by {seen:?}");
            Ok(())
        })
    }

    /// Waits until this server answers.
    pub(super) fn answered_by(&self, server: &str) -> Result<()> {
        eventually_sync(patience(), || {
            let seen = self.seen.lock().expect("no holder panics").clone();
            ensure!(seen.contains(server), "answered by {seen:?}, not {server}");
            Ok(())
        })
    }

    pub(super) fn stop(self) -> StreamReport {
        self.worker.stop()
    }
}

/// Opens a connection and asks who answers there: for as long as TCP repeats what was lost; the gap shows it.
fn ask_once(to: SocketAddr) -> Result<String> {
    let limit = patience() / 6;
    let mut stream = TcpStream::connect_timeout(&to, limit).with_context(|| format!("connect to {to}"))?;
    let from = stream.local_addr()?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"who\n")?;
    let mut line = String::new();
    let read = BufReader::new(stream).read_line(&mut line);
    read.with_context(|| format!("no answer from {to} to {from}"))?;
    let server = line.split(' ').next().filter(|server| !server.is_empty());
    Ok(server
        .with_context(|| format!("{line:?} from {to} to {from}"))?
        .to_owned())
}

/// Packets of a stranger to pods that a policy guards, on its own node and on another one.
pub(super) struct Denied {
    senders: Vec<Worker<u64>>,
    before: BTreeMap<String, u64>,
    received: u64,
}

impl Denied {
    pub(super) async fn start(bed: &Bed) -> Result<Self> {
        let (before, received) = (dropped(&bed.cluster).await?, bed.received_by_guarded());
        let mut senders = Vec::new();
        for (name, v4) in [("guarded1", true), ("guarded2", false)] {
            let to = SocketAddr::new(address(bed.pod(name), v4), PORT);
            let any = SocketAddr::new(if v4 { [0; 4].into() } else { [0; 16].into() }, 0);
            let socket = bed.pod("stranger").enter(|| {
                let socket = UdpSocket::bind(any)?;
                socket.connect(to).map(|()| socket)
            })??;
            senders.push(Worker::start(move |stop, count| send(&socket, stop, count)));
        }
        let denied = Self {
            senders,
            before,
            received,
        };
        denied.continues()?;
        Ok(denied)
    }

    /// Waits for more packets of each sender.
    pub(super) fn continues(&self) -> Result<()> {
        let mut senders = self.senders.iter();
        senders.try_for_each(|sender| sender.wait_for_more(PACKETS))
    }

    /// Stops the senders, and waits until each packet is counted. Where one is not, the result shows it.
    pub(super) async fn stop(self, bed: &Bed, reasons: &[&str]) -> Result<Refused> {
        let sent = self.senders.into_iter().map(Worker::stop).sum();
        let look = async || {
            let mut dropped = dropped(&bed.cluster).await?;
            for (reason, count) in &mut dropped {
                *count = count.saturating_sub(*self.before.get(reason).unwrap_or(&0));
            }
            dropped.retain(|_, count| *count > 0);
            let received = bed.received_by_guarded() - self.received;
            anyhow::Ok(Refused {
                sent,
                dropped,
                received,
            })
        };
        let complete = eventually(patience(), async || {
            let refused = look().await?;
            ensure!(refused.is_complete(reasons), "{refused:?}");
            Ok(refused)
        });
        match complete.await {
            Ok(refused) => Ok(refused),
            Err(_in_vain) => look().await,
        }
    }
}

/// Sends until stopped; returns how many packets the kernel has sent towards the pod's interface.
fn send(socket: &UdpSocket, stop: &AtomicBool, count: &AtomicU64) -> u64 {
    while !stop.load(Ordering::Relaxed) {
        let number = count.load(Ordering::Relaxed);
        // A program of the interface may refuse it, and has counted it then.
        drop(socket.send(format!("denied-{number}").as_bytes()));
        count.store(number + 1, Ordering::Relaxed);
        thread::sleep(INTERVAL);
    }
    count.load(Ordering::Relaxed)
}

/// Packets of the denied pairs that any node has dropped, by reason.
async fn dropped(cluster: &Cluster) -> Result<BTreeMap<String, u64>> {
    let mut sums = BTreeMap::new();
    for member in &cluster.nodes {
        let request = ListDropsRequest::default();
        let listed = member.kubelet.kni().runtime().list_drops(request).await?;
        let drops = listed.into_inner().drops.into_iter();
        let ends = ["stranger", "guarded1", "guarded2"];
        for drop in drops.filter(|drop| ends.contains(&&*drop.pod_name)) {
            let packets = drop.count.map_or(0, |count| count.packets);
            *sums.entry(drop.reason).or_default() += packets;
        }
    }
    Ok(sums)
}
