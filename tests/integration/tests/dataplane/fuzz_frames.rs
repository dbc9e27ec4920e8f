//! Runs random and mutated frames through both programs while endpoints, policies and services change: every verdict is
//! the model's, every frame is counted once, and no frame reaches another network.
//!
//! `KNI_FRAMES` sets the number of frames (default 1 000 000, 5 000 000 with `KNI_LONG=1`), `KNI_SEED` repeats a run.

mod addresses;
mod beside;
mod changes;
mod concurrent;
mod explained;
mod generate;
mod masqueraded;
mod mutate;

use std::{collections::BTreeMap, env, fmt, time::Instant};

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, Verdict};
use kni_integration::{
    long,
    model::{Counts, Outcome},
    programs::{INTERFACES, Lockstep, counted, hex},
    require,
};

use self::changes::Changes;

/// Frames between two comparisons of the counters, after which the world changes.
const BATCH: u64 = 250;
/// Per family. Rows are evicted only if hardly any are free; tables are cleared long before.
const MAX_FLOWS: u32 = 65_536;
const FLOWS_LIMIT: usize = 30_000;
const FRAGMENTS_LIMIT: usize = 3_000;

/// The counters differ from the model's after a batch.
#[derive(Debug)]
struct Differs {
    batch: u64,
    why: String,
}

impl fmt::Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after batch {}: {}", self.batch, self.why)
    }
}

impl std::error::Error for Differs {}

#[test]
fn every_verdict_is_the_models() -> Result<()> {
    require!(root, netns, bpf, ip);
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>()).transpose();
    let frames = number("KNI_FRAMES")?.unwrap_or(if long() { 5_000_000 } else { 1_000_000 });
    let seed = number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(4));
    println!("{frames} frames, KNI_SEED={seed}");
    let told = || format!("repeat with KNI_SEED={seed} KNI_FRAMES={frames}");
    match run(seed, frames, None) {
        Err(error) => match error.downcast_ref::<Differs>() {
            // Once more from the same state, comparing after each frame.
            Some(differs) => {
                println!("{differs}");
                run(seed, frames, Some(differs.batch)).with_context(told)?;
                Err(error).with_context(told)
            }
            None => Err(error).with_context(told),
        },
        Ok(()) => Ok(()),
    }
}

fn run(seed: u64, frames: u64, slow_batch: Option<u64>) -> Result<()> {
    let start = Instant::now();
    let mut verdicts = BTreeMap::new();
    let totals = Lockstep::inside("fuzz", MAX_FLOWS, |step| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut changes = Changes::begin(&mut rng, step)?;
        let mut totals = Totals::default();
        for batch in 0..frames.div_ceil(BATCH) {
            let size = BATCH.min(frames - batch * BATCH);
            let mut shown = Vec::new();
            for position in 0..size {
                let shot = generate::shot(&mut rng, step);
                let told = || format!("frame {}: {}", batch * BATCH + position, hex(&shot.frame));
                let fast = the_fast_way(step, &shot).with_context(told)?;
                let outcome = if slow_batch == Some(batch) {
                    let (outcome, kernel) = step.run_counted(shot.seen, &shot.frame).with_context(told)?;
                    let found: Vec<_> = kernel.keys().collect();
                    ensure!(
                        found
                            .iter()
                            .any(|(_, seen, verdict)| *seen == shot.seen.direction && *verdict == outcome.verdict),
                        "{} at {}: the model says {:?}, the kernel counted {found:?}",
                        told(),
                        shot.seen.endpoint,
                        outcome.verdict
                    );
                    outcome
                } else {
                    step.run_seen(shot.seen, &shot.frame).with_context(told)?
                };
                totals.compare(fast, &outcome).with_context(told)?;
                let direction = shot.seen.direction.as_str();
                shown.push((shot, outcome.verdict));
                *verdicts.entry((direction, outcome.verdict)).or_insert(0_u64) += 1;
            }
            totals.frames += size;
            let kernel = step.compare_counters().map_err(|error| Differs {
                batch,
                why: format!("{error}\n{}", suspects(step, &shown)),
            })?;
            totals.check(&kernel)?;
            if step.model.flows.len() > FLOWS_LIMIT || step.model.fragments.len() > FRAGMENTS_LIMIT {
                step.compare_tables()?;
                step.compare_hits()?;
                step.flush()?;
                totals.flushes += 1;
            }
            changes.some(&mut rng, step)?;
            totals.retire(&kernel, &counted(step.programs())?);
        }
        step.compare_tables()?;
        step.compare_hits()?;
        totals.changes = changes.made;
        Ok(totals)
    })?;
    report(&totals, &verdicts, start);
    ensure!(frames < 100_000 || totals.fast > 0, "nothing went the fast way");
    coverage(frames, &verdicts)
}

/// The result of `xdp_pod` for a frame, before `from_pod` processes it.
fn the_fast_way(step: &mut Lockstep, shot: &generate::Shot) -> Result<Option<(u32, Vec<u8>)>> {
    if shot.seen.direction == Direction::FromPod {
        step.run_xdp(shot.seen.endpoint, &shot.frame)
    } else {
        Ok(None)
    }
}

/// The batch's frames that the model counted differently from the kernel: a run with newly chosen backends takes a
/// different course.
fn suspects(step: &Lockstep, shown: &[(generate::Shot, Verdict)]) -> String {
    let kernel = counted(step.programs()).unwrap_or_default();
    let wrong = |shot: &generate::Shot, verdict: Verdict| {
        let key = (shot.seen.endpoint, shot.seen.direction, verdict);
        kernel.get(&key) != step.model.counts.get(&key)
    };
    let told = |(shot, verdict): &(generate::Shot, Verdict)| {
        let (seen, frame) = (shot.seen, hex(&shot.frame));
        format!("{} at {seen:?}: {frame}", verdict.as_str())
    };
    let suspects = shown.iter().filter(|(shot, verdict)| wrong(shot, *verdict)).map(told);
    suspects.take(20).collect::<Vec<_>>().join("\n")
}

