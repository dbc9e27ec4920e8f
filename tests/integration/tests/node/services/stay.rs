//! 1: Tests that a connection keeps its backend while the backend serves, regardless of changes of the endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, Pod, long, require, traffic::Stream};
use kni_proto::runtime::ListDropsRequest;
use serde_json::Value;

use super::{
    objects::{State, served, service},
    scene::{Backend, FAMILIES, Scene, Transport, front},
};

const WEB: u8 = 10;
/// Streams of each transport and family of one client.
const STREAMS: usize = 2;
/// Pause between two new connections of one client, so that it does not run out of ports.
const PAUSE: Duration = Duration::from_millis(2);

/// Number of changes of the EndpointSlices.
fn changes() -> usize {
    if long() { 200 } else { 60 }
}

/// The results of one client's new connections.
#[derive(Debug, Default)]
struct Opened {
    by: BTreeMap<String, u64>,
    failed: Vec<String>,
    longest: Duration,
}

fn keep_opening(from: &Namespaces, stop: &AtomicBool) -> Opened {
    let mut opened = Opened::default();
    for v4 in FAMILIES.into_iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let asked = Instant::now();
        match Transport::Tcp.ask(from, front(v4, WEB)) {
            Ok(answer) => *opened.by.entry(answer.identity).or_default() += 1,
            Err(why) => opened.failed.push(format!("IPv4 {v4}: {why}")),
        }
        opened.longest = opened.longest.max(asked.elapsed());
        thread::sleep(PAUSE);
    }
    opened
}

/// The endpoints of a change: `serving` become terminating and ready again, `passing` are added and removed. At least
/// one is always ready.
fn endpoints(change: usize, serving: &[Backend], passing: &[Backend]) -> Vec<Value> {
    let mut pods: Vec<(&Pod, State)> = Vec::new();
    let always = fastrand::usize(..serving.len());
    for (index, backend) in serving.iter().enumerate() {
        let state = if index == always || fastrand::bool() {
            State::Ready
        } else {
            State::Draining
        };
        pods.push((&backend.pod, state));
    }
    // Every change differs from the previous one: a passing endpoint exists in every second one.
    let (even, odd) = (change.is_multiple_of(2), fastrand::bool());
    for (backend, there) in passing.iter().zip([even, odd]) {
        if there {
            pods.push((&backend.pod, State::Ready));
        }
    }
    fastrand::shuffle(&mut pods);
    served(service("web", WEB), &pods)
}

/// Datagrams that UDP sockets of a namespace dropped because of full buffers.
fn full_buffers(ns: &Namespaces) -> Result<u64> {
    let read = |file: &str| {
        ns.enter(|| std::fs::read_to_string(file))?
            .with_context(|| file.to_owned())
    };
    let v6 = read("/proc/thread-self/net/snmp6")?;
    let v6 = v6.lines().find_map(|line| line.strip_prefix("Udp6RcvbufErrors"));
    let v4 = read("/proc/thread-self/net/snmp")?;
    let mut udp = v4.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (udp.next().context("no UDP")?, udp.next().context("no UDP")?);
    let mut both = names.split(' ').zip(values.split(' '));
    let v4 = both.find_map(|(name, value)| (name == "RcvbufErrors").then_some(value));
    let number = |text: Option<&str>| anyhow::Ok(text.context("not counted")?.trim().parse::<u64>()?);
    Ok(number(v4)? + number(v6)?)
}

