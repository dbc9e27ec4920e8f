//! Compares explanations of packets to and from other nodes with what the programs then do with the very packet.
//!
//! `KNI_CASES` sets the number of packets (default 1200), `KNI_SEED` repeats a run.

use std::{
    collections::BTreeMap,
    env,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_common::{Direction, Verdict, event::FlowEvent};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    programs::hex,
    require,
    wait::patience,
};
use nix::time::{ClockId, clock_gettime};

use super::scene::{
    A, BLUE, FRIEND, LOCAL, MTU, NODE, NOTHING, ONLY_FRIENDS, OTHER, OWN, RED, REMOTE, SECOND, STRANGER, Scene, THEIRS,
    UNUSED, VXLAN_PORT, inside, underlay,
};

/// Packets between two changes of the node.
const BATCH: u64 = 20;
/// The reader of events looks every 50 ms.
const EVENTS: Duration = Duration::from_millis(150);

/// A packet, and where it comes from: a node and a network, or [`A`].
struct Shot {
    from: Option<(IpAddr, u32)>,
    packet: Vec<u8>,
}

/// A packet with its explanation, and the times between which it was processed.
struct Case {
    shot: Shot,
    explained: FlowEvent,
    times: [u64; 2],
}

fn number(name: &str) -> Result<Option<u64>> {
    Ok(env::var(name).ok().map(|text| text.parse::<u64>()).transpose()?)
}

#[test]
fn an_explanation_of_packets_between_nodes_is_what_the_programs_do() -> Result<()> {
    require!(root, netns, bpf, ip);
    let cases = number("KNI_CASES")?.unwrap_or(1200);
    let seed = number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(5));
    println!("{cases} packets, KNI_SEED={seed}");
    let mut kinds = BTreeMap::new();
    let mut compared = 0;
    inside("explained-remote", |scene| {
        let mut rng = Rng::with_seed(seed);
        scene.route_node()?;
        for _ in 0..cases.div_ceil(BATCH) {
            change(&mut rng, scene)?;
            let all: Vec<Case> = (0..BATCH)
                .map(|_| case(&mut rng, scene, &mut kinds))
                .collect::<Result<_>>()?;
            compared += compare(scene, &all)?;
        }
        Ok(())
    })
    .with_context(|| format!("repeat with KNI_SEED={seed} KNI_CASES={cases}"))?;
    println!("{compared} events were compared");
    for (kind, count) in &kinds {
        println!("{kind:<40} {count:>7}");
    }
    ensure!(cases < 1200 || covers(&kinds), "too few kinds of packets");
    ensure!(compared * 20 > cases, "only {compared} events");
    Ok(())
}

/// Changes what the node knows of others, and the policies of [`A`].
fn change(rng: &mut Rng, scene: &mut Scene<'_>) -> Result<()> {
    if rng.u32(..3) == 0 {
        scene.flush()?;
    }
    let v4 = rng.bool();
    match rng.u32(..8) {
        0 => scene.renew(NODE)?,
        1 => scene.remove_node(NODE)?,
        2 => scene.lead(OTHER, underlay(OTHER, v4), true)?,
        3 => scene.lead(NODE, underlay(NODE, v4), false)?,
        _ => scene.lead(NODE, underlay(NODE, v4), true)?,
    }
    scene.identify(*rng.choice([&FRIEND, &STRANGER]).context("one of two")?)?;
    scene.enforce(
        A,
        *rng.choice([&0, &0, &ONLY_FRIENDS, &NOTHING]).context("one of four")?,
    )
}

fn payload(rng: &mut Rng, v4: bool, (from, to): (u16, u16)) -> Result<Payload> {
    let headers = if v4 { 28 } else { 48 };
    let fits = usize::try_from(MTU)? - headers;
    let flags = [TcpFlags::SYN, TcpFlags::SYN_ACK, TcpFlags::ACK];
    let lengths = [8, fits, fits + 1];
    let length = *rng.choice(&lengths).context("a length")?;
    Ok(match rng.u32(..8) {
        0 | 1 => Payload::udp(from, VXLAN_PORT, &[7; 8]),
        2 => Payload::udp(from, to, &vec![b'x'; length]),
        3 => Payload::echo_request(v4, from, 1, b"echo"),
        _ => Payload::tcp(from, to, *rng.choice(&flags).context("flags")?),
    })
}

fn shot(rng: &mut Rng) -> Result<Shot> {
    let family = rng.usize(..2);
    let v4 = family == 0;
    let seldom = |rng: &mut Rng, usual: IpAddr, others: &[IpAddr]| match rng.u32(..6) {
        0 => rng.choice(others).copied().unwrap_or(usual),
        _ => usual,
    };
    if rng.bool() {
        let to = seldom(
            rng,
            REMOTE[family],
            &[SECOND[family], UNUSED[family], underlay(NODE, v4), underlay(NODE, v4)],
        );
        let packet = Ip::new(LOCAL[family], to).packet(&payload(rng, v4, (OWN, THEIRS))?);
        return Ok(Shot { from: None, packet });
    }
    let source = seldom(rng, REMOTE[family], &[SECOND[family], UNUSED[family], LOCAL[family]]);
    let to = seldom(rng, LOCAL[family], &[SECOND[family], UNUSED[family], REMOTE[family]]);
    let packet = Ip::new(source, to).packet(&payload(rng, v4, (THEIRS, OWN))?);
    let node = if rng.u32(..5) == 0 { OTHER } else { NODE };
    let network = match rng.u32(..12) {
        0 => RED,
        1 => 99,
        _ => BLUE,
    };
    let from = Some((underlay(node, rng.bool()), network));
    Ok(Shot { from, packet })
}

