//! Sends frames while another thread changes policies, endpoints, addresses and services.
//!
//! A frame that meets no change has exactly the model's result. One that meets a change has the result of the state
//! before or after it; while an endpoint comes or goes, packets from and to it may be dropped as well. So a packet that
//! both states allow or deny is allowed or denied, and none reaches an endpoint of another network or one that is gone.
//! Between rounds nothing changes: then tables and counters are the model's, and no row lets packets through that the
//! policies deny.
//!
//! `KNI_FRAMES` sets the number of frames (default 40 000, 200 000 with `KNI_LONG=1`), `KNI_SEED` repeats the choices
//! of a run, but not which frames meet which change.

use std::{
    collections::VecDeque,
    hint,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_common::Verdict;
use kni_integration::{
    frames::{Ip, Link, Payload, TcpFlags},
    long,
    model::{ANYBODY, Allowed, Asked, Endpoint, Enforced, Seen},
    one_cpu::pin,
    programs::{Change, INTERFACES, Lockstep, Mark, Programs, State, action_of, hex},
    require,
};

use super::{
    super::masquerade_claims::cpus,
    addresses::{address4, host_mac, mac},
    beside,
    changes::{Changes, NETWORKS, newcomer},
    explained::{number, of_flow},
    generate,
    generate::Shot,
};

/// Frames of a round, with changes.
const ROUND: u64 = 1_000;
/// Frames after a round, without changes.
const STILL: u64 = 150;
/// Per family.
const MAX_FLOWS: u32 = 4096;
const FLOWS_LIMIT: usize = 300;
/// Changes that are kept for the sender, which is at most two behind.
const KEPT: usize = 8;

/// A change and its states.
struct Made {
    number: u64,
    change: Change,
    during: Vec<State>,
    after: Arc<State>,
}

/// What both threads know.
#[derive(Default)]
struct Shared {
    /// Twice the number of finished changes; odd during a change.
    sequence: AtomicU64,
    /// Frames that were begun.
    begun: AtomicU64,
    pause: AtomicBool,
    paused: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
    /// The last changes.
    made: Mutex<VecDeque<Arc<Made>>>,
    /// Generations that the sender does not know yet.
    marks: Mutex<Vec<Mark>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn made(&self, number: u64) -> Result<Arc<Made>> {
        let made = lock(&self.made);
        let found = made.iter().find(|made| made.number == number);
        found.cloned().context("a change that is kept")
    }

    /// Waits for the beginning of a change, not for long, and then for a part of it.
    fn meet(&self, spins: u32) {
        let is_made = || self.sequence.load(SeqCst) % 2 == 1;
        (0..LOOKS).take_while(|_| !is_made()).for_each(|_| hint::spin_loop());
        (0..spins).for_each(|_| hint::spin_loop());
    }

    /// Waits, unless the changer has ended.
    fn wait(&self, until: impl Fn(&Self) -> bool) -> Result<()> {
        for spins in 0_u64.. {
            if until(self) {
                break;
            }
            ensure!(!self.ended.load(SeqCst), "the changer has ended");
            breathe(spins);
        }
        Ok(())
    }
}

/// Looks for a change before the frame is sent anyway.
const LOOKS: u32 = 500;
/// Looks before another thread gets the CPU.
const GREEDY: u64 = 2_000;

fn breathe(spins: u64) {
    if spins % GREEDY == GREEDY - 1 {
        thread::yield_now();
    }
    hint::spin_loop();
}

fn spin(until: impl Fn() -> bool) {
    for spins in 0.. {
        if until() {
            return;
        }
        breathe(spins);
    }
}

/// What happened.
#[derive(Debug, Default)]
struct Counts {
    alone: u64,
    /// Frames that met a change.
    met: u64,
    /// Of these, the ones to which both states give one result.
    same: u64,
    still: u64,
}

#[test]
fn changes_beside_frames_have_one_of_two_results() -> Result<()> {
    require!(root, netns, bpf, ip);
    let frames = number("KNI_FRAMES")?.unwrap_or(if long() { 200_000 } else { 40_000 });
    let seed = number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(3));
    println!("{frames} frames, KNI_SEED={seed}");
    let begun = Instant::now();
    let (counts, changes) = Lockstep::inside("concurrent", MAX_FLOWS, |step| run(seed, frames, step))
        .with_context(|| format!("KNI_SEED={seed} KNI_FRAMES={frames}"))?;
    println!("{counts:?}, {changes} changes, {:.1} s", begun.elapsed().as_secs_f64());
    ensure!(frames < 40_000 || counts.met > 40, "too few frames met a change");
    Ok(())
}

