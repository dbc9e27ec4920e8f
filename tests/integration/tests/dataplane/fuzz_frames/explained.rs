//! Compares explanations with what the programs then do with the very packet: verdict, rules, receiver, translation.
//!
//! `KNI_CASES` sets the number of packets (default 3 000, 10 000 with `KNI_LONG=1`), `KNI_SEED` repeats a run.

use std::{
    collections::BTreeMap,
    env,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_common::{
    Direction, Verdict,
    address::from_ip,
    counter::HitKey,
    event::{FlowEvent, PolicyTrail},
    policy::{EGRESS, EXTERNAL, INGRESS},
};
use kni_dataplane::FlowRecord;
use kni_integration::{
    eventually_sync,
    frames::{Ip, Link, Payload},
    long,
    model::{Entry, Flow, Outcome, Seen},
    patience,
    programs::{Lockstep, hex, runnable},
    require,
};
use nix::time::{ClockId, clock_gettime};

use super::{
    addresses::{host_mac, mac},
    beside,
    changes::Changes,
    generate,
    generate::Shot,
    mutate,
};

/// Packets between two changes of the world.
const BATCH: u64 = 100;
/// Per family.
const MAX_FLOWS: u32 = 8192;
const FLOWS_LIMIT: usize = 800;
/// Explanations of a packet whose backend is chosen at random, so that all backends occur.
const DRAWS: usize = 64;
/// Events of one CPU, endpoint and window: no event of a case is suppressed.
const ALL_EVENTS: u32 = u32::MAX;
/// The reader of events looks every 50 ms.
const LOOK: Duration = Duration::from_millis(100);
/// The sender of fences.
const FENCED: u32 = 1;

/// The ordinal of a default deny among the hits.
const DEFAULT_DENY: u16 = u16::MAX;

/// A packet, its explanations and what happened.
struct Case {
    shot: Shot,
    /// The flow's row before the run, for packets of a flow.
    row: Option<(Entry, bool)>,
    /// More than one where a backend is chosen at random.
    explained: Vec<FlowEvent>,
    outcome: Outcome,
    hits: BTreeMap<HitKey, u64>,
    /// `CLOCK_MONOTONIC` in nanoseconds before and after the run.
    times: [u64; 2],
}

pub(super) fn number(name: &str) -> Result<Option<u64>> {
    Ok(env::var(name).ok().map(|text| text.parse::<u64>()).transpose()?)
}

#[test]
fn an_explanation_is_what_the_programs_do() -> Result<()> {
    require!(root, netns, bpf, ip);
    let cases = number("KNI_CASES")?.unwrap_or(if long() { 10_000 } else { 3_000 });
    let seed = number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(2));
    println!("{cases} packets, KNI_SEED={seed}");
    let begun = Instant::now();
    let kinds = Lockstep::inside("explained", MAX_FLOWS, |step| run(seed, cases, step))
        .with_context(|| format!("repeat with KNI_SEED={seed} KNI_CASES={cases}"))?;
    println!("{:.1} s", begun.elapsed().as_secs_f64());
    for (kind, count) in &kinds {
        println!("{kind:<40} {count:>7}");
    }
    ensure!(cases < 10_000 || covers(&kinds), "too few kinds of packets");
    Ok(())
}

fn run(seed: u64, cases: u64, step: &mut Lockstep) -> Result<BTreeMap<String, u64>> {
    let mut rng = Rng::with_seed(seed);
    let mut changes = Changes::begin(&mut rng, step)?;
    let mut kinds = BTreeMap::new();
    for batch in 0..cases.div_ceil(BATCH) {
        let limit = step.model.flows_per_endpoint;
        step.configure(beside::LIFETIMES, limit, ALL_EVENTS)?;
        let size = BATCH.min(cases - batch * BATCH);
        let all: Vec<Case> = (0..size).map(|_| case(&mut rng, step)).collect::<Result<_>>()?;
        step.compare_counters()?;
        step.compare_hits()?;
        let events = events(step)?;
        compare(&all, &events, &mut kinds)?;
        if step.model.flows.len() > FLOWS_LIMIT {
            step.compare_tables()?;
            step.flush()?;
        }
        changes.some(&mut rng, step)?;
    }
    Ok(kinds)
}