/// The kernel's counts over the whole run, including cleared rows of removed endpoints.
#[derive(Debug, Default)]
struct Totals {
    frames: u64,
    /// The part counted by `xdp_pod`.
    fast: u64,
    flushes: u64,
    changes: u64,
    retired: Sums,
}

/// Frames, and redirected frames as counted at the receiver.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    frames: u64,
    sent: u64,
    received: u64,
}

fn sums(counts: &Counts) -> Sums {
    let mut sums = Sums::default();
    for ((_, direction, verdict), (packets, _)) in counts {
        match (direction, verdict) {
            (Direction::ToPod, Verdict::Redirected) => sums.received += packets,
            (Direction::FromPod, Verdict::Redirected) => {
                sums.sent += packets;
                sums.frames += packets;
            }
            _ => sums.frames += packets,
        }
    }
    sums
}

impl Totals {
    /// Checks that `from_pod` redirects every frame of `xdp_pod` in the same way.
    fn compare(&mut self, fast: Option<(u32, Vec<u8>)>, slow: &Outcome) -> Result<()> {
        let Some((receiver, frame)) = fast else { return Ok(()) };
        ensure!(
            (slow.verdict, slow.destination, &slow.frame) == (Verdict::Redirected, Some(receiver), &frame),
            "xdp_pod sends it to {receiver}, from_pod: {slow:?}"
        );
        self.frames += 1;
        self.fast += 1;
        Ok(())
    }

    /// Checks that every frame is counted once, and every redirected one at both ends.
    fn check(&self, kernel: &Counts) -> Result<()> {
        let (now, gone) = (sums(kernel), self.retired);
        ensure!(
            now.frames + gone.frames == self.frames,
            "{} frames, but {} + {} are counted",
            self.frames,
            now.frames,
            gone.frames
        );
        ensure!(
            now.sent + gone.sent == now.received + gone.received,
            "redirected from pods: {now:?} and {gone:?}"
        );
        Ok(())
    }

    fn retire(&mut self, before: &Counts, after: &Counts) {
        let (before, after) = (sums(before), sums(after));
        self.retired.frames += before.frames - after.frames;
        self.retired.sent += before.sent - after.sent;
        self.retired.received += before.received - after.received;
    }
}

fn report(totals: &Totals, verdicts: &BTreeMap<(&str, Verdict), u64>, start: Instant) {
    println!(
        "{} frames, {} of them the fast way, {} changes, {} times emptied, {:.1} s",
        totals.frames,
        totals.fast,
        totals.changes,
        totals.flushes,
        start.elapsed().as_secs_f64()
    );
    for ((direction, verdict), count) in verdicts {
        println!("{direction:<9} {:<24} {count:>9}", verdict.as_str());
    }
}

/// Fails unless every possible verdict occurred: a run that always hits the first check would prove nothing.
fn coverage(frames: u64, verdicts: &BTreeMap<(&str, Verdict), u64>) -> Result<()> {
    if frames < 100_000 {
        return Ok(());
    }
    // No table was full, and no packet passed the uplink or went to another node.
    let never = |verdict: &Verdict| {
        let elsewhere = [Verdict::Masqueraded, Verdict::Tunnelled, Verdict::Routed];
        elsewhere.contains(verdict) || *verdict == Verdict::FlowTableFull || *verdict >= Verdict::MasqueradePorts
    };
    // Verdicts that need several related frames.
    let seldom = [
        Verdict::IcmpFragment,
        Verdict::TupleInUse,
        Verdict::PolicyEgress,
        Verdict::PolicyExternal,
    ];
    let only_from = [
        Verdict::Redirected,
        Verdict::PassedToStack,
        Verdict::Answered,
        Verdict::SourceMac,
        Verdict::DestinationMac,
        Verdict::LinkLocal,
        Verdict::Loopback,
        Verdict::NoRoute,
        Verdict::NoDestination,
        Verdict::DestinationNotReady,
        Verdict::SelfAddressed,
        Verdict::NoService,
        Verdict::NoServicePort,
        Verdict::NoBackend,
        Verdict::NoLocalBackend,
        Verdict::TupleInUse,
    ];
    let only_to = [Verdict::Delivered, Verdict::DestinationAddress, Verdict::HostNotAllowed];
    for verdict in Verdict::ALL.iter().filter(|verdict| !never(verdict)) {
        for (direction, others) in [("from_pod", &only_to[..]), ("to_pod", &only_from)] {
            let seen = verdicts.contains_key(&(direction, *verdict));
            let excused = !seen && seldom.contains(verdict);
            ensure!(
                excused || seen != others.contains(verdict),
                "{direction} {}: {}",
                verdict.as_str(),
                if seen { "is not its verdict" } else { "never happened" }
            );
        }
    }
    Ok(())
}

#[test]
fn the_generator_is_reproducible() {
    let mut frames = [Vec::new(), Vec::new()];
    for list in &mut frames {
        let mut rng = fastrand::Rng::with_seed(7);
        list.extend((0..1000_u32).map(|n| generate::frame(&mut rng, 1 + n % INTERFACES, None)));
    }
    assert_eq!(frames[0], frames[1]);
    let distinct: std::collections::HashSet<_> = frames[0].iter().collect();
    assert!(distinct.len() > 500, "{} distinct frames of 1000", distinct.len());
}