fn run(seed: u64, frames: u64, step: &mut Lockstep) -> Result<(Counts, u64)> {
    let mut rng = Rng::with_seed(seed);
    Changes::begin(&mut rng, step)?;
    let mut other = step.beside(MAX_FLOWS)?;
    let shared = Shared::default();
    let own = rng.fork();
    let cpus = cpus()?;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let made = pin(cpus[cpus.len() - 1]).and_then(|()| change(own, &mut other, &shared));
            shared.ended.store(true, SeqCst);
            made
        });
        let mut sender = Sender {
            counts: Counts::default(),
            number: 0,
            state: Arc::new(State::of(&step.model)),
            shared: &shared,
            step,
        };
        let sent = pin(cpus[0]).and_then(|()| sender.all(&mut rng, frames));
        shared.stop.store(true, SeqCst);
        let changes = thread.join().expect("the changer does not panic");
        match (sent, changes) {
            (Ok(()), changes) => Ok((sender.counts, changes?)),
            (Err(error), changes) => Err(error.context(format!("the changer: {changes:?}"))),
        }
    })
}

/// A policy set that allows everything.
const SET: u32 = 100;

/// Policies come and go that allow everything: nothing is ever dropped.
#[test]
fn a_packet_that_all_policies_allow_is_never_dropped() -> Result<()> {
    require!(root, netns, bpf, ip);
    let frames = number("KNI_FRAMES")?.unwrap_or(if long() { 2_000_000 } else { 60_000 });
    let changes = Lockstep::inside("allowed", MAX_FLOWS, |step| {
        Changes::begin(&mut Rng::with_seed(1), step)?;
        for asked in [Asked::Egress, Asked::Ingress, Asked::External] {
            step.allow(SET, ANYBODY, asked, Allowed::Everything, 1)?;
        }
        step.configure(beside::LIFETIMES, 0, 0)?;
        let mut other = step.beside(MAX_FLOWS)?;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let mut made = 0;
                while !stop.load(SeqCst) {
                    let (id, policy) = (5 + made % 2, made / 2 % 2 * SET);
                    let enforced = Enforced {
                        policy,
                        ..Enforced::default()
                    };
                    other.enforce(id, enforced)?;
                    made += 1;
                }
                Ok(made)
            });
            let sent = all_pass(step.programs(), frames);
            stop.store(true, SeqCst);
            let changes: Result<u32> = thread.join().expect("the changer does not panic");
            sent?;
            changes
        })
    })?;
    println!("{frames} frames, {changes} changes");
    Ok(())
}

/// Packets between the two pods of the last network, to the outside and from there, which are all evaluated anew.
fn all_pass(programs: &Programs, frames: u64) -> Result<()> {
    let outside = Ipv4Addr::new(198, 51, 100, 9).into();
    let (one, two) = (address4(3).into(), address4(2).into());
    let frame = |id: u32, inward: bool, from: IpAddr, to: IpAddr| {
        let link = if inward {
            Link::new(host_mac(id), mac(id))
        } else {
            Link::new(mac(id), host_mac(id))
        };
        link.frame(&Ip::new(from, to).packet(&Payload::tcp(4000, 80, TcpFlags::SYN)))
    };
    let shots = [
        (Seen::from_pod(5), frame(5, false, one, two), Verdict::Redirected),
        (Seen::from_pod(5), frame(5, false, one, outside), Verdict::PassedToStack),
        (Seen::from_pod(6), frame(6, false, two, outside), Verdict::PassedToStack),
        (Seen::to_pod(6, 2), frame(6, true, outside, two), Verdict::Delivered),
    ];
    for number in 0..frames {
        let (seen, frame, expected) = &shots[usize::try_from(number % 4)?];
        let ran = programs.run_as(*seen, frame, 0)?;
        ensure!(ran.action == action_of(*expected), "frame {number}, {seen:?}: dropped");
    }
    Ok(())
}