/// The events of the frames so far: those before the event of a last frame, which is dropped. There are two rings,
/// which are read one after the other: events that were there before one reading are complete with the next one.
fn events(step: &mut Lockstep) -> Result<Vec<FlowRecord>> {
    let fence = Ip::new(Ipv4Addr::new(192, 0, 2, 99).into(), Ipv4Addr::new(192, 0, 2, 98).into());
    let fence = Link::new(mac(FENCED), host_mac(FENCED)).frame(&fence.packet(&Payload::udp(9, 9, b"fence")));
    let (mut events, before) = (Vec::new(), now()?);
    for _reading in 0..2 {
        step.open_event_gates()?;
        let sent = now()?;
        let outcome = step.run(Direction::FromPod, FENCED, &fence)?;
        ensure!(outcome.verdict.is_drop(), "{outcome:?}");
        eventually_sync(patience(), || {
            events.extend(step.events(LOOK)?);
            let found = events.iter().any(|record: &FlowRecord| record.event.time_ns >= sent);
            ensure!(found, "the last frame has no event");
            Ok(())
        })?;
    }
    events.retain(|record| record.event.time_ns < before);
    Ok(events)
}

fn case(rng: &mut Rng, step: &mut Lockstep) -> Result<Case> {
    let of_flow = if rng.bool() { of_flow(rng, step) } else { None };
    let (shot, row) = match of_flow {
        Some((shot, row)) => (shot, Some(row)),
        None => (generate::shot(rng, step), None),
    };
    let told = || format!("{:?}: {}", shot.seen, hex(&shot.frame));
    let explain = |step: &Lockstep| {
        let explanation = step.programs().explain(shot.seen, &shot.frame);
        explanation.map(|explanation| explanation.event).with_context(told)
    };
    let mut explained = vec![explain(step)?];
    if explained[0].service != 0 {
        for _ in 0..DRAWS {
            let other = explain(step)?;
            if !explained.contains(&other) {
                explained.push(other);
            }
        }
    }
    step.open_event_gates()?;
    let hits = step.model.hits.clone();
    let begun = now()?;
    let outcome = step.run_seen(shot.seen, &shot.frame)?;
    let times = [begun, now()?];
    let mut more = step.model.hits.clone();
    more.retain(|key, count| {
        *count -= hits.get(key).copied().unwrap_or(0);
        *count > 0
    });
    Ok(Case {
        shot,
        row,
        explained,
        outcome,
        hits: more,
        times,
    })
}

fn now() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(u64::try_from(Duration::from(time).as_nanos())?)
}

/// A packet of a flow in the tables, mutated or not, with its row and whether the packet is a reply.
pub(super) fn of_flow(rng: &mut Rng, step: &Lockstep) -> Option<(Shot, (Entry, bool))> {
    let mut keys: Vec<Flow> = step.model.flows.keys().copied().collect();
    keys.sort_unstable();
    let key = *keys.get(rng.usize(0..keys.len().max(1)))?;
    let entry = step.model.flows[&key];
    let from = entry.only_from.unwrap_or_else(|| rng.usize(0..2));
    let flow = if from == 0 { key } else { key.reversed() };
    let seen = match (entry.ends[from].endpoint(), entry.ends[1 - from].endpoint()) {
        (Some(sender), _) => Seen::from_pod(sender),
        (None, Some(receiver)) => Seen::to_pod(receiver, if rng.bool() { 0 } else { 2 }),
        (None, None) => return None,
    };
    let mut frame = generate::packet_of(rng, seen, &flow);
    if rng.u32(0..4) == 0 {
        mutate::some(rng, &mut frame);
    }
    if !runnable(&frame) {
        return None;
    }
    Some((Shot { seen, frame }, (entry, entry.opened_by != from)))
}

/// Assigns the events to the packets by time, and compares.
fn compare(cases: &[Case], events: &[FlowRecord], kinds: &mut BTreeMap<String, u64>) -> Result<()> {
    let mut assigned = 0;
    for case in cases {
        let [begun, ended] = case.times;
        let own: Vec<&FlowEvent> = events
            .iter()
            .map(|record| &record.event)
            .filter(|event| (begun..=ended).contains(&event.time_ns))
            .collect();
        assigned += own.len();
        let told = || {
            let (seen, frame) = (case.shot.seen, hex(&case.shot.frame));
            let (outcome, explained) = (&case.outcome, &case.explained);
            format!("{seen:?}: {frame}\n{outcome:?}\nevents {own:#?}\nexplained {explained:#?}")
        };
        ensure!(own.len() <= 1, "several events: {}", told());
        let event = own.first().copied();
        let is_forwarded = !case.outcome.verdict.is_drop();
        ensure!(event.is_some() || is_forwarded, "a drop without an event: {}", told());
        let mut differences = Vec::new();
        for explained in &case.explained {
            match agree(explained, case, event) {
                Ok(()) => {
                    differences.clear();
                    break;
                }
                Err(difference) => differences.push(difference.to_string()),
            }
        }
        ensure!(differences.is_empty(), "{}\n{}", differences.join("\n"), told());
        *kinds.entry(kind(case, event.is_some())).or_default() += 1;
    }
    ensure!(
        assigned == events.len(),
        "{} events of no packet",
        events.len() - assigned
    );
    Ok(())
}