fn now() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(u64::try_from(Duration::from(time).as_nanos())?)
}

fn case(rng: &mut Rng, scene: &Scene<'_>, kinds: &mut BTreeMap<String, u64>) -> Result<Case> {
    let shot = shot(rng)?;
    let told = || format!("from {:?}: {}", shot.from, hex(&shot.packet));
    let before = scene.verdicts()?;
    let rows = scene.flows();
    let explained = scene.explain(shot.from, &shot.packet).with_context(told)?;
    let after = (scene.verdicts()?, scene.flows());
    ensure!(
        after == (before.clone(), rows),
        "the explanation has left traces: {}\n{before:?} {rows:?} before\n{after:?}",
        told()
    );
    let begun = now()?;
    match shot.from {
        Some((node, network)) => scene.tunnel(node, network, &shot.packet)?,
        None => scene.send(A, &shot.packet)?,
    }
    let (direction, verdict) = outcome(scene, &before).with_context(told)?;
    let times = [begun, now()?];
    let expected = Verdict::from_code(explained.verdict).context("a verdict")?;
    // What is delivered through the tunnel is counted at the pod.
    let by = match direction {
        Direction::ToPod => Direction::FromOverlay,
        other => other,
    };
    ensure!(
        expected == verdict && Direction::from_code(explained.direction) == Some(by),
        "explained as {} {expected:?}, but it was {} {verdict:?}: {}",
        explained.direction,
        by.as_str(),
        told()
    );
    *kinds
        .entry(format!("{} {}", by.as_str(), verdict.as_str()))
        .or_insert(0) += 1;
    Ok(Case { shot, explained, times })
}

/// The verdict that was counted since then.
fn outcome(scene: &Scene<'_>, before: &BTreeMap<(Direction, Verdict), u64>) -> Result<(Direction, Verdict)> {
    let begun = Instant::now();
    loop {
        let mut more: Vec<(Direction, Verdict)> = Vec::new();
        for (key, count) in scene.verdicts()? {
            if count > before.get(&key).copied().unwrap_or(0) {
                more.push(key);
            }
        }
        // A packet between pods of the node is counted for both of them.
        if more.iter().any(|(direction, _)| *direction == Direction::FromPod) {
            more.retain(|(direction, _)| *direction == Direction::FromPod);
        }
        match more.as_slice() {
            [] => ensure!(begun.elapsed() < patience(), "nothing was counted"),
            [one] => return Ok(*one),
            several => anyhow::bail!("one packet was counted as {several:?}"),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Compares the events with the explanations of their packets. The programs suppress some events of a busy endpoint.
fn compare(scene: &mut Scene<'_>, cases: &[Case]) -> Result<u64> {
    let events = scene.events(EVENTS)?;
    let mut compared = 0;
    for case in cases {
        let [begun, ended] = case.times;
        for event in events.iter().map(|record| &record.event) {
            if !(begun..=ended).contains(&event.time_ns) {
                continue;
            }
            let reported = FlowEvent { time_ns: 0, ..*event };
            ensure!(
                reported == case.explained,
                "from {:?}: {}\nevent {reported:#?}\nexplained {:#?}",
                case.shot.from,
                hex(&case.shot.packet),
                case.explained
            );
            compared += 1;
        }
    }
    Ok(compared)
}

fn covers(kinds: &BTreeMap<String, u64>) -> bool {
    let wanted = [
        (Direction::FromPod, Verdict::Tunnelled),
        (Direction::FromPod, Verdict::Routed),
        (Direction::FromPod, Verdict::Redirected),
        (Direction::FromPod, Verdict::PolicyEgress),
        (Direction::FromPod, Verdict::NoNode),
        (Direction::FromPod, Verdict::TooBig),
        (Direction::FromPod, Verdict::OverlayPort),
        (Direction::FromPod, Verdict::NoDestination),
        (Direction::FromOverlay, Verdict::Redirected),
        (Direction::FromOverlay, Verdict::PolicyIngress),
        (Direction::FromOverlay, Verdict::UnknownNetwork),
        (Direction::FromOverlay, Verdict::OwnerUnknown),
        (Direction::FromOverlay, Verdict::ForeignNode),
        (Direction::FromOverlay, Verdict::NoDestination),
    ];
    let missing: Vec<_> = wanted
        .iter()
        .map(|(direction, verdict)| format!("{} {}", direction.as_str(), verdict.as_str()))
        .filter(|kind| !kinds.contains_key(kind))
        .collect();
    println!("missing: {missing:?}");
    missing.is_empty()
}