/// Makes changes until the sender has finished. Returns their number.
fn change(mut rng: Rng, step: &mut Lockstep, shared: &Shared) -> Result<u64> {
    let mut number = 0;
    while !shared.stop.load(SeqCst) {
        if shared.pause.load(SeqCst) {
            shared.paused.store(true, SeqCst);
            let released = || !shared.pause.load(SeqCst) || shared.stop.load(SeqCst);
            spin(released);
            shared.paused.store(false, SeqCst);
            continue;
        }
        let Some(change) = any(&mut rng, step) else { continue };
        let (during, after) = change.foresee(&step.model);
        number += 1;
        let made = Made {
            number,
            change,
            during,
            after: Arc::new(after),
        };
        let made = Arc::new(made);
        {
            let mut kept = lock(&shared.made);
            kept.push_back(Arc::clone(&made));
            if kept.len() > KEPT {
                kept.pop_front();
            }
        }
        shared.sequence.store(2 * number - 1, SeqCst);
        step.change(&made.change)?;
        lock(&shared.marks).extend(step.marks()?);
        shared.sequence.store(2 * number, SeqCst);
        // No frame meets two changes.
        let frames = shared.begun.load(SeqCst) + rng.u64(1..4);
        let free = || shared.begun.load(SeqCst) >= frames || shared.pause.load(SeqCst) || shared.stop.load(SeqCst);
        spin(free);
    }
    Ok(number)
}

/// Any change that is possible now.
fn any(rng: &mut Rng, step: &Lockstep) -> Option<Change> {
    let id = rng.u32(1..=INTERFACES);
    let world = &step.model.world;
    let endpoint = world.endpoint(id).cloned();
    match (rng.u32(0..24), endpoint) {
        (0..=11, Some(_)) => {
            // Policy and identity are read apart: only one of them changes.
            let (before, to) = (world.enforced(id)?, beside::enforced(rng));
            let next = if rng.bool() {
                Enforced {
                    policy: to.policy,
                    ..before
                }
            } else {
                Enforced {
                    policy: before.policy,
                    ..to
                }
            };
            Some(Change::Enforce(id, next))
        }
        (12 | 13, Some(endpoint)) => Some(Change::Publish(id, endpoint)),
        (14, Some(endpoint)) => {
            let host_access = !endpoint.host_access;
            Some(Change::Publish(
                id,
                Endpoint {
                    host_access,
                    ..endpoint
                },
            ))
        }
        (15, Some(_)) => Some(Change::Withdraw(id)),
        (16 | 17, _) => {
            let (prefix, identity) = beside::identity(rng);
            Some(Change::Identify(rng.u32(1..=NETWORKS), prefix, identity))
        }
        (18..=21, _) => {
            let front = beside::front(rng, NETWORKS);
            let service = beside::service(rng, world, &front);
            Some(Change::Serve(front, service))
        }
        (22, _) => {
            let front = beside::front(rng, NETWORKS);
            world
                .services
                .fronts
                .contains_key(&front)
                .then_some(Change::Unserve(front))
        }
        (_, None) => Some(Change::Publish(id, newcomer(rng, world, id)?)),
        (_, Some(_)) => None,
    }
}

struct Sender<'a> {
    counts: Counts,
    /// The number of the change after which the model's state is.
    number: u64,
    state: Arc<State>,
    shared: &'a Shared,
    step: &'a mut Lockstep,
}