fn agree(explained: &FlowEvent, case: &Case, event: Option<&FlowEvent>) -> Result<()> {
    let outcome = &case.outcome;
    let verdict = Verdict::from_code(explained.verdict).context("no verdict")?;
    ensure!(
        verdict == outcome.verdict,
        "explained as {}, but it was {}",
        verdict.as_str(),
        outcome.verdict.as_str()
    );
    ensure!(
        explained.length == u32::try_from(case.shot.frame.len())?,
        "another length"
    );
    if let Some(event) = event {
        let reported = FlowEvent { time_ns: 0, ..*event };
        ensure!(*explained == reported, "explained differs from the event");
    }
    if verdict == Verdict::Redirected {
        ensure!(
            Some(explained.peer) == outcome.destination,
            "explained for endpoint {}, sent to {:?}",
            explained.peer,
            outcome.destination
        );
    }
    if let Some((source, destination)) = forwarded_with(verdict, explained, &outcome.frame) {
        let told = [explained.translated_source, explained.translated_destination];
        ensure!(
            told == [from_ip(source), from_ip(destination)],
            "explained as translated to {told:?}, sent from {source} to {destination}"
        );
    }
    let hits = hits_of(explained, verdict);
    ensure!(hits == case.hits, "explained by {hits:?}, counted {:?}", case.hits);
    Ok(())
}

/// The addresses of a forwarded packet. Not of ICMP, whose errors are translated with the packet that they quote.
fn forwarded_with(verdict: Verdict, explained: &FlowEvent, frame: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let moves = [Verdict::Redirected, Verdict::PassedToStack, Verdict::Delivered].contains(&verdict);
    if !moves || [1, 58].contains(&explained.protocol) {
        return None;
    }
    let v4 = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(frame.get(at..at + 4)?).ok()?).into());
    let v6 = |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(frame.get(at..at + 16)?).ok()?).into());
    match frame.get(12..14)? {
        [0x08, 0x00] => Some((v4(26)?, v4(30)?)),
        [0x86, 0xdd] => Some((v6(22)?, v6(38)?)),
        _ => None,
    }
}

/// The rules that the explanation names, as the programs count them.
fn hits_of(explained: &FlowEvent, verdict: Verdict) -> BTreeMap<HitKey, u64> {
    let trails = [
        (explained.egress, EGRESS, Verdict::PolicyEgress),
        (explained.ingress, INGRESS, Verdict::PolicyIngress),
        (explained.beyond, EXTERNAL, Verdict::PolicyExternal),
    ];
    let mut hits = BTreeMap::new();
    for (PolicyTrail { set, rule, ordinal, .. }, direction, denial) in trails {
        if set == 0 || rule == 0 && verdict != denial {
            continue;
        }
        let ordinal = u16::try_from(ordinal).expect("a small number");
        let key = HitKey {
            set,
            rule,
            ordinal: if rule == 0 { DEFAULT_DENY } else { ordinal },
            direction: u16::try_from(direction).expect("a small number"),
        };
        *hits.entry(key).or_default() += 1;
    }
    hits
}

fn kind(case: &Case, has_event: bool) -> String {
    let verdict = case.outcome.verdict;
    let direction = case.shot.seen.direction.as_str();
    if verdict.is_drop() {
        return format!("{direction} {}", verdict.as_str());
    }
    let row = match &case.row {
        _ if has_event => "opened",
        _ if !case.hits.is_empty() => "judged again",
        None => "",
        Some((entry, _)) if entry.closed => "closed",
        Some((entry, is_reply)) => match (entry.only_from.is_some(), is_reply) {
            (true, true) => "translated reply",
            (true, false) => "translated",
            (false, true) => "reply",
            (false, false) => "direct",
        },
    };
    format!("{direction} {} {row}", verdict.as_str())
}

/// Whether packets without a flow, of each kind of flow, and for a number of reasons dropped ones occurred.
fn covers(kinds: &BTreeMap<String, u64>) -> bool {
    let from = Direction::FromPod.as_str();
    let to = Direction::ToPod.as_str();
    let rows = [
        "opened",
        "judged again",
        "closed",
        "translated",
        "translated reply",
        "reply",
        "direct",
    ];
    let wanted = rows.iter().map(|row| format!("{from} redirected {row}"));
    let wanted = wanted.chain(["opened", "reply", "direct"].map(|row| format!("{to} delivered {row}")));
    let missing: Vec<String> = wanted.filter(|kind| !kinds.contains_key(kind)).collect();
    let reasons = kinds.keys().filter(|kind| kind.split(' ').count() == 2).count();
    println!("missing: {missing:?}; {reasons} reasons");
    missing.is_empty() && reasons >= 30
}