/// Connections that exist from the start, and exchange a request and an answer each millisecond.
struct Held(Vec<(&'static str, bool, Stream)>);

impl Held {
    fn open(clients: &[Pod]) -> Result<Self> {
        let mut streams = Vec::new();
        for client in clients {
            for v4 in FAMILIES {
                for _ in 0..STREAMS {
                    streams.push(("TCP", v4, Stream::tcp(&client.inside, front(v4, WEB))?));
                    streams.push(("UDP", v4, Stream::udp(&client.inside, front(v4, WEB))?));
                }
            }
        }
        Ok(Self(streams))
    }

    /// Checks that every connection is intact and was answered by one backend only. Returns the number per backend, and
    /// of datagrams without an answer: sockets of a busy machine may drop some.
    fn end(self) -> Result<(BTreeMap<String, usize>, u64)> {
        let (mut by, mut lost) = (BTreeMap::<String, usize>::new(), 0);
        for (what, v4, stream) in self.0 {
            let enough = 5 * u64::try_from(changes())? + 1;
            stream.wait_for_answers(enough.saturating_sub(stream.answered()))?;
            let mut report = stream.stop();
            ensure!(
                report.sent >= enough,
                "{what} IPv4 {v4}: {} questions only",
                report.sent
            );
            let backend = report.identities.first().context("nobody answered")?.clone();
            if what == "UDP" {
                lost += report.lost();
                report.answered = report.sent;
            }
            report.assert_whole(&backend);
            *by.entry(backend).or_default() += 1;
        }
        Ok((by, lost))
    }
}

/// Changes the endpoints repeatedly while every client opens new connections.
fn change_under_load(
    scene: &mut Scene,
    serving: &[Backend],
    passing: &[Backend],
    clients: &[Pod],
) -> Result<Vec<Opened>> {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let opening = |client| scope.spawn(move || keep_opening(client, stop));
        let threads: Vec<_> = clients.iter().map(|client| opening(&client.inside)).collect();
        let changed = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                for change in 0..changes() {
                    scene.apply(&endpoints(change, serving, passing)).await?;
                }
                anyhow::Ok(())
            })
        });
        stop.store(true, Ordering::Relaxed);
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().expect("a client does not panic"));
        let opened = ended.collect();
        changed.map(|()| opened)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_stay_while_endpoints_change_under_load() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("stay").await?;
    let (mut serving, mut passing, mut clients) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..3 {
        serving.push(scene.backend(&format!("serving-{number}")).await?);
        clients.push(scene.stage.pod(&format!("client-{number}")).await?);
    }
    for number in 0..2 {
        passing.push(scene.backend(&format!("passing-{number}")).await?);
    }
    let first: Vec<_> = serving.iter().map(|backend| (&backend.pod, State::Ready)).collect();
    scene.apply(&served(service("web", WEB), &first)).await?;
    let held = Held::open(&clients)?;
    let opened = change_under_load(&mut scene, &serving, &passing, &clients)?;
    let (held, lost) = held.end()?;
    println!(
        "{} changes; connections held by {held:?}; new ones: {opened:?}",
        changes()
    );
    ensure!(held.len() > 1, "one backend had all connections: {held:?}");
    let pods = serving.iter().map(|backend| &backend.pod).chain(&clients);
    let missed = pods.map(|pod| full_buffers(&pod.inside)).sum::<Result<u64>>()?;
    ensure!(
        lost <= missed,
        "{lost} datagrams are lost, but sockets missed only {missed}"
    );
    let listed = scene.stage.kubelet.runtime().list_drops(ListDropsRequest {}).await?;
    let dropped = listed.into_inner().drops.into_iter();
    let dropped: Vec<_> = dropped.filter(|drop| !drop.pod_name.is_empty()).collect();
    ensure!(dropped.is_empty(), "packets of pods were dropped: {dropped:?}");
    let mut by = BTreeSet::new();
    for opened in opened {
        ensure!(opened.failed.is_empty(), "new connections failed: {:?}", opened.failed);
        by.extend(opened.by.into_keys());
    }
    ensure!(by.len() == 5, "new connections found only {by:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_outlives_the_service_and_its_backends_place_in_it() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("outlive").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    scene
        .apply(&served(service("web", WEB), &[(&old.pod, State::Ready)]))
        .await?;
    let mut streams = Vec::new();
    for v4 in FAMILIES {
        streams.push(Stream::tcp(&client.inside, front(v4, WEB))?);
    }
    // Another endpoint instead, then none, then no Service: TCP connections continue until they are closed.
    scene
        .apply(&served(service("web", WEB), &[(&new.pod, State::Ready)]))
        .await?;
    for v4 in FAMILIES {
        let answer = Transport::Tcp.ask(&client.inside, front(v4, WEB))?;
        ensure!(answer.identity == "new", "{} answers a new connection", answer.identity);
    }
    scene.apply(&served(service("web", WEB), &[])).await?;
    scene.apply(&[]).await?;
    thread::sleep(Duration::from_millis(200));
    for stream in streams {
        stream.stop().assert_whole("old");
    }
    Ok(())
}