impl Sender<'_> {
    fn all(&mut self, rng: &mut Rng, frames: u64) -> Result<()> {
        let mut sent = 0;
        while sent < frames {
            for _ in 0..ROUND {
                self.one(rng)?;
            }
            self.still(rng)?;
            sent += ROUND + STILL;
        }
        Ok(())
    }

    fn one(&mut self, rng: &mut Rng) -> Result<()> {
        let shot = self.shot(rng);
        let Shot { seen, frame } = &shot;
        if rng.bool() {
            self.shared.meet(rng.u32(0..500));
        }
        self.shared.begun.fetch_add(1, SeqCst);
        let before = self.shared.sequence.load(SeqCst);
        let ran = self.step.run_kernel(*seen, frame)?;
        let after = self.shared.sequence.load(SeqCst);
        let (first, last) = (before / 2, after.div_ceil(2));
        ensure!(last - first <= 1, "a frame met the changes {first} to {last}");
        self.advance(first)?;
        if first == last {
            self.counts.alone += 1;
            let told = || format!("after change {last}");
            self.step.ran_alone(*seen, frame, &ran).with_context(told)?;
            return Ok(());
        }
        let made = self.shared.made(last)?;
        let states: Vec<&State> = [&*self.state]
            .into_iter()
            .chain(&made.during)
            .chain([&*made.after])
            .collect();
        let same = self
            .step
            .ran_between(*seen, frame, &ran, &states, made.change.interrupted())
            .with_context(|| format!("during change {last}: {:?}", made.change))?;
        self.counts.met += 1;
        self.counts.same += u64::from(same.is_some());
        self.resynchronize()
    }

    /// A packet of a flow, or any.
    fn shot(&mut self, rng: &mut Rng) -> Shot {
        let of_flow = if rng.bool() { of_flow(rng, self.step) } else { None };
        of_flow.map_or_else(|| generate::shot(rng, self.step), |(shot, _)| shot)
    }

    /// Lets the model continue after a change.
    fn advance(&mut self, number: u64) -> Result<()> {
        if number != self.number {
            self.state = Arc::clone(&self.shared.made(number)?.after);
            self.number = number;
            self.step.enter(&self.state);
            self.learn();
        }
        Ok(())
    }

    fn learn(&mut self) {
        let marks: Vec<Mark> = lock(&self.shared.marks).drain(..).collect();
        self.step.learn(&marks);
    }

    /// Copies the tables to the model; where they have a new generation, after the end of the change.
    fn resynchronize(&mut self) -> Result<()> {
        if self.step.resynchronize()? {
            return Ok(());
        }
        self.shared.wait(|shared| shared.sequence.load(SeqCst) % 2 == 0)?;
        self.learn();
        ensure!(self.step.resynchronize()?, "a row has an unknown generation");
        Ok(())
    }

    /// Stops the changes, compares everything, and runs some frames.
    fn still(&mut self, rng: &mut Rng) -> Result<()> {
        self.shared.pause.store(true, SeqCst);
        self.shared.wait(|shared| shared.paused.load(SeqCst))?;
        self.advance(self.shared.sequence.load(SeqCst) / 2)?;
        self.learn();
        self.step.compare_tables().context("after a round")?;
        let unjustified = self.step.model.unjustified();
        let rows: Vec<_> = unjustified
            .iter()
            .map(|flow| (flow, self.step.model.flows[flow]))
            .collect();
        ensure!(rows.is_empty(), "flows that the policies deny: {rows:#?}");
        self.step.recount()?;
        for _ in 0..STILL {
            let Shot { seen, frame } = self.shot(rng);
            let told = || format!("without changes: {}", hex(&frame));
            self.step.run_seen(seen, &frame).with_context(told)?;
            self.counts.still += 1;
        }
        self.step.compare_counters()?;
        self.step.compare_hits()?;
        self.step.compare_tables()?;
        if self.step.model.flows.len() > FLOWS_LIMIT {
            self.step.flush()?;
        }
        self.shared.pause.store(false, SeqCst);
        self.shared.wait(|shared| !shared.paused.load(SeqCst))
    }
}
